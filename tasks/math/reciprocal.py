"""math/reciprocal."""

import torch
from kbx_env.tasks._cases import pointwise, stream
from kbx_env.tasks._varied import elementwise

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Choice, Cost, Normal, Paper, T, Uniform, task


@task(
    difficulty=2,
    takes={"input": T("*")},
    truth=Close(scale="element"),
    cost=Cost(flops="n"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    cases=pointwise(
        "input", Normal(), out=True,
        special=Choice(0.0, -0.0, 3.0, -0.7, 1e10, -1e10, 1e-30, float("inf"), float("-inf"), float("nan")),
    ),
    varied=(elementwise(out=True),),
    timed=stream(draw=Uniform(0.01, 1)),
    differs="Results are judged relative to themselves; zeros, infinities and out= are exercised.",
)  # fmt: skip
def reciprocal(input, out=None):
    """Reciprocal 1 / x of every element of input, an fp32 tensor of any shape.

    Example: reciprocal([2, -4, 0, 0.1]) = [0.5, -0.25, inf, 10]

    Results are judged relative to their own size (4 fp32 steps). Zeros give infinities of the same sign, infinities
    zero, NaN stays. The result has the shape of input and dtype fp32. out: None (the default: a new tensor), or a
    tensor of the result's shape and dtype with any strides and any contents, which is filled and returned. The input
    may be non-contiguous, 0-d or empty and is not changed.
    """
    return torch.reciprocal(input, out=out)
