"""math/cos."""

import torch
from kbx_env.tasks._cases import pointwise, stream
from kbx_env.tasks._varied import elementwise

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Choice, Cost, Paper, T, Uniform, task


@task(
    difficulty=1,
    takes={"input_tensor": T("*")},
    truth=Close(),
    cost=Cost(flops="10 * n", least="n"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    cases=pointwise("input_tensor", Uniform(-20, 20), special=Choice(0.0, -0.0, 1e4, -3e4, 1e-20, 3.14159265, 1.5707963)),
    varied=(elementwise(),),
    timed=stream(draw=Uniform(-20, 20)),
)  # fmt: skip
def cos(input_tensor):
    """Cosine of every element of input_tensor, an fp32 tensor of any shape (radians).

    Example: cos([0, 1, -3.5]) = [1, 0.540302, -0.936457]

    A new fp32 tensor of the same shape; the input may be non-contiguous, 0-d or empty and is not changed. Arguments up
    to 3e4 must be reduced accurately (a few fp32 steps of error); infinities and NaN are not tested.
    """
    return torch.cos(input_tensor)
