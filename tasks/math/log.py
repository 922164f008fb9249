"""math/log."""

import torch
from kbx_env.tasks._cases import pointwise, stream
from kbx_env.tasks._varied import elementwise

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Choice, Cost, HalfNormal, Paper, T, Uniform, task

EDGES = Choice(0.0, -0.0, 1.0, -1.0, 2.7182817, 1e-30, 1e30, 0.99999994, float("inf"), float("-inf"), float("nan"))


@task(
    difficulty=1,
    takes={"input": T("*")},
    truth=Close(),
    cost=Cost(flops="20 * n", least="n"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    cases=(
        *pointwise("input", HalfNormal(0.001), special=EDGES, out=True),
        Case({"*": (64, 130)}, draw=Uniform(0.9, 1.1)),
    ),
    varied=(elementwise(out=True),),
    timed=stream(draw=Uniform(1e-6, 1)),
    differs="Infinities, NaN, arguments close to 1 and out= are exercised; as published they never were.",
)
def log(input, out=None):
    """Natural logarithm of every element of input, an fp32 tensor of any shape.

    Example: log([1, 0.5, 0, -3]) = [0, -0.693147, -inf, nan]

    Zeros of both signs give -inf, negative numbers and -inf NaN, +inf gives +inf, NaN stays NaN. Errors are judged
    against the typical size of the results of a call, so that single results near zero (x close to 1) need no relative
    accuracy; where all x lie in [0.9, 1.1] that size is small. Subnormal numbers are not tested. The result has the
    shape of input and dtype fp32. out: None (the default: a new tensor), or a tensor of the result's shape and dtype
    with any strides and any contents, which is filled and returned. The input may be non-contiguous, 0-d or empty and
    is not changed.
    """
    return torch.log(input, out=out)
