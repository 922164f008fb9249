"""math/polygamma."""

import torch
from kbx_env.tasks._cases import pointwise, stream
from kbx_env.tasks._varied import elementwise

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Choice, Cost, HalfNormal, Paper, T, Uniform, task

ORDERS = ({"n": 1}, {"n": 2}, {"n": 3}, {"n": 4})


@task(
    difficulty=4,
    takes={"input": T("*")},
    truth=Close(scale="element", ulps=32),
    cost=Cost(flops="50 * numel(input)", least="numel(input)"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    cases=(
        *pointwise("input", HalfNormal(0.1), args=ORDERS, out=True, tail=False,
                   special=Choice(0.05, 0.5, 1.0, 2.0, 3.75, 5.0, 9.0, 30.0, 1000.0)),
        Case({"*": (64, 130)}, {"n": 1}, draw=HalfNormal(0.1, 20.0)),
        Case({"*": (64, 130)}, {"n": 0}, draw=Uniform(2, 20)),
        Case({"*": (40, 51)}, {"n": 0}, draw=Uniform(0.05, 1)),
        Case({"*": (3, 421)}, {"n": 6}, draw=Uniform(0.3, 6), held=True),
    ),
    varied=(elementwise(lambda p: {"n": p.whole(1, 6)}, out=True, draw=Uniform(0.05, 20)),),
    timed=stream(args={"n": 1}, draw=Uniform(0.1, 1.1)),
    differs="Order 0 and out= are exercised; out is returned, where the published reference returned another tensor.",
)  # fmt: skip
def polygamma(n, input, *, out=None):
    """Polygamma function of order n, the n-th derivative of digamma, of every element of input, an fp32 tensor.

    Example: polygamma(1, [0.5, 1, 10]) = [4.9348, 1.644934, 0.1051663]
    Example: polygamma(2, [0.5, 1]) = [-16.8288, -2.404114]

    For n >= 1 it is (-1)^(n+1) n! sum over k >= 0 of (x + k)^-(n+1), where the far terms follow from
    sum over k of (a + k)^-s = a^(1-s)/(s-1) + a^-s/2 + s a^(-s-1)/12 - s(s+1)(s+2) a^(-s-3)/720 + ...; n = 0 is digamma
    itself, log x - 1/(2x) - 1/(12 x^2) + 1/(120 x^4) - ... for large x. n is one Python int for the whole tensor,
    0 <= n <= 6.

    Tested for x in [0.05, 1000] (n = 0: outside of (1, 2), where the zero is); zero, negative numbers, infinities and
    NaN are not. Results are judged relative to their own size (32 fp32 steps). input may have any shape; the result is
    an fp32 tensor of that shape. out: None (the default: a new tensor), or a tensor of the result's shape and dtype
    with any strides and any contents, which is filled and returned. The input may be non-contiguous, 0-d or empty and
    is not changed.
    """
    return torch.special.polygamma(n, input, out=out)
