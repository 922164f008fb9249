"""index/scatter."""

from kbx_env.spec.criteria import Exact
from kbx_env.spec.task import (
    Case,
    Choice,
    Constant,
    Cost,
    Distinct,
    Ints,
    Literal,
    Normal,
    Outlier,
    Paper,
    Places,
    T,
    task,
)


def _case(x, i, dim, s=None, **more):
    # Different along dim, in an order that nobody knows: an index that is published would not have to be read.
    draws = {"index": Places(x[dim], dim)} | more.pop("draws", {})
    return Case({"*x": x, "*i": i, "*s": s or i}, {"dim": dim}, draws=draws, **more)


def _any_axis(p):
    rank = 4
    dim = p.whole(0, rank - 1)
    x = [p.whole(2, 4) for _ in range(rank)]
    long = p.among(rank - 1, p.whole(0, rank - 1))
    x = [1100 if k == long else min(n, 2) for k, n in enumerate(x)]
    index = tuple(n if k == long else p.whole(1, n) for k, n in enumerate(x))
    src = tuple(n + p.whole(0, 2) for n in index)
    return p.like({"*x": tuple(x), "*i": index, "*s": src}, {"dim": dim - rank if p.chance() else dim},
                  draw=Normal(), draws={"index": Places(x[dim], dim)})  # fmt: skip


@task(
    difficulty=3,
    takes={"input": T("*x"), "index": T("*i", "i64"), "src": T("*s")},
    truth=Exact(),
    picks=True,
    # The elements of input that are overwritten need not be read.
    # What is read of src need not be read of input: together as much as input.
    cost=Cost(reads={"src": "0"}),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="Index and src smaller than input, on every axis, are exercised; timed along both axes of a matrix.",
    cases=(
        _case((4, 3), (2, 3), 0, draws={"index": Literal(0, 2, 1, 3, 0, 2)}),
        _case((3, 4), (3, 2), 1, draws={"index": Literal(0, 2, 3, 1)}, draw=Outlier()),
        _case((2, 3, 4), (2, 3, 2), 2, draws={"index": Literal(3, 1)}),
        _case((4, 128, 256), (4, 128, 64), 2),
        _case((4, 128, 256), (4, 128, 64), -1, draw=Outlier(scale=20)),
        _case((300, 70), (130, 70), 0),
        _case((40, 300), (31, 101), 0, (33, 110)),
        _case((4097,), (1000,), 0, (1200,), draws={"index": Distinct()}),
        _case((5, 67, 9), (4, 1, 7), 1, draws={"index": Ints(0, 67)}),
        _case((3, 4, 9, 31), (3, 2, 9, 30), -2, (3, 4, 9, 31), draws={"index": Ints(5, 6)} | {"src": Constant(2.5)}),
        _case((33, 80), (33, 20), 1, layouts={"input": "transposed", "index": "transposed"}),
        _case((90, 31), (40, 31), 0, layouts={"src": "strided", "input": "strided"}),
        _case((30, 40), (30, 23), 1, draw=Choice(float("nan"), float("-inf"), -0.0, 1e-40, 3.5)),
        _case((6, 7), (0, 7), 0),
        _case((6, 7), (5, 0), 0),
        # An index whose lines are longer than a block.
        _case((5, 2100), (4, 1500), 0),
        _case((7, 211, 13), (6, 100, 12), 1, draws={"index": Ints(0, 211), "src": Constant(-1.5)}, held=True),
        _case((3, 41, 173), (3, 41, 60), 2, (3, 50, 61), layouts={"src": "transposed"}, held=True),
    ),
    varied=(_any_axis,),
    timed=(
        *(_case((8192, n), (4096, n), 0) for n in (1024, 8192)),
        *(_case((n, 8192), (n, 4096), 1) for n in (1024, 8192)),
    ),
    held_timed=(
        *(_case((6144, n), (3072, n), 0) for n in (750, 6000)),
        *(_case((n, 6144), (n, 3072), 1) for n in (750, 6000)),
    ),
)
def scatter(input, dim, index, src):
    """A copy of input in which the elements of src are written at the positions index along dim.

    Example: scatter([[1, 2, 3], [4, 5, 6]], 1, [[2, 0], [0, 1]], [[7, 8], [9, 10]]) = [[8, 2, 7], [9, 10, 6]]

    y[p with p[dim] replaced by index[p]] = src[p] for every position p of index, elsewhere y = input. input and src
    are fp32, index int64 with values in [0, size of axis dim of input); all have the same rank 1 to 4. On every axis
    index is no longer than src and, but for dim, no longer than input; what src has beyond index is unused. dim may be
    negative. Where several elements of src meet at one position they are equal. Values are moved, not changed, and a
    Triton kernel writes the elements of src: torch may copy whole tensors, in any order, but no part of one. NaN,
    infinities and zeros of both signs pass. The result is a new tensor, the inputs stay as they are and may have any
    strides; index may be empty.
    """
    return input.scatter(dim, index, src)
