"""index/index_select."""

import torch
from kbx_env.tasks._varied import long_slices

from kbx_env.spec.criteria import Exact
from kbx_env.spec.task import Case, Choice, Cost, Ints, Literal, Outlier, Paper, T, task


def _case(shape, dim, k, **more):
    d = dim % len(shape)
    return Case({"*a": shape[:d], "N": shape[d], "*b": shape[d + 1 :], "K": k}, {"dim": dim}, **more)


def _any_axis(p):
    a, b = (tuple(p.whole(2, 5) for _ in range(k)) for k in p.among((0, 3), (1, 2), (3, 0), (2, 1)))
    return _drawn(p, a, p.whole(2, 20), b, p.whole(1, 30))


def _drawn(p, a, n, b, k):
    dim = -1 - len(b) if p.chance() else len(a)
    return p.like({"*a": a, "N": n, "*b": b, "K": k}, {"dim": dim})


@task(
    difficulty=3,
    takes={"input": T("*a N *b"), "index": T("K", "i64", Ints(0, "N"))},
    truth=Exact(),
    picks=True,
    # Positions are drawn with repetition: of N / 8 draws, about 15/16 are different.
    cost=Cost(reads={"input": "distinct(index) * a * b"}),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="Timed along the last axis too; as published along axis 0 only.",
    cases=(
        _case((6, 4), 0, 3, draws={"index": Literal(0, 2, 5)}),
        _case((3, 8), 1, 3, draws={"index": Literal(7, 1, 7)}),
        _case((2, 3, 10), 2, 4),
        _case((8, 32, 256), 2, 64),
        _case((8, 32, 256), 1, 50, draw=Outlier(scale=20)),
        _case((300, 130), 0, 40),
        _case((300, 130), -1, 333, draw=Outlier()),
        _case((4097,), 0, 1000),
        _case((9, 3, 4, 31), -2, 7),
        _case((40, 30), 0, 20, draw=Choice(float("nan"), float("-inf"), -0.0, 1e-40, 3.5)),
        _case((33, 65), 0, 11, layouts={"input": "transposed"}),
        _case((33, 65), 1, 20, layouts={"input": "strided", "index": "strided"}),
        _case((3, 6, 5, 9), 1, 8, layouts={"input": "channels_last"}),
        _case((6, 7), 1, 0),
        _case((7, 211, 13), 1, 40, held=True),
        _case((5, 3, 173), -1, 301, layouts={"input": "transposed"}, held=True),
    ),
    varied=(_any_axis, *long_slices(_drawn)),
    timed=(
        *(_case((n, 256), 0, n // 8) for n in (1 << 18, 1 << 20)),
        *(_case((n, 8192), 1, 1024) for n in (4096, 16384)),
    ),
)
def index_select(input, dim, index):
    """The slices of input at the positions index of axis dim, in that order, as a new tensor.

    Example: index_select([[1, 2, 3], [4, 5, 6]], 1, [2, 0, 2]) = [[3, 1, 3], [6, 4, 6]]

    input is an fp32 tensor of rank 1 to 4 with any strides; dim may be negative. index is an int64 vector of positions
    in [0, size of the axis): they may repeat, come in any order, or be none at all. The result has the shape of input
    with the length of index in place of the axis. Values are moved, not changed (NaN, infinities, zeros of both signs,
    subnormals too), and a Triton kernel picks the slices: torch may copy whole tensors, in any order, but no part of
    one.
    """
    return torch.index_select(input, dim, index)
