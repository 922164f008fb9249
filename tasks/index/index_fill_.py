"""index/index_fill_."""

import math

from kbx_env.tasks._varied import long_slices

from kbx_env.spec.criteria import Exact
from kbx_env.spec.task import Case, Cost, Ints, Literal, Outlier, Paper, T, task
from kbx_env.spec.varied import layout


def _case(shape, dim, k, value, **more):
    d = dim % len(shape)
    return Case({"*a": shape[:d], "N": shape[d], "*b": shape[d + 1 :], "K": k}, {"dim": dim, "value": value}, **more)


def _any_axis(p):
    a, b = (tuple(p.whole(2, 5) for _ in range(k)) for k in p.among((0, 3), (1, 2), (3, 0), (2, 1)))
    return _drawn(p, a, p.whole(2, 20), b, p.whole(1, 30))


def _drawn(p, a, n, b, k):
    dim = -1 - len(b) if p.chance() else len(a)
    return p.like(
        {"*a": a, "N": n, "*b": b, "K": k},
        {"dim": dim, "value": p.among(math.nan, -math.inf, p.whole(-9, 9), p.real(-9, 9))},
    )


@task(
    difficulty=2,
    takes={"x": T("*a N *b"), "index": T("K", "i64", Ints(0, "N"))},
    writes={"x": "always"},
    truth=Exact(),
    picks=True,
    # Positions are drawn with repetition: of N / 8 draws, about 15/16 are different.
    # Of an axis with one position nobody has to ask which; x is only written, where it changes.
    cost=Cost(bytes="8 * K * min(1, N - 1) + 4 * min(changed(x), a * b * distinct(index))"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="The signature is the tested one, with the tensor as second argument. Timed over rows, columns and single "
    "elements; as published over 1-D tensors only.",
    cases=(
        _case((3, 3), 0, 2, 5, draws={"index": Literal(0, 2)}),
        _case((3, 4), 1, 1, 3.25),
        _case((64, 128), 0, 16, 3.14),
        _case((64, 130), 1, 33, -2.5, draw=Outlier(scale=20)),
        _case((64, 130), -1, 300, 1, draw=Outlier()),
        # A gap behind each line: the last two axes cannot be walked as one.
        _case((4, 6, 5), 0, 2, 0.25, layouts={"x": layout((0, 1, 2), (1, 1, 1), pad=1)}),
        # Slices of more than a block, and a number of positions that has a divisor in common with the number of blocks.
        _case((5, 37, 300), 1, 8, 1e-20),
        _case((9, 3, 4, 31), -2, 2, -7),
        _case((4097,), 0, 1000, 0.1),
        # More positions and more slices than a program takes, where neighbours along the axis are adjacent in memory.
        _case((10, 1300), 1, 1100, 0.5),
        _case((30, 41), 0, 7, float("nan")),
        _case((33, 65), 0, 11, 0, layouts={"x": "transposed"}),
        _case((33, 65), 1, 20, -1.75, layouts={"x": "strided"}),
        _case((3, 6, 5, 9), 1, 3, float("inf"), layouts={"x": "channels_last", "index": "strided"}),
        _case((6, 77), 1, 0, 2.0),
        _case((1, 50), 0, 3, 2.0),
        _case((7, 211, 13), 1, 40, -0.3, held=True),
        _case((3, 17, 5, 19), -3, 6, 12, layouts={"x": "transposed"}, held=True),
    ),
    varied=(_any_axis, *long_slices(_drawn)),
    timed=(
        *(_case((n, 256), 0, n // 8, 1.0) for n in (1 << 19, 1 << 20)),
        _case((1 << 27,), 0, 1 << 24, 1.0),
        _case((8192, 8192), 1, 1024, 1.0),
    ),
)
def index_fill_(dim, x, index, value):
    """Fill the slices of x at the positions index of axis dim with value, in place, and return x itself.

    Example: index_fill_(1, [[1, 2, 3], [4, 5, 6]], [2, 0], 9) = [[9, 2, 9], [9, 5, 9]]

    x is an fp32 tensor of rank 1 to 4 with any strides, whose elements do not overlap; only the chosen ones change. dim
    may be negative. index is an int64 vector of positions in [0, size of the axis): positions may repeat, come in any
    order, or be none at all. value is a Python int or float, rounded to fp32 (NaN and infinities too). A Triton kernel
    puts it into its places: torch may copy whole tensors, in any order, but fill or copy no part of one.
    """
    return x.index_fill_(dim, index, value)
