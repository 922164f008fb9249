"""spatialops/grid_sample_with_affine."""

import torch.nn.functional as F
from kbx_env.tasks._varied import LARGE, TINY, longs, sized

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Cost, Literal, Normal, Outlier, Paper, Signed, T, Uniform, task

# Maps whose positions keep clear of half-way points at the sizes of the nearest cases, where rounding would decide. Other signs
# mirror the positions; which ones they are is a secret, or theta would not have to be read.
TURN = {"theta": Signed(0.71, 0.23, 0.0613, -0.31, 0.83, -0.0427, 1.17, 0.19, 0.1031, 0.29, -1.27, 0.0519)}
SAME = {"draws": {"theta": Literal(1, 0, 0, 0, 1, 0)}}
FLIP = {"draws": {"theta": Signed(1, 0, 0, 0, 1, 0)}}
FEW = {"N": 1, "C": 3, "H": 64, "W": 64}
IMAGE = {"N": 2, "C": 3, "H": 23, "W": 31}


def _case(axes, size, mode="bilinear", padding="zeros", align=False, **more):
    args = {"size": (axes["N"], axes["C"], *size), "mode": mode, "padding_mode": padding, "align_corners": align}
    return Case(axes, args, **more)


def _any_map(p, s):
    args = {"size": (s["N"], s["C"], s["I"], s["J"]), "mode": "bilinear", "padding_mode": p.among("zeros", "border", "reflection"),
            "align_corners": s.get("align", p.chance())}  # fmt: skip
    return p.like({k: s[k] for k in "NCHW"}, args, draws={"theta": Normal(scale=0.7)}, dtypes={})


def _far_outside(p, s):
    """Reflections that mirror positions many times."""
    args = {"size": (3, 2, 5, 6), "mode": "bilinear", "padding_mode": "reflection", "align_corners": p.chance()}
    return p.like({"N": 3, "C": 2} | s, args, draws={"theta": Normal(scale=24)}, dtypes={})


def _at_the_centre(p, s):
    args = {"size": (1, 2, 5, 6), "mode": "bilinear", "padding_mode": "zeros", "align_corners": p.chance()}
    return p.like({"N": 1, "C": 2} | s, args, draws={"input": LARGE, "theta": TINY}, dtypes={})


@task(
    difficulty=3,
    takes={"input": T("N C H W"), "theta": T("N 2 3", draw=Normal(scale=0.7))},
    truth=Close(ulps=64),
    # How much of the images the maps show changes much from call to call.
    cost=Cost(flops="60 * numel(input)", reads={"input": "single_call * used(input)"}, least="numel(input)"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="Random maps, other output sizes and every mode; as published only the identity was tested. Nearest cases "
    "keep clear of half-way points.",
    cases=(
        _case({"N": 1, "C": 1, "H": 3, "W": 3}, (2, 2), draw=Uniform(), **SAME),
        _case(FEW, (64, 64), **FLIP, dtypes={"theta": "i64"}),
        _case(FEW, (64, 64), "nearest", **FLIP, dtypes={"theta": "i64"}),
        _case(FEW, (64, 64), padding="reflection", **FLIP, dtypes={"theta": "i64"}),
        _case(FEW, (64, 64), align=True, **FLIP, dtypes={"theta": "i64"}),
        _case(IMAGE, (40, 27), draw=Outlier()),
        _case(IMAGE, (19, 50), align=True),
        _case(IMAGE, (40, 27), padding="border"),
        _case(IMAGE, (40, 27), padding="border", align=True, draw=Outlier()),
        _case(IMAGE, (19, 50), padding="reflection"),
        _case(IMAGE | {"H": 2}, (19, 50), padding="reflection", align=True, draws={"theta": Normal(scale=3)}),
        _case(IMAGE, (20, 27), "nearest", draws=TURN),
        _case(IMAGE, (14, 21), "nearest", "border", True, draws=TURN),
        _case(IMAGE, (15, 18), "nearest", "reflection", draws=TURN),
        _case(IMAGE, (1, 9), align=True, layouts={"input": "channels_last", "theta": "transposed"}),
        _case(IMAGE, (16, 9), layouts={"input": "transposed", "theta": "strided"}),
        # Reflected some hundred times.
        _case({"N": 2, "C": 2, "H": 5, "W": 4}, (9, 11), padding="reflection", draws={"theta": Normal(scale=400)}),
        _case({"N": 3, "C": 5, "H": 19, "W": 10}, (17, 13), held=True),
        _case({"N": 2, "C": 4, "H": 9, "W": 14}, (11, 21), "nearest", "zeros", True, draws=TURN, held=True),
    ),
    varied=(
        sized(
            _any_map,
            longs(
                dict.fromkeys("NC", (1, 3)) | dict.fromkeys("HWIJ", (1, 9)),
                {"N": 34, "C": 70, "H": 140, "W": 140, "I": 140, "J": 140},
                most=5_000_000,
            ),
        ),
        # fp16 has no odd number above 2048.
        *sized(_any_map, (lambda p: {"N": 1, "C": 1, "H": 2 * p.whole(1025, 1400) + 1, "W": 5, "I": 7,
                                     "J": 2 * p.whole(1025, 1400) + 1, "align": False},)),
        *sized(_far_outside, (lambda p: {"H": p.whole(4, 9), "W": p.whole(4, 9)},)),
        *sized(_at_the_centre, (lambda p: {"H": 2 * p.whole(9, 15), "W": 2 * p.whole(9, 15)},)),
    ),
    timed=(
        *(_case({"N": 16, "C": 3, "H": n, "W": n}, (n, n)) for n in (512, 1024, 1536)),
        _case({"N": 16, "C": 3, "H": 512, "W": 512}, (512, 512), padding="reflection", align=True),
    ),
)
def grid_sample_with_affine(input, theta, size, mode="bilinear", padding_mode="zeros", align_corners=False):
    """Images sampled at affinely mapped positions: input fp32 (N, C, H, W), size (N, C, Ho, Wo), the result's shape.

    Example: grid_sample_with_affine([[[[1, 2], [3, 5]]]], [[[1, 0, 0.5], [0, 1, 0]]], (1, 1, 2, 2)) = [[[[1.5, 1],
    [4, 2.5]]]]

    theta (N, 2, 3) is fp32, or int64 and then converted to fp32. Output pixel (i, j) has the base point u = -1 + 2 * j
    / (Wo - 1) (0 where Wo = 1) if align_corners, else u = (2 * j + 1) / Wo - 1; v likewise from i and Ho. It looks at
    gx = theta[n, 0] . (u, v, 1), gy = theta[n, 1] . (u, v, 1); in pixels x = (gx + 1) / 2 * (W - 1) if align_corners,
    else x = ((gx + 1) * W - 1) / 2; y likewise from gy and H.

    padding_mode: "zeros" reads 0 outside; "border" clamps x to [0, W - 1]; "reflection" mirrors x at the border pixels
    (align_corners) or the image's edges (-0.5, W - 0.5) as often as needed, then clamps. mode: "bilinear" weights the
    four neighbours; "nearest" rounds half to even, but tested positions stay clear of half-way points. fp32 throughout
    (no TF32): positions are judged by what rounding in fp32 makes of them. The result is a new tensor; input and theta
    may have any strides.
    """
    grid = F.affine_grid(theta.to(input.dtype), size, align_corners=align_corners)
    return F.grid_sample(input, grid, mode, padding_mode, align_corners)
