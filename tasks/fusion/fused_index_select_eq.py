"""fusion/fused_index_select_eq."""

import math

import torch
from kbx_env.tasks._varied import HIGHEST, LOWEST

from kbx_env.spec.criteria import Exact
from kbx_env.spec.task import Bernoulli, Case, Choice, Cost, Ints, Literal, Paper, T, task

FLOATS = {"input": "f32", "other": "f32"}
FEW = Ints(-5, 6)


def _case(shape, dim, k, other, args=None, **more):
    """``other`` is a shape, or a number."""
    axes = {"*": shape, "V": shape[dim], "K": k, "*o": other if isinstance(other, tuple) else ()}
    chosen = 1
    for d, size in enumerate(shape):
        chosen *= k if d == dim % len(shape) else size
    number = {} if isinstance(other, tuple) else {"other": other}
    return Case(axes | {"chosen": chosen}, {"dim": dim} | number, **more)


def _any_axis(p, long):
    rank = p.whole(4, 5)
    shape = tuple(p.whole(2, 3) for _ in range(rank))
    k = 1100 if long else p.whole(1, 20)
    dim = p.among(rank - 1, p.whole(0, rank - 1)) if long else p.whole(0, rank - 1)
    chosen = tuple(k if axis == dim else n for axis, n in enumerate(shape))
    axes = {"*": shape, "V": shape[dim], "K": k, "*o": p.broadcast(chosen, 3), "chosen": math.prod(chosen)}
    values = LOWEST if long else p.among(Ints(-2, 3), HIGHEST)
    return p.like(axes, {"dim": dim - rank if p.chance() else dim}, where=lambda c: "other" not in c.args and not c.dtypes,
                  draws={"input": values, "other": values}, out=True)  # fmt: skip


@task(
    difficulty=4,
    takes={"input": T("*", "i64", FEW), "index": T("K", "i64", Ints(0, "V")), "other": T("*o", "i64", FEW)},
    truth=Exact(),
    cost=Cost(flops="chosen", reads={"input": "distinct(index) * numel(input) / V"}),
    differs="Timed on fp32 numbers that are sometimes equal; as published the timed result was False everywhere.",
    paper=Paper(),
    cases=(
        _case((2, 3), 0, 2, (2, 3), draws={"input": Literal(1, 2, 3, 4, 5, 6), "other": Literal(1, 2, 3, 4, 5, 7)}),
        _case((2, 3), 1, 2, (2, 2), draws={"input": Literal(1, 2, 3, 4, 5, 6), "other": Literal(1, 2, 4, 6)}),
        _case((2, 3), 1, 1, 2),
        _case((128, 64), 0, 32, (32, 64)),
        _case((12, 64), -1, 1030, (1030,)),
        _case((128, 64), 0, 300, (64,), dtypes=FLOATS),
        _case((6, 50, 9), 1, 70, (6, 1, 9)),
        _case((6, 50, 9), -3, 13, -3, dtypes=FLOATS),
        _case((40, 33), 0, 500, 0.5, draws={"input": Choice(0.5, -0.5, 0.0)}, dtypes=FLOATS),
        _case((65, 30), 1, 80, (), draws={"input": Bernoulli(0.4), "other": Bernoulli(1.0)}),
        _case((20, 30), 0, 50, (50, 30), draws=dict.fromkeys(("input", "other"), Choice(float("nan"), -0.0, 0.0, 1e-40,
              float("inf"), float("-inf"))), dtypes=FLOATS),
        _case((20, 30), 1, 50, (20, 50), draws=dict.fromkeys(("input", "other"), Choice(2**53, 2**53 + 2, -(2**60)))),
        _case((30, 41), 0, 55, (55, 41), layouts={"input": "transposed", "other": "strided", "index": "strided"}),
        _case((2000,), 0, 1500, (1500,), dtypes=FLOATS),
        _case((40, 50), 1, 70, (40, 70), dtypes=FLOATS,
              draws=dict.fromkeys(("input", "other"), Choice(1.0, 1 + 2.0**-23))),
        _case((50, 6), 0, 21, (21, 6), out=True),
        _case((9, 31), 1, 40, 2**60 + 1, draws={"input": Choice(2**60 + 1, 2**60, 2**60 + 2)}, out=True,
              layouts={"input": "strided"}),
        _case((4, 5), 0, 0, (5,)),
        _case((7, 1), 0, 1, (1, 1)),
        _case((7, 60, 11), 1, 29, (29, 1), held=True),
    ),
    varied=(lambda p: _any_axis(p, True), lambda p: _any_axis(p, False)),
    timed=(
        *(_case((2 << k, 128), 0, 1 << k, 2.0, dtypes=FLOATS) for k in (17, 19, 20)),
        _case((1 << 20, 128), 0, 1 << 18, (1 << 18, 128), dtypes=FLOATS),
    ),
    held_timed=(
        *(_case((2 * k, 100), 0, k, 2.0, dtypes=FLOATS) for k in (100_000, 400_000, 800_000)),
        _case((800_000, 100), 0, 200_000, (200_000, 100), dtypes=FLOATS),
    ),
)  # fmt: skip
def fused_index_select_eq(input, dim, index, other, *, out=None):
    """torch.index_select(input, dim, index) == other, as a bool tensor.

    Example: fused_index_select_eq([[1, 2, 3], [4, 5, 6]], 1, [2, 0], [[3, 1], [6, 5]]) = [[True, True], [True, False]]
    Example: fused_index_select_eq([[1, 2, 3], [4, 5, 6]], 0, [1, 1, 0], 5) = [[False, True, False],
    [False, True, False], [False, False, False]]

    input is an int64 or fp32 tensor of rank >= 1, dim an axis (may be negative), index a 1-D int64 tensor of positions
    on it in [0, input.shape[dim]), in any order, with repetitions, possibly empty. The selection is shaped like input
    but for that axis, which is as long as index. other is a tensor of input's dtype (0-d too) that broadcasts to the
    selection (which it does not enlarge), or a number: an int of 64 bits for int64, a float or an int of 64
    bits that fp32 holds exactly for fp32.

    Comparison as IEEE: NaN equals nothing, infinities equal themselves, -0.0 equals 0.0; int64 uses all 64 bits;
    subnormal numbers are not zero. The result is a bool tensor of the selection's shape. out: None (the default: a new
    tensor), or a tensor of the result's shape and dtype with any strides and any contents, which is filled and
    returned. Inputs may have any strides and are not changed.
    """
    y = torch.eq(torch.index_select(input, dim, index), other)
    return y if out is None else out.copy_(y)
