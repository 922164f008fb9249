"""math/floor."""

import torch
from kbx_env.tasks._cases import pointwise, stream
from kbx_env.tasks._varied import ENDS, elementwise

from kbx_env.spec.criteria import Exact
from kbx_env.spec.task import Case, Choice, Cost, Ints, Linspace, Paper, T, Uniform, task

INTS = {"dtypes": {"input": "i64"}, "draw": Ints(-(2**40), 2**40)}
EDGES = Choice(0.0, -0.0, -4.8, 3.5, -3.0, 0.99999994, -1e-20, 8388607.5, -8388607.5, 1e10, float("inf"), float("nan"))


@task(
    difficulty=2,
    takes={"input": T("*")},
    truth=Exact(),
    cost=Cost(flops="n"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    cases=(
        *pointwise("input", Uniform(-50, 50), special=EDGES, out=True),
        Case({"*": (1001,)}, draw=Linspace(-5, 5)),
        Case({"*": (33, 65)}, **INTS),
        Case({"*": (7, 31)}, layouts={"input": "transposed"}, **INTS),
        Case({"*": (5, 40)}, out=True, **INTS),
        Case({"*": (3, 421)}, held=True, **INTS),
    ),
    varied=(elementwise(out=True), elementwise(out=True, low=2, dtypes={"input": "i64"}, draw=ENDS)),
    timed=stream(draw=Uniform(-50, 50)),
    differs="Compared bit by bit; zeros, large values and out= are exercised, as published they never were.",
)
def floor(input, out=None):
    """Largest integer not above x, for every element x of input, an fp32 or int64 tensor of any shape.

    Example: floor([-4.8, -3, 3.5, 0.25]) = [-5, -3, 3, 0]

    The result has the dtype and shape of input; an int64 tensor is copied. out: None (the default: a new tensor), or a
    tensor of the result's shape and dtype with any strides and any contents, which is filled and returned. The result
    is compared bit by bit: -0 stays -0, infinities and NaN stay, -1e-20 gives -1, numbers beyond 2^23 are unchanged.
    Subnormal numbers are not tested. The input may be non-contiguous, 0-d or empty and is not changed.
    """
    return torch.floor(input, out=out)
