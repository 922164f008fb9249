"""math/abs."""

import torch
from kbx_env.tasks._cases import pointwise, stream
from kbx_env.tasks._varied import elementwise

from kbx_env.spec.criteria import Exact
from kbx_env.spec.task import Choice, Cost, Normal, Paper, T, task


@task(
    difficulty=1,
    takes={"input_tensor": T("*")},
    truth=Exact(),
    cost=Cost(flops="n", least="0"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    cases=pointwise(
        "input_tensor", Normal(scale=3.0), out=True,
        special=Choice(0.0, -0.0, -1e10, 1e10, -1e-30, float("inf"), float("-inf"), float("nan")),
    ),
    varied=(elementwise(out=True),),
    timed=stream(),
    differs="Compared bit by bit; infinities, NaN and out= are exercised, as published they never were.",
)  # fmt: skip
def abs(input_tensor, out=None):
    """Absolute value of every element of input_tensor, an fp32 tensor of any shape.

    Example: abs([-3, -0.0, 2.5]) = [3, 0, 2.5]

    The result has the shape of input_tensor and dtype fp32. out: None (the default: a new tensor), or a tensor of the
    result's shape and dtype with any strides and any contents, which is filled and returned. The result is compared bit
    by bit: -0 becomes +0, infinities become +inf, NaN stays NaN. The input may be non-contiguous, 0-d or empty and is
    not changed.
    """
    return torch.abs(input_tensor, out=out)
