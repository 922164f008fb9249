"""math/sqrt_exp."""

import torch
from kbx_env.tasks._cases import pointwise, stream
from kbx_env.tasks._varied import elementwise

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Choice, Cost, Paper, T, Uniform, task


@task(
    difficulty=2,
    takes={"input": T("*")},
    truth=Close(scale="element", ulps=32),
    cost=Cost(flops="6 * n", least="n"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    cases=pointwise("input", Uniform(0, 100), special=Choice(0.0, -0.0, 0.25, 9.0, 1e-8, 400.0, -1.0, -1e-3), out=True),
    varied=(elementwise(out=True),),
    timed=stream(draw=Uniform(0, 1)),
    differs="Negative arguments are exercised; as published they never were.",
)
def sqrt_exp(input, out=None):
    """Exponential of the square root, exp(sqrt(x)), of every element of input, an fp32 tensor of any shape.

    Example: sqrt_exp([0, 0.25, 9, -1]) = [1, 1.64872, 20.0855, nan]

    Tested for x <= 400; negative x give NaN (-0 gives 1). Results are judged relative to their own size (32 fp32 steps,
    the accuracy of tl.exp is enough). Infinities and NaN are not tested. The result has the shape of input and dtype
    fp32. out: None (the default: a new tensor), or a tensor of the result's shape and dtype with any strides and any
    contents, which is filled and returned. The input may be non-contiguous, 0-d or empty and is not changed.
    """
    return torch.exp(torch.sqrt(input), out=out)
