"""spatialops/interpolate."""

import torch.nn.functional as F
from kbx_env.tasks._varied import LARGE, longs, sized

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Cost, Literal, Normal, Outlier, Paper, T, task

SMALL = {"N": 2, "C": 3, "H": 8, "W": 8}
IMAGE = {"N": 2, "C": 5, "H": 23, "W": 31}


def _case(axes, mode, size=None, align=None, scale=None, **more):
    args = {"mode": mode, "align_corners": align, "size": size, "scale_factor": scale}
    return Case(axes, {k: v for k, v in args.items() if v is not None}, **more)


def _any_size(p, s, **more):
    # Where an axis gets twice its length, torch's nearest pixel is that of the factor 2, whatever the factor is: no factor here
    # does that to two pixels or more. And no position is a whole number, on whose fp32 rounding the nearest pixel would depend.
    mode = p.among("nearest", "bilinear", "bicubic")
    size = (p.whole(1, 25), p.among(p.whole(1, 25), p.whole(140, 150) if s["N"] < 9 else 25))
    scaled = p.chance(0.4)
    factor = p.among(1.709, 2.571, 0.713) if scaled else None
    return p.like(s, {"mode": mode, "size": None if scaled else size, "scale_factor": factor,
                      "align_corners": None if mode == "nearest" else p.among(None, True, False)}, **more)  # fmt: skip


@task(
    difficulty=3,
    takes={"input": T("N C H W")},
    truth=Close(ulps=32),
    # The timed results have four times as many pixels.
    cost=Cost(flops="32 * numel(input)", reads={"input": "used(input)"}, least="numel(input)"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="Every mode, alignment and direction on random inputs; timed in all three modes, as published bilinear "
    "only. Nearest sizes are such that the fp32 rounding of the position does not matter.",
    cases=(
        _case({"N": 1, "C": 1, "H": 2, "W": 2}, "bilinear", (3, 4), draw=Literal(1, 2, 4, 8)),
        Case(SMALL | {"H": 4, "W": 4}, {"size": (8, 8)}),
        _case(SMALL, "bilinear", scale=2.0, align=False),
        _case(SMALL, "bicubic", (16, 16), False),
        _case(IMAGE, "nearest", (40, 13), draw=Outlier()),
        _case(IMAGE, "nearest", scale=1.6),
        _case(IMAGE, "bilinear", (50, 77), draw=Outlier()),
        _case(IMAGE, "bilinear", (11, 64), True, draw=Normal(mean=10)),
        _case(IMAGE, "bilinear", scale=0.7),
        _case(IMAGE, "bicubic", (37, 20), draw=Outlier()),
        _case(IMAGE, "bicubic", (64, 45), True),
        _case(IMAGE, "bicubic", scale=1.3, align=False),
        _case(SMALL | {"H": 1, "W": 9}, "bilinear", (5, 1), True),
        _case(SMALL, "bicubic", (1, 3), True),
        # An axis of two pixels in the result.
        _case(IMAGE, "bilinear", (2, 9), True),
        _case(SMALL, "bicubic", (5, 2), True),
        # fp16 has no odd number above 2048.
        _case({"N": 1, "C": 1, "H": 9, "W": 3}, "bilinear", (2500, 3), False),
        _case({"N": 1, "C": 1, "H": 3, "W": 9}, "bilinear", (3, 2500), True),
        _case(IMAGE, "bilinear", (46, 30), layouts={"input": "transposed"}),
        _case(IMAGE, "nearest", scale=2.0, layouts={"input": "channels_last"}),
        _case(SMALL | {"N": 0}, "bilinear", (5, 6)),
        _case({"N": 3, "C": 2, "H": 19, "W": 10}, "bilinear", (33, 27), held=True),
        _case({"N": 1, "C": 7, "H": 13, "W": 17}, "bicubic", scale=2.4, align=True, held=True),
    ),
    varied=(
        *sized(_any_size, longs({"N": (1, 3), "C": (1, 5), "H": (2, 14), "W": (2, 14)}, {"N": 34, "H": 140, "W": 140})),
        *sized(lambda p, s: _any_size(p, s, draw=LARGE), (lambda p: {"N": 1, "C": 2, "H": p.whole(5, 9), "W": p.whole(5, 9)},)),
    ),
    timed=(
        *(_case({"N": 16, "C": 3, "H": n, "W": n}, "bilinear", (2 * n, 2 * n), False) for n in (512, 1024)),
        _case({"N": 16, "C": 3, "H": 1024, "W": 1024}, "nearest", (2048, 2048)),
        _case({"N": 16, "C": 3, "H": 512, "W": 512}, "bicubic", (1024, 1024), False),
    ),
)
def interpolate(input, size=None, scale_factor=None, mode="nearest", align_corners=None):
    """Resize the last two axes of fp32 images: input (N, C, H, W) -> (N, C, oH, oW).

    Example: interpolate([[[[1, 2], [3, 5]]]], (2, 4), mode="bilinear") = [[[[1, 1.25, 1.75, 2], [3, 3.5, 4.5, 5]]]]

    Either size = (oH, oW) or the float scale_factor f is given, the other is None; with f, oH = floor(H * f), oW =
    floor(W * f). Along each axis, of n pixels resized to o, with ratio r = n / o (1 / f where scale_factor is given),
    output i looks at
    mode "nearest": pixel floor(i * r), at most n - 1. align_corners is not given;
    mode "bilinear": position q = max(0, (i + 0.5) * r - 0.5), between pixels floor(q) and the next one (at most n - 1),
    with weights 1 - t and t, t = q - floor(q);
    mode "bicubic": q = (i + 0.5) * r - 0.5 without the maximum, four pixels floor(q) - 1 .. floor(q) + 2, each index
    clamped to [0, n - 1], weighted by the cubic convolution kernel with a = -0.75.
    align_corners True (None means False) replaces q by i * (n - 1) / (o - 1), or 0 where o = 1, also with scale_factor.
    No antialiasing. With scale_factor no tested axis keeps its length, and only f = 2 doubles one. fp32 throughout. The
    result is a new tensor; input may have any strides; N may be 0.
    """
    return F.interpolate(input, size, scale_factor, mode, align_corners)
