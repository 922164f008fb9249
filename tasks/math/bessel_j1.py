"""math/bessel_j1."""

import math

import torch
from kbx_env.tasks._cases import pointwise, stream
from kbx_env.tasks._varied import elementwise

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Choice, Cost, Linspace, Paper, T, Uniform, task


@task(
    difficulty=3,
    takes={"input": T("*")},
    truth=Close(ulps=16),
    cost=Cost(flops="100 * n", least="n"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    cases=(
        *pointwise("input", Uniform(-20, 20), out=True,
                   special=Choice(0.0, -0.0, 1e-4, -1.0, 1.8411838, 3.8317059, -7.0155867, 40.0)),
        Case({"*": (513,)}, draw=Linspace(-10, 10)),
    ),
    varied=(elementwise(out=True),),
    timed=stream(draw=Uniform(0, 10)),
    eager=torch.special.bessel_j1,
    differs="Judged against the integral: torch is off by up to 5e-7 for 5 < |x| < 8, also in fp64. Arguments beyond "
    "10 and out= are exercised; as published they never were. Timed on [0, 10).",
)  # fmt: skip
def bessel_j1(input, out=None):
    """Bessel function of the first kind of order 1, J_1(x), of every element of input, an fp32 tensor of any shape.

    Example: bessel_j1([0, 1, -3, 10]) = [0, 0.440051, -0.339059, 0.0434727]

    J_1 is odd; J_1(x) = 1/pi * integral over t from 0 to pi of cos(t - x sin t). Tested for |x| <= 50; infinities and
    NaN are not. Errors are judged against the typical size of the results of a call (16 fp32 steps of it, more where
    rounding x itself brings more), so that results near the zeros of J_1 need no relative accuracy. The result has the
    shape of input and dtype fp32. out: None (the default: a new tensor), or a tensor of the result's shape and dtype
    with any strides and any contents, which is filled and returned. The input may be non-contiguous, 0-d or empty and
    is not changed.
    """
    # J_1(x) = 2/pi * integral of sin t sin(x sin t) over a quarter turn, exact by the midpoint rule.
    x = input.double()
    y = torch.zeros_like(x)
    for k in range(32):
        weight = math.sin((k + 0.5) * math.pi / 64)
        y += weight / 32 * torch.sin(weight * x)
    y = y.to(input.dtype)
    return y if out is None else out.copy_(y)
