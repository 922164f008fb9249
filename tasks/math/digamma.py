"""math/digamma."""

import torch
from kbx_env.tasks._cases import pointwise, stream
from kbx_env.tasks._varied import elementwise

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Choice, Cost, HalfNormal, Paper, T, Uniform, task


@task(
    difficulty=2,
    takes={"input_tensor": T("*")},
    truth=Close(ulps=16),
    cost=Cost(flops="30 * n", least="n"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    cases=(
        *pointwise("input_tensor", HalfNormal(0.1), tail=False,
                   special=Choice(0.5, 1.0, 1.4616321, 2.0, 3.0, 0.05, 9.75, 100.0, 1e4, 1e8, -0.5, -1.25, -7.375)),
        Case({"*": (128, 512)}, draw=HalfNormal(0.1, 10.0)),
        Case({"*": (40, 51)}, draw=Uniform(-0.9, -0.1)),
        Case({"*": (40, 51)}, draw=Uniform(-3.8, -3.2)),
        Case({"*": (3, 421)}, draw=Uniform(-1.8, -1.2), held=True),
    ),
    varied=(elementwise(),),
    timed=stream(draw=Uniform(1, 2)),
    differs="Negative arguments are exercised; as published they never were.",
)  # fmt: skip
def digamma(input_tensor):
    """Digamma function psi(x) = d/dx log Gamma(x) of every element of input_tensor, an fp32 tensor of any shape.

    Example: digamma([0.5, 1, 3, -1.25]) = [-1.96351, -0.577216, 0.922784, 3.71414]

    psi(x) = psi(x + 1) - 1/x, psi(x) ~ log x - 1/(2x) - 1/(12 x^2) + 1/(120 x^4) - ... for large x, and
    psi(x) = psi(1 - x) - pi / tan(pi x). Tested for x in [0.05, 1e8] and for negative x >= -8 that are at least 0.1
    away from an integer. Zero and the negative integers (poles), infinities and NaN are not tested. Errors are judged
    against the typical size of the results of a call, so that results near zero need no relative accuracy. A new fp32
    tensor of the same shape; the input may be non-contiguous, 0-d or empty and is not changed.
    """
    return torch.digamma(input_tensor)
