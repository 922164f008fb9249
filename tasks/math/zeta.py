"""math/zeta."""

import torch
from kbx_env.tasks._cases import broadcast, stream
from kbx_env.tasks._varied import both_ways

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Choice, Cost, HalfNormal, Paper, T, Uniform, task

HALF = {"input": HalfNormal(2.0), "other": HalfNormal(1.0)}
EDGES = {"input": Choice(-3.0, 0.0, 0.5, 1.0, 1.125, 2.0, 3.0, 10.0, 20.0), "other": Choice(0.25, 1.0, 2.0, 5.0, 10.0)}


@task(
    difficulty=3,
    takes={"input": T("*a"), "other": T("*b")},
    truth=Close(scale="element", ulps=32),
    cost=Cost(
        flops="60 * max(numel(input), numel(other))",
        reads={"other": "max(0, numel(other) - numel(input) + above(input, 1))"},
        least="max(numel(input), numel(other))",
    ),
    paper=Paper(rtol=1e-5, atol=1e-5),
    cases=(
        *broadcast("input", "other", Uniform(1.5, 6), out=True),
        Case({"*a": (128, 512), "*b": (128, 512)}, draws=HALF),
        Case({"*a": (3, 150), "*b": (3, 150)}, draws=EDGES),
        Case({"*a": (64, 130), "*b": (130,)}, draws={"input": Uniform(1.1, 3), "other": Uniform(0.2, 1)}),
        Case({"*a": (64, 130), "*b": (64, 130)}, draws={"input": Uniform(5, 20), "other": Uniform(0.5, 20)}),
        Case({"*a": (40, 51), "*b": (40, 51)}, draws={"input": Uniform(1.1, 4), "other": Uniform(20, 1000)}),
        Case({"*a": (5, 211), "*b": (5, 211)}, draws={"input": Uniform(1.05, 12), "other": Uniform(0.3, 8)}, held=True),
    ),
    varied=(both_ways(out=True, tensors=("other",)),),
    timed=stream("*a", "*b", draws={"input": Uniform(2, 3), "other": Uniform(1, 2)}),
    differs="Small and large arguments, broadcasting and out= are exercised; results are judged by their own size.",
)
def zeta(input, other, out=None):
    """Hurwitz zeta function zeta(x, q) = sum over k >= 0 of (q + k)^-x, elementwise with broadcasting.

    Example: zeta([2, 3, 1, 0.5], [1, 0.5, 2, 2]) = [1.644934, 8.414398, inf, nan]

    input (x) and other (q) are fp32 tensors. The far terms of the sum follow from (Euler and Maclaurin)
    sum over k >= 0 of (a + k)^-x = a^(1-x)/(x-1) + a^-x/2 + x a^(-x-1)/12 - x(x+1)(x+2) a^(-x-3)/720 + ... .
    x = 1 gives +inf, x < 1 NaN. Tested for x in [1.05, 20] and q in [0.2, 1000], where the result neither overflows nor
    underflows; q <= 0, infinities and NaN are not tested. Results are judged relative to their own size: 32 fp32 steps,
    more where rounding x or q to fp32 itself brings more (x log q large).

    The shapes broadcast by torch's rules; either tensor may be non-contiguous, 0-d or empty, and neither is changed.
    The result has the broadcast shape and dtype fp32. out: None (the default: a new tensor), or a tensor of the
    result's shape and dtype with any strides and any contents, which is filled and returned.
    """
    return torch.special.zeta(input, other, out=out)
