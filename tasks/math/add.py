"""math/add."""

import torch
from kbx_env.tasks._cases import broadcast, stream
from kbx_env.tasks._varied import both_ways

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Choice, Cost, Normal, Outlier, Paper, T, task

ALPHAS = ({}, {"alpha": 0.5}, {"alpha": -3})


@task(
    difficulty=4,
    takes={"input": T("*a"), "other": T("*b")},
    truth=Close(),
    cost=Cost(flops="2 * max(numel(input), numel(other))"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    cases=(
        *broadcast("input", "other", args=ALPHAS, out=True, special=Choice(0.0, -0.0, 1e10, -1e10, 1e-20, 3.0)),
        Case({"*a": (128, 512), "*b": (128, 512)}, {"alpha": 1.7}, draw=Outlier()),
        Case({"*a": (60, 33)}, {"other": 2.5}),
        Case({"*a": (60, 33)}, {"other": -2, "alpha": 0.25}, layouts={"input": "transposed"}),
        Case({"*a": (5, 211)}, {"other": 0.75, "alpha": 4}, draw=Normal(mean=-1.0), held=True),
    ),
    varied=(both_ways(args=lambda p: {"alpha": p.among(p.whole(-3, 3), p.real(-2, 2))}, out=True, tensors=("other",)),),
    timed=stream("*a", "*b"),
    differs="Broadcasting, negative alpha and out= are exercised; as published they never were.",
)
def add(input, other, alpha=1, out=None):
    """Sum input + alpha * other, elementwise with broadcasting.

    Example: add([1, 2, 3], [4, 5, 6], alpha=0.5) = [3, 4.5, 6]

    input is an fp32 tensor; other is an fp32 tensor or a Python number; alpha is a Python number (int or float). The
    shapes broadcast by torch's rules; either tensor may be non-contiguous, 0-d or empty, and neither is changed. The
    result has the broadcast shape and dtype fp32. out: None (the default: a new tensor), or a tensor of the result's
    shape and dtype with any strides and any contents, which is filled and returned. Compute in fp32, the product and
    the sum may be fused. Infinities and NaN are not tested.
    """
    return torch.add(input, other, alpha=alpha, out=out)
