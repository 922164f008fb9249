"""math/exp_sqrt."""

import torch
from kbx_env.tasks._cases import pointwise, stream
from kbx_env.tasks._varied import elementwise

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Choice, Cost, Paper, T, Uniform, task


@task(
    difficulty=1,
    takes={"input": T("*")},
    truth=Close(scale="element", ulps=16),
    cost=Cost(flops="6 * n", least="n"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    cases=pointwise("input", Uniform(-10, 10), special=Choice(0.0, -0.0, 1.0, -3.0, 1e-6, 30.0, 80.0, -80.0), out=True),
    varied=(elementwise(out=True),),
    timed=stream(draw=Uniform(0, 1)),
    differs="Small results are judged relative to themselves; as published, an absolute 1e-5 hid them.",
)
def exp_sqrt(input, out=None):
    """Square root of the exponential, sqrt(exp(x)), of every element of input, an fp32 tensor of any shape.

    Example: exp_sqrt([0, 1, -3]) = [1, 1.64872, 0.22313]

    Tested for |x| <= 80, where exp(x) neither overflows nor loses digits; results are judged relative to their own size
    (the accuracy of tl.exp is enough). Infinities and NaN are not tested. The result has the shape of input and dtype
    fp32. out: None (the default: a new tensor), or a tensor of the result's shape and dtype with any strides and any
    contents, which is filled and returned. The input may be non-contiguous, 0-d or empty and is not changed.
    """
    return torch.sqrt(torch.exp(input), out=out)
