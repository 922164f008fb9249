"""math/logit."""

import torch
from kbx_env.tasks._cases import pointwise, stream
from kbx_env.tasks._varied import elementwise

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Choice, Cost, Linspace, Paper, T, Uniform, task

# 1 - eps is an fp32 number: near 1 a rounding of the bound would be all that is judged.
MARGINS = ({}, {"eps": 2**-20}, {"eps": 0.0625})


@task(
    difficulty=2,
    takes={"input": T("*")},
    truth=Close(),
    cost=Cost(flops="20 * n", least="n"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    cases=(
        *pointwise("input", Uniform(0, 1), args=MARGINS, out=True, tail=False,
                   special=Choice(0.0, 1.0, 0.5, 1e-30, 0.99999994, 1e-6, -0.5, 1.5, 0.9)),
        Case({"*": (128, 130)}, {"eps": 0.25}, draw=Uniform(-0.5, 1.5)),
        Case({"*": (40, 51)}, {"eps": 0.0}, draw=Uniform(-0.5, 1.5)),
        Case({"*": (40, 51)}, draw=Linspace(0.45, 0.55)),
        Case({"*": (6, 77)}, {"eps": 2**-10}, draw=Uniform(0, 1), out=True),
    ),
    varied=(
        elementwise(lambda p: {"eps": p.among(None, 0.0, p.whole(1, 50) / 128, p.whole(1, 50) / 128, 2.0 ** -p.whole(3, 20))},
                    out=True, draw=Uniform(-0.2, 1.2)),
    ),
    timed=stream(draw=Uniform(0, 1)),
    differs="eps is tested where 1 - eps is an fp32 number; as published the rounding of 1 - 1e-6 decided.",
)  # fmt: skip
def logit(input, eps=None, out=None):
    """Logit log(x / (1 - x)) of every element of input, an fp32 tensor of any shape.

    Example: logit([0.25, 0.5, 0, 1, 2]) = [-1.09861, 0, -inf, inf, nan]
    Example: logit([0.25, 0.5, 0, 1, 2], eps=0.125) = [-1.09861, 0, -1.94591, 1.94591, 1.94591]

    eps=None: x as it is; 0 gives -inf, 1 gives +inf, numbers outside of [0, 1] NaN. With a Python number eps
    (0 <= eps < 0.5) every x is first clamped to [eps, 1 - eps]; eps=0.0 clamps too. eps and 1 - eps are fp32 numbers in
    all tests. Errors are judged against the typical size of the results of a call, so that single results near zero
    (x close to 1/2) need no relative accuracy. Infinities and NaN in the input are not tested. The result has the shape
    of input and dtype fp32. out: None (the default: a new tensor), or a tensor of the result's shape and dtype with any
    strides and any contents, which is filled and returned. The input may be non-contiguous, 0-d or empty and is not
    changed.
    """
    return torch.logit(input, eps, out=out)
