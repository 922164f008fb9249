"""math/gammaln."""

import torch
from kbx_env.tasks._cases import pointwise, stream
from kbx_env.tasks._varied import elementwise

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Choice, Cost, HalfNormal, Paper, T, Uniform, task


@task(
    difficulty=1,
    takes={"input": T("*")},
    truth=Close(ulps=16),
    cost=Cost(flops="100 * n", least="n"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    cases=(
        *pointwise("input", HalfNormal(0.1), tail=False, out=True,
                   special=Choice(0.5, 1.0, 1.4616321, 2.0, 4.0, 0.01, 13.25, -0.5, -2.5, -4.5, 100.0, 1e4, 1e8)),
        Case({"*": (128, 512)}, draw=HalfNormal(0.1, 30.0)),
        Case({"*": (40, 51)}, draw=Uniform(-0.9, -0.1)),
        Case({"*": (40, 51)}, draw=Uniform(-3.8, -3.2)),
        Case({"*": (3, 421)}, draw=Uniform(-1.8, -1.2), held=True),
    ),
    varied=(elementwise(out=True),),
    timed=stream(draw=HalfNormal(1e-6)),
    differs="More negative arguments and out= are exercised.",
)  # fmt: skip
def gammaln(input, out=None):
    """Logarithm of the absolute value of the gamma function, log|Gamma(x)|, of every element of input.

    Example: gammaln([0.5, 1, 4, -2.5]) = [0.572365, 0, 1.79176, -0.0562437]

    input is an fp32 tensor of any shape. Tested for x in [0.01, 1e8] and for negative x >= -5 at least 0.1 away from an
    integer; zero and the negative integers (poles), infinities and NaN are not tested. Errors are judged against the
    typical size of the results of a call, so that results near the zeros (x = 1 and 2, and some between the negative
    integers) need no relative accuracy. The result has the shape of input and dtype fp32. out: None (the default: a new
    tensor), or a tensor of the result's shape and dtype with any strides and any contents, which is filled and
    returned. The input may be non-contiguous, 0-d or empty and is not changed.
    """
    return torch.special.gammaln(input, out=out)
