"""fusion/fused_add_mean."""

import torch
from kbx_env.tasks._cases import stream
from kbx_env.tasks._varied import LONG_LINE, TINY, UNIT_AXIS, adjacent, many_columns

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Cost, DtypeArg, Literal, Normal, Outlier, Paper, T, Uniform, task

BIG = {"*a": (128, 256), "*b": (128, 256)}
F32, F64 = ({"dtype": DtypeArg(d)} for d in ("f32", "f64"))


def _reduced_both_ways(p):
    a, b = p.both_ways(3, 4, 500)
    rank = max(len(a), len(b))
    dim = p.axes(rank, 2)
    return p.like({"*a": a, "*b": b}, {"dim": dim, "alpha": p.real(-2, 2), "keepdim": p.chance()},
                  where=lambda c: "other" not in c.args, out=True)  # fmt: skip


def _long(p):
    shape, at = p.slab(3, 4, 4300)
    return p.like({"*a": shape, "*b": p.broadcast(shape)}, {"dim": p.among(None, at, at - len(shape), at - 1),
                  "keepdim": p.chance()},
                  where=lambda c: "other" not in c.args)  # fmt: skip


def _columns(p):
    shape = many_columns(p)
    return p.like({"*a": shape, "*b": p.among(shape, shape[1:])}, {"dim": p.among(0, -2), "keepdim": p.chance()},
                  where=lambda c: "other" not in c.args and "dtype" not in c.args, draw=Normal(mean=1), out=True,
                  layouts=adjacent(p, 1, "input"))  # fmt: skip


def _lines(p):
    shape = (16, LONG_LINE + p.whole(1, 900))
    return p.like({"*a": shape, "*b": shape}, {"dim": p.among(1, -1), "keepdim": p.chance()},
                  where=lambda c: "other" not in c.args and "dtype" not in c.args, draw=Normal(mean=1), out=True)  # fmt: skip


def _tiny(p):
    shape = p.shape(2, 3, 60)
    return p.like({"*a": shape, "*b": shape}, {"dim": p.axis(len(shape)), "alpha": p.real(0.5, 2), "keepdim": p.chance()},
                  where=lambda c: "other" not in c.args and "dtype" not in c.args, draw=TINY)  # fmt: skip


@task(
    difficulty=4,
    takes={"input": T("*a"), "other": T("*b")},
    truth=Close(ulps=16),
    cost=Cost(flops="3 * a"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="Broadcasting, several axes, dtype=float64 and out= are judged (as published out was ignored); timed along "
    "an axis too, not over everything only.",
    cases=(
        Case({"*a": (3,), "*b": (3,)}, draw=Literal(1, 2, 4)),
        Case({"*a": (64, 130)}, {"other": 0.5, "alpha": 2}, draw=Normal(mean=1)),
        Case(BIG, {"alpha": 0.5, "keepdim": True}, draw=Normal(mean=3)),
        # 2**17 elements: kernels share each column between two programs.
        Case({"*a": (256, 515), "*b": (256, 515)}, {"dim": 0, "alpha": 0.5, "keepdim": True}, draw=Outlier()),
        Case(BIG, {"dim": 1, "alpha": -1.5}, draw=Outlier(scale=100)),
        Case(BIG, {"dim": (0, 1), "alpha": 2}, draw=Uniform(-1, 3)),
        Case({"*a": (8, 16, 300), "*b": (16, 1)}, {"dim": (0, 2), "alpha": 0.25}, draw=Normal(mean=1)),
        Case({"*a": (5, 1, 37), "*b": (7, 37)}, {"dim": -2}),
        Case({"*a": (3, 40001), "*b": (3, 40001)}, {"dim": -1}, draw=Normal(mean=-2)),
        # Columns of so many parts that a block holds the states of few of them.
        Case({"*a": (16401, 17), "*b": (17,)}, {"dim": 0}, draw=Normal(mean=1)),
        Case({"*a": (60, 133), "*b": (60, 133)}, {"dim": 1, "alpha": 0.3} | F64),
        Case({"*a": (133, 60)}, {"other": 0.7, "dim": 0, "alpha": 3, "keepdim": True} | F64),
        Case({"*a": (41, 6), "*b": (41, 6)}, {"dim": 0} | F32, out=True),
        Case({"*a": (33, 65), "*b": (33, 65)}, {"dim": 0}, layouts={"input": "transposed"}),
        Case({"*a": (31, 17), "*b": (31, 17)}, {"dim": 1}, layouts={"input": "strided", "other": "transposed"}),
        Case({"*a": (), "*b": ()}, {"alpha": 2}),
        Case({"*a": (3, 0, 4), "*b": (4,)}, {"dim": 0}),
        # Two runs of axes, the outer one of length 2.
        Case({"*a": (2, 5, 9), "*b": (2, 5, 9)}, {"dim": (0, 2)}),
        # Axes that are copied in another order.
        Case({"*a": (3, 2, 4, 2, 5), "*b": (3, 2, 4, 2, 5)}, {"dim": (1, 3), "alpha": 0.5}),
        Case({"*a": (3, 2, 4, 2, 5)}, {"other": 0.5, "dim": (1, 3)}),
        Case({"*a": (2, 3, 2, 3, 2), "*b": (2, 3, 2, 3, 2)}, {"dim": (0, 2, 4), "alpha": 0.5}),
        Case({"*a": (3,), "*b": (3,)}, {"dim": -1}),
        # Contiguous, but the axis of length 1 has a stride of its own.
        Case({"*a": (5, 1, 37, 4), "*b": (5, 1, 37, 4)}, {"dim": 3}, layouts=dict.fromkeys(("input", "other"), UNIT_AXIS)),
        # More than two axes that can be walked as one.
        Case({"*a": (9, 8, 70), "*b": (9, 8, 70)}, {"alpha": 0.5}),
        Case({"*a": (5, 4, 6, 7), "*b": (5, 4, 6, 7)}, {"dim": 0}),
        Case({"*a": (6, 5, 173), "*b": (173,)}, {"dim": (-1, 0), "alpha": 1.25}, draw=Normal(mean=1), held=True),
        Case({"*a": (7, 211, 3), "*b": (7, 211, 3)}, {"dim": 1, "alpha": 0.7}, out=True, held=True),
    ),
    varied=(_reduced_both_ways, _long, _columns, _lines, _tiny),
    timed=(
        *stream("*a", "*b", powers=(24, 27), draw=Uniform()),
        *(Case({"*a": (16384, 4096), "*b": (16384, 4096)}, {"dim": d}, draw=Uniform()) for d in (0, 1)),
    ),
)
def fused_add_mean(input, other, dim=None, alpha=1, keepdim=False, dtype=None, out=None):
    """Mean of input + alpha * other over dim: all axes (None, a 0-d result), one axis, or a tuple of axes.

    other is a Python number, or a tensor that broadcasts with input; the mean is taken over axes of the broadcast
    shape. alpha is an int or a float. Axes may be negative; keepdim leaves them in the result with length 1.

    Example: fused_add_mean([[1, 2], [3, 5]], [0.5, 1], dim=0, alpha=2) = [3, 5.5]
    Example: fused_add_mean([[1, 2], [3, 5]], 0.5, keepdim=True) = [[3.25]]

    fp32; the sum is formed and added up in fp32, in any order. dtype is None, torch.float32 or torch.float64: both
    inputs are converted to it first, everything is computed in it (alpha and a number other in fp64 too), and it is the
    dtype of the result. out: None (the default: a new tensor), or a contiguous tensor of the result's shape and dtype
    with any contents, which is filled and returned. Inputs may have any strides and be 0-d; kept axes may be empty, a
    mean over nothing is not tested.
    """
    if dtype is not None:
        input, other = (t.to(dtype) if isinstance(t, torch.Tensor) else t for t in (input, other))
    y = torch.add(input, other, alpha=alpha).mean(dim, keepdim)
    return y if out is None else out.copy_(y)
