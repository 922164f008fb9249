"""index/expand_where."""

import torch

from kbx_env.spec.criteria import Exact
from kbx_env.spec.task import Bernoulli, Case, Choice, Cost, Outlier, Paper, T, task


def _case(x, y, c=None, o=None, **more):
    return Case({"*x": x, "*c": c or y, "*o": o or y}, {"target_sizes": y}, **more)


def _long(p):
    shape = p.slab(4, 5, 1100)[0]
    return _expanded(p, shape, shape)


def _short(p):
    shape = p.shape(3, 5, 800)
    return _expanded(p, shape, p.broadcast(shape, 3))


def _whole(p):
    shape = p.shape(3, 4, 200)
    return p.like({"*x": shape, "*c": shape, "*o": shape}, {"target_sizes": shape})


def _expanded(p, shape, cond):
    x = p.broadcast(shape, 3)
    target = tuple(-1 if k >= 0 and x[k] == n and p.chance(0.3) else n
                   for k, n in enumerate(shape, len(x) - len(shape)))  # fmt: skip
    return p.like({"*x": x, "*c": cond, "*o": p.broadcast(shape, 3)}, {"target_sizes": target})


@task(
    difficulty=3,
    takes={"input": T("*x"), "cond": T("*c", "bool", Bernoulli(0.5)), "other": T("*o")},
    truth=Exact(),
    picks=True,
    cost=Cost(reads={"input": "under(input, cond)", "other": "outside(other, cond)"}),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="cond and other of every broadcast shape, -1 in target_sizes and special values are exercised; timed with "
    "a mask of one column, as published, and with a full one.",
    cases=(
        _case((1, 5), (4, 5), (4, 1)),
        # An axis longer than a block of most kernels.
        _case((1, 4300), (9, 4300), (9, 1)),
        _case((1, 128), (32, 128), (32, 1), draw=Outlier()),
        _case((64, 1), (64, 130), (64, 130), draws={"cond": Bernoulli(0.9)}),
        _case((33,), (7, 5, 33), (5, 1), (7, 1, 33)),
        _case((3, 20, 40), (3, 20, 40), (40,), (20, 1)),
        _case((1,), (6, 77), (6, 77), (1, 1)),
        _case((64, 1), (64, 130), (130,), draw=Choice(float("nan"), float("inf"), -0.0, 0.0, 2.5)),
        Case({"*x": (5, 1, 9), "*c": (5, 4, 1), "*o": (5, 4, 9)}, {"target_sizes": (-1, 4, -1)}),
        _case((33, 65), (33, 65), layouts={"input": "transposed", "other": "transposed"}),
        _case((7, 1), (7, 31), layouts={"cond": "transposed", "other": "strided", "input": "strided"}),
        _case((9, 1, 30), (9, 4, 30), (9, 4, 1), layouts={"cond": "strided", "other": "transposed"}),
        # Each tensor varies along other ones of the five axes.
        _case((2, 3, 1, 5, 1), (2, 3, 4, 5, 6), (2, 3, 4, 1, 6), (2, 3, 4, 5, 6)),
        _case((2, 3, 1, 5, 1), (2, 3, 4, 5, 6), (3, 1, 1, 6), (2, 1, 4, 1, 6)),
        _case((1, 3), (0, 3), (0, 1)),
        _case((1, 211), (3, 5, 211), (3, 5, 1), held=True),
        _case((13, 1, 7), (13, 19, 7), (19, 7), held=True),
    ),
    varied=(_long, _short, _whole),
    timed=(
        *(_case((1, n), (8192, n), (8192, 1)) for n in (1024, 4096, 16384)),
        _case((1, 8192), (8192, 8192)),
    ),
)
def expand_where(input, target_sizes, cond, other):
    """Expand input to target_sizes, then take it where cond is True and other elsewhere.

    Example: expand_where([[1, 2]], (2, 2), [[True], [False]], [[5, 6], [7, 8]]) = [[1, 2], [7, 8]]

    input and other are fp32, cond is bool. target_sizes is a tuple of integers with at least as many axes as input:
    an axis of length 1 of input is repeated, axes may be added in front, -1 keeps the length of input's own axis. cond
    and other broadcast, as torch broadcasts, to the expanded shape and not beyond it. Values are moved, not changed:
    NaN, infinities and zeros of both signs pass. The result is a new contiguous fp32 tensor of the expanded shape (1
    to 5 axes); the inputs may have any strides, sizes may be 0. A Triton kernel takes the elements:
    torch may copy whole tensors, in any order and broadcast, but no part of one.
    """
    return torch.where(cond, input.expand(target_sizes), other)
