"""math/trunc."""

import torch
from kbx_env.tasks._cases import pointwise, stream
from kbx_env.tasks._varied import elementwise

from kbx_env.spec.criteria import Exact
from kbx_env.spec.task import Case, Choice, Cost, Linspace, Paper, T, Uniform, task

EDGES = Choice(0.0, -0.0, -4.8, 3.5, -3.0, 0.99999994, -1e-20, 8388607.5, -8388607.5, 1e10, float("inf"), float("nan"))


@task(
    difficulty=1,
    takes={"input": T("*")},
    truth=Exact(),
    cost=Cost(flops="n"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    cases=(
        *pointwise("input", Uniform(-50, 50), special=EDGES, out=True),
        Case({"*": (1001,)}, draw=Linspace(-5, 5)),
        Case({"*": (40, 51)}, draw=Uniform(-1e11, 1e11)),
    ),
    varied=(elementwise(out=True),),
    timed=stream(draw=Uniform(-50, 50)),
    differs="Compared bit by bit; zeros, large values and out= are exercised, as published they never were.",
)
def trunc(input, out=None):
    """Every element x of input, an fp32 tensor of any shape, rounded towards zero to an integer (as fp32).

    Example: trunc([-4.8, -3, 3.5, 0.25]) = [-4, -3, 3, 0]

    The result is compared bit by bit: numbers between -1 and 0 and -0 give -0, infinities and NaN stay, numbers beyond
    2^23 (also beyond the range of int32 and int64) are unchanged. Subnormal numbers are not tested. The result has the
    shape of input and dtype fp32. out: None (the default: a new tensor), or a tensor of the result's shape and dtype
    with any strides and any contents, which is filled and returned. The input may be non-contiguous, 0-d or empty and
    is not changed.
    """
    return torch.trunc(input, out=out)
