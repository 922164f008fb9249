"""math/erf."""

import torch
from kbx_env.tasks._cases import pointwise, stream
from kbx_env.tasks._varied import elementwise

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Choice, Cost, Paper, T, Uniform, task


@task(
    difficulty=3,
    takes={"input_tensor": T("*")},
    truth=Close(),
    cost=Cost(flops="20 * n", least="n"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    cases=pointwise(
        "input_tensor", Uniform(-4, 4),
        special=Choice(0.0, -0.0, 1e-5, 0.5, -1.0, 10.0, -10.0, 1e30, float("inf"), float("-inf")),
    ),
    varied=(elementwise(),),
    timed=stream(),
)  # fmt: skip
def erf(input_tensor):
    """Error function erf(x) = 2/sqrt(pi) * integral over t from 0 to x of exp(-t^2), of every element of input_tensor.

    Example: erf([0, 0.5, -1, 10]) = [0, 0.5205, -0.842701, 1]

    input_tensor is an fp32 tensor of any shape; the result is a new fp32 tensor of the same shape. Large arguments and
    infinities give exactly +-1; NaN is not tested. A few fp32 steps of the typical result are allowed. The input may be
    non-contiguous, 0-d or empty and is not changed.
    """
    return torch.erf(input_tensor)
