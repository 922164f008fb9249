"""math/asin."""

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
    cases=pointwise(
        "input_tensor", Uniform(-1, 1), tail=False,
        special=Choice(-1.0, 1.0, 0.0, -0.0, 0.5, -0.7071068, 0.99999994, 1e-4, 1.5, -2.0),
    ),
    varied=(elementwise(),),
    timed=stream(draw=Uniform(-1, 1)),
)  # fmt: skip
def asin(input_tensor):
    """Inverse sine (radians, in [-pi/2, pi/2]) of every element of input_tensor, an fp32 tensor of any shape.

    Example: asin([-1, 0, 0.5, 2]) = [-1.5708, 0, 0.523599, nan]

    A new fp32 tensor of the same shape; the input may be non-contiguous, 0-d or empty and is not changed. -1 and 1
    belong to the domain; outside of [-1, 1] the result is NaN. A few fp32 steps of error are allowed, also close to
    +-1; infinities and NaN in the input are not tested.
    """
    return torch.asin(input_tensor)
