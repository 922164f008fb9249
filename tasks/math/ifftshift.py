"""math/ifftshift."""

import math

import torch
from kbx_env.tasks._cases import stream
from kbx_env.tasks._varied import ENDS, elementwise

from kbx_env.spec.criteria import Exact
from kbx_env.spec.task import Case, Choice, Cost, Ints, Literal, Normal, Outlier, Paper, T, task
from kbx_env.spec.varied import layout

LONG = {"dtypes": {"input": "i64"}, "draw": Ints(-(2**40), 2**40)}


def _case(shape, dim="default", **more):
    return Case({"*": shape}, {} if dim == "default" else {"dim": dim}, **more)


@task(
    difficulty=4,
    takes={"input": T("*")},
    truth=Exact(),
    moves=True,
    cost=Cost(flops="0 * n"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    cases=(
        _case((8,), dtypes={"input": "i64"}, draw=Literal(0, 1, 2, 3, 4, 5, 6, 7)),
        _case((129, 256)),
        _case((128, 257), 0, draw=Outlier()),
        _case((9, 40), 1, draw=Choice(0.0, -0.0, 1.5, math.inf, math.nan)),
        _case((127, 255), -1),
        _case((64, 65), (0, 1)),
        _case((1025,), **LONG),
        _case((33, 7, 20), (1, 2), **LONG),
        # The last two axes stay: they may be walked as one.
        _case((5, 7, 9, 11), (0, -3)),
        _case((6, 5, 4, 3, 2)),
        _case((2, 31, 1, 17), 1),
        _case((33, 65), layouts={"input": "transposed"}),
        # A gap of one element behind each line: the last two axes cannot be walked as one.
        _case((5, 7, 9), 0, layouts={"input": layout((0, 1, 2), (1, 1, 1), pad=1)}),
        # The stride of the middle axis is the square of the last one's: they cannot be walked as one.
        _case((5, 7, 2), 0, layouts={"input": layout((0, 1, 2), (1, 1, 3), pad=3)}),
        _case((9, 7, 31), (0, 2), layouts={"input": "strided"}),
        # Expanded: along the middle axis all elements are one.
        _case((3, 5, 9), 0, layouts={"input": layout((0, 1, 2), (1, 0, 1))}),
        _case((4, 3, 9, 8), (2, 3), layouts={"input": "channels_last"}),
        _case((21, 13), 0, layouts={"input": "transposed"}, **LONG),
        _case((0, 3)),
        _case((3, 5, 211), held=True),
        _case((13, 1, 47), (0, -1), held=True, **LONG),
        _case((37, 53), 0, draw=Normal(), held=True),
    ),
    varied=(
        elementwise(lambda p: {"dim": p.among(None, p.axis(4), p.axes(4))}, low=4, high=4),
        elementwise(lambda p: {"dim": p.axis(3)}, low=3, high=3, dtypes={"input": "i64"}, draw=ENDS),
    ),
    timed=(*stream(), _case((4096, 4096)), _case((16, 2048, 2048), (-2, -1)), _case((2048, 5000), 0)),
    differs="Odd sizes, more axes, negative dims and non-contiguous inputs are exercised.",
)
def ifftshift(input, dim=None):
    """Undo fftshift: shift input cyclically to the left by n // 2 along axes of length n.

    Example: ifftshift([0, 1, 2, 3, 4]) = [2, 3, 4, 0, 1]
    Example: ifftshift([[1, 2, 3], [4, 5, 6]], dim=0) = [[4, 5, 6], [1, 2, 3]]

    input is an fp32 or int64 tensor with at least one axis. dim is an int, a tuple of one or more different ints or None
    (every axis); negative ones count from the last. Along each of these axes y[i] = x[(i + n // 2) % n]; the other axes
    stay as they are. The result is a new tensor of the same shape and dtype, compared bit by bit: NaN, +inf, -inf and zeros
    of both signs are moved like other values. The input may be non-contiguous or empty and is not changed. A Triton
    kernel moves the values: torch may copy a whole tensor in its own order (contiguous) and nothing else.
    """
    return torch.fft.ifftshift(input, dim)
