"""spatialops/grid_sample."""

import torch.nn.functional as F
from kbx_env.tasks._varied import LARGE, TINY, longs, sized

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Choice, Cost, Normal, Outlier, Paper, T, Uniform, task

FLAT = {"N": 1, "C": 3, "*s": (4, 4), "*g": (2, 2), "D": 2}
IMAGE = {"N": 2, "C": 3, "*s": (32, 32), "*g": (16, 16), "D": 2}
CUBE = {"N": 1, "C": 3, "*s": (4, 4, 4), "*g": (2, 2, 2), "D": 3}
WIDE = {"grid": Uniform(-1.9, 1.9)}
# Coordinates of nearest cases keep clear of the half-way points, where fp32 rounding would decide the pixel.
CLEAR = {"grid": Choice(-1.83, -1.17, -0.93, -0.61, -0.07, 0.11, 0.43, 0.86, 1.21, 1.57)}


def _case(axes, mode="bilinear", padding="zeros", align=False, **more):
    return Case(axes, {"mode": mode, "padding_mode": padding, "align_corners": align}, **more)


def _smooth(p):
    d = p.among(2, 2, 3)
    s, g = (tuple(p.whole(1, 9 if d == 2 else 5) for _ in range(d)) for _ in range(2))
    args = {"mode": "bilinear", "padding_mode": p.among("zeros", "border", "reflection"), "align_corners": p.chance()}
    return p.like(
        {"N": p.whole(1, 4), "C": p.whole(1, 9), "*s": s, "*g": g, "D": d}, args, draws={"grid": Uniform(-1.9, 1.9)}
    )


def _wide(p, s):
    axes = {"N": s["N"], "C": s["C"], "*s": (s["h"], s["w"]), "*g": (s["i"], s["j"]), "D": 2}
    # Declared pixels are of order one.
    draws = {"input": Normal(scale=p.among(1e-3, 50)), "grid": Uniform(-1, 1)}
    return p.like(axes, {"mode": "bilinear"}, draws=draws)


def _far_outside(p, s):
    """Reflections that mirror positions many times."""
    axes = {"N": 1, "C": 2, "*s": (s["h"], s["w"]), "*g": (5, 6), "D": 2}
    return p.like(axes, {"mode": "bilinear", "padding_mode": "reflection"}, draws={"grid": Uniform(-40, 40)})


def _at_the_centre(p, s):
    axes = {"N": 1, "C": 2, "*s": (s["h"], s["w"]), "*g": (5, 6), "D": 2}
    return p.like(axes, {"mode": "bilinear"}, draws={"input": LARGE, "grid": TINY})


@task(
    difficulty=4,
    takes={"input": T("N C *s"), "grid": T("N *g D", draw=Uniform(-1, 1))},
    truth=Close(ulps=64),
    cost=Cost(flops="30 * numel(grid)", reads={"input": "used(input)"}, least="numel(grid)"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="All modes, paddings and alignments on random grids, also outside [-1, 1]; nearest cases keep clear of "
    "half-way points; argument errors are not judged.",
    cases=(
        Case(FLAT, draw=Uniform()),
        _case(FLAT, "nearest", "border", draws=CLEAR),
        # Places that are reflected many times.
        _case(FLAT, padding="reflection", draws={"grid": Choice(403.25, 404.5, -405.5, -406.25, 407.5)}),
        _case(CUBE, padding="reflection", draws=WIDE),
        _case(CUBE | {"*g": (5, 6, 7)}, "nearest", align=True, draws=CLEAR),
        _case(IMAGE),
        _case(IMAGE, draw=Outlier(), align=True),
        _case(IMAGE, padding="border", draws=WIDE),
        _case(IMAGE, padding="reflection", align=True, draws=WIDE),
        _case(IMAGE, padding="reflection", draws=WIDE),
        _case(IMAGE | {"*s": (7, 13), "*g": (5, 9)}, padding="border", align=True, draws=WIDE),
        _case(IMAGE | {"*s": (6, 11)}, "nearest", "reflection", draws=CLEAR),
        _case(CUBE | {"*s": (3, 5, 6), "*g": (4, 3, 5)}, padding="border", draws=WIDE),
        _case(IMAGE | {"*s": (9, 8)}, layouts={"input": "channels_last", "grid": "strided"}),
        # Axes of one and of two pixels.
        _case(FLAT | {"*s": (1, 2), "*g": (5, 4)}, padding="reflection", align=True, draws=WIDE),
        _case(FLAT | {"N": 0}),
        _case(IMAGE | {"C": 5, "*s": (19, 10), "*g": (7, 21)}, draws=WIDE, held=True),
        _case(CUBE | {"*s": (5, 3, 6), "*g": (3, 2, 4)}, "nearest", "border", draws=CLEAR, held=True),
    ),
    varied=(
        _smooth,
        sized(
            _wide,
            longs(
                dict.fromkeys("NC", (1, 2)) | dict.fromkeys("hwij", (2, 4)),
                {"N": 34, "C": 70, "h": 130, "w": 270, "i": 130, "j": 270},
                most=5_000_000,
            ),
        ),
        *sized(_wide, (lambda p: {"N": 1, "C": p.whole(1, 2), "h": 9, "w": 11, "i": p.whole(40, 44), "j": p.whole(56, 60)},)),
        # fp16 has no odd number above 2048.
        *sized(_wide, (lambda p: {"N": 1, "C": 1, "h": 2 * p.whole(1025, 1400) + 1, "w": 5, "i": p.whole(5, 9), "j": 7},)),
        *sized(_far_outside, (lambda p: {"h": p.whole(4, 9), "w": p.whole(4, 9)},)),
        *sized(_at_the_centre, (lambda p: {"h": 2 * p.whole(9, 15), "w": 2 * p.whole(9, 15)},)),
    ),
    timed=tuple(Case({"N": 16, "C": 3, "*s": (n, n), "*g": (n // 2, n // 2), "D": 2}) for n in (512, 1024, 2048)),
)
def grid_sample(input, grid, mode="bilinear", padding_mode="zeros", align_corners=False):
    """Sample fp32 images at normalised positions: input (N, C, H, W), grid (N, Ho, Wo, 2) -> (N, C, Ho, Wo).

    Example: grid_sample([[[[1, 2], [3, 4]]]], [[[[0, 0], [-0.5, 0.5]]]]) = [[[[2.5, 3]]]]

    Also 5-D: input (N, C, D, H, W), grid (N, Do, Ho, Wo, 3). The last axis of grid holds (x, y[, z]); x runs along W,
    y along H, z along D. -1 and 1 are the centres of the border pixels if align_corners
    (pixel = (g + 1) / 2 * (size - 1)), else the image's edges (pixel = ((g + 1) * size - 1) / 2).

    padding_mode: "zeros" reads 0 outside; "border" clamps the pixel to [0, size - 1]; "reflection" mirrors it at the
    border pixels (align_corners) or edges as often as needed, then clamps. mode: "bilinear" (trilinear in 5-D)
    weights the 2^d neighbours; "nearest" rounds half to even, but tested positions stay clear of half-way points. fp32
    throughout. NaN in the grid and errors for other modes or types are not tested. The result is a new tensor; input
    and grid may have any strides; N may be 0.
    """
    return F.grid_sample(input, grid, mode=mode, padding_mode=padding_mode, align_corners=align_corners)
