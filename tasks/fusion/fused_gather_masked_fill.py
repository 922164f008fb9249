"""fusion/fused_gather_masked_fill."""

import math

import torch
from kbx_env.tasks._varied import ENDS, GAPS

from kbx_env.spec.criteria import Exact
from kbx_env.spec.task import Bernoulli, Case, Choice, Cost, Ints, Literal, Outlier, Paper, T, task

LONG = {"input": "i64"}
EDGES = Choice(0.0, -0.0, -0.0, -0.0, 1.0, -2.5, 1e-30, -1e30, 3e38, math.inf, math.nan, 7.25, -0.3)


def _case(shape, dim, index, mask, value, **more):
    more["draws"] = {"index": Ints(0, shape[dim])} | more.get("draws", {})
    args = {"dim": dim, "value": value} | more.pop("args", {})
    return Case({"*": shape, "*i": index, "*m": mask}, args, **more)


def _int64(p):
    return _any_axis(p, {"value": p.whole(-(2**62), 2**62)}, draw=ENDS, dtypes={"input": "i64"})


def _fp32(p):
    return _any_axis(p, {"value": p.among(math.nan, math.inf, p.real(-9, 9))}, draw=EDGES, dtypes={})


def _any_axis(p, args, **more):
    rank = p.whole(4, 5)
    dim = p.among(rank - 1, p.whole(0, rank - 1))
    shape = tuple(p.whole(20, 40) if k == dim else p.whole(2, 4) for k in range(rank))
    index = tuple(1100 if k == dim else p.whole(1, 2) for k in range(rank))
    # Not all values along the axis are masked.
    mask = tuple(1100 if k == dim else p.among(1, n) for k, n in enumerate(index))
    return p.like(
        {"*": shape, "*i": index, "*m": mask[0 if dim == 0 else p.among(0, 1) :]},
        {"dim": dim - rank if p.chance() else dim, "sparse_grad": False} | args,
        draws={"index": Ints(0, shape[dim]), "mask": Bernoulli(0.4)}, out=True, **more,
    )  # fmt: skip


@task(
    difficulty=4,
    takes={"input": T("*"), "index": T("*i", "i64"), "mask": T("*m", "bool", Bernoulli(0.5))},
    truth=Exact(),
    cost=Cost(flops="0", reads={"input": "picked(input, dim, index, mask)", "index": "outside(index, mask)"}),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="Also along the last axis, with other ranks, and with an index smaller than input on the other axes.",
    cases=(
        _case((2, 2), 1, (2, 2), (2, 2), -1.0, draw=Literal(1, 2, 3, 4), dtypes=LONG),
        _case((2, 3), 1, (2, 2), (2, 2), 0.0, draw=Literal(5, 6, 7, 8, 9, 10), dtypes=LONG),
        _case((64, 128), 1, (64, 32), (64, 32), -1.0, args={"sparse_grad": True}),
        _case((64, 128), 1, (64, 1100), (1100,), 0.1, draw=Outlier()),
        _case((64, 300), 0, (90, 300), (90, 1), 7),
        _case((4, 5), 1, (1, 1), (1, 1), 0.5, draws={"mask": Bernoulli(0.0)}),
        _case((3, 5), 1, (3, 5), (3, 5), 0.25, out=True, layouts=dict.fromkeys(("index", "mask", "out"), GAPS)),
        _case((64, 128), 0, (50, 40), (1, 40), -1e30, draws={"mask": Bernoulli(0.1)}),
        _case((64, 128), -2, (50, 128), (), 0.5, draws={"mask": Bernoulli(0.0)}),
        _case((30, 12, 9), 1, (20, 31, 5), (31, 1), float("-inf")),
        _case((30, 12, 9), -1, (30, 12, 14), (30, 12, 14), float("nan")),
        # The last two axes may be walked as one.
        _case((30, 12, 9), 0, (20, 12, 9), (20, 12, 9), -3.5),
        _case((5, 4, 3, 6), 0, (9, 4, 2, 6), (4, 1, 6), 2.5, draw=Ints(-4, 5)),
        _case((300,), 0, (700,), (700,), 99, draw=Ints(-(2**62), 2**62), dtypes=LONG),
        _case((40, 51), 0, (33, 51), (33, 51), 2**55 + 1, draw=Ints(-99, 99), dtypes=LONG),
        _case((40, 51), 1, (40, 51), (40, 51), -2.5,
              layouts={"input": "transposed", "index": "strided", "mask": "transposed"}),
        _case((40, 51), 1, (40, 20), (40, 20), 0.25, out=True),
        _case((4, 5), 1, (4, 0), (4, 0), 1.0),
        _case((7, 60, 11), 1, (6, 29, 11), (29, 11), -0.75, held=True),
    ),
    varied=(_int64, _fp32),
    timed=(
        *(_case((m, 4096), 0, (m, 4096), (m, 4096), 0.5) for m in (1024, 4096, 16384)),
        _case((16384, 4096), 1, (16384, 1024), (16384, 1024), 0.5),
    ),
)  # fmt: skip
def fused_gather_masked_fill(input, dim, index, mask, value, *, sparse_grad=False, out=None):
    """torch.gather(input, dim, index) with value wherever mask is True.

    Example: fused_gather_masked_fill([[1, 2], [3, 4]], 1, [[1, 0, 1], [0, 0, 1]],
    [[False, True, False], [False, False, True]], -5.0) = [[2, -5, 2], [3, 3, -5]]

    input is an fp32 or int64 tensor of rank >= 1, index an int64 tensor of the same rank, whose values are positions on
    axis dim (may be negative) of input; on all other axes index is at most as long as input. For rank 2 and dim=0:
    y[i, j] = value if mask[i, j] else input[index[i, j], j]. mask is a bool tensor (0-d too) that broadcasts to index's
    shape and does not enlarge it; where it is True, index is a valid position too. value is a number (infinite or NaN
    too), rounded to input's dtype; for int64 a whole number. sparse_grad concerns gradients and changes nothing here.

    The result has the shape of index and the dtype of input; values are moved, not changed (infinities and NaN too). out:
    None (the default: a new tensor), or a tensor of the result's shape and dtype with any strides and any contents, which
    is filled and returned. Inputs may have any strides, index may be empty; none of them is changed.
    """
    y = torch.gather(input, dim, index).masked_fill(mask, value)
    return y if out is None else out.copy_(y)
