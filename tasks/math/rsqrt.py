"""math/rsqrt."""

import torch
from kbx_env.tasks._cases import pointwise, stream
from kbx_env.tasks._varied import elementwise

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Choice, Cost, HalfNormal, Paper, T, Uniform, task


@task(
    difficulty=1,
    takes={"input": T("*")},
    truth=Close(scale="element"),
    cost=Cost(flops="2 * n", least="n"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    cases=pointwise(
        "input", HalfNormal(0.001), out=True,
        special=Choice(0.0, 4.0, 9.0, -1.0, 1e-30, 1e30, -1e-20, float("inf"), float("-inf"), float("nan")),
    ),
    varied=(elementwise(out=True),),
    timed=stream(draw=Uniform(1e-6, 1)),
    differs="Results are judged relative to themselves; infinities, NaN and out= are exercised.",
)  # fmt: skip
def rsqrt(input, out=None):
    """Reciprocal square root 1 / sqrt(x) of every element of input, an fp32 tensor of any shape.

    Example: rsqrt([4, 0.01, 0, -1]) = [0.5, 10, inf, nan]

    Results are judged relative to their own size (4 fp32 steps). +0 gives +inf, negative numbers and -inf NaN, +inf
    zero, NaN stays; -0 and subnormal numbers are not tested. The result has the shape of input and dtype fp32. out:
    None (the default: a new tensor), or a tensor of the result's shape and dtype with any strides and any contents,
    which is filled and returned. The input may be non-contiguous, 0-d or empty and is not changed.
    """
    return torch.rsqrt(input, out=out)
