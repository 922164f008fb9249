"""fusion/fused_cos_signbit."""

import torch
from kbx_env.tasks._cases import pointwise, stream
from kbx_env.tasks._varied import elementwise

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Choice, Cost, Paper, T, Uniform, task

EDGES = Choice(0.0, -0.0, 1e4, -3e4, 1e-20, 3.14159265, 1.5707963, 1.57079625, -4.712389, 7.8539815)


@task(
    difficulty=1,
    takes={"input": T("*")},
    truth=Close(),
    cost=Cost(flops="11 * n", least="n"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="Arguments on both sides of the cosine's zeros are judged.",
    cases=pointwise("input", Uniform(-20, 20), special=EDGES),
    varied=(elementwise(),),
    timed=stream(draw=Uniform(-20, 20)),
)  # fmt: skip
def fused_cos_signbit(input):
    """Cosine of every element of input (fp32, radians, any shape) and its sign bit: a tuple (fp32 tensor, bool
    tensor).

    Example: fused_cos_signbit([0, 2, -3.5]) = ([1, -0.416147, -0.936457], [False, True, True])

    The second result is True where the cosine is negative. No fp32 number has the cosine 0, and the sign must be right
    next to the zeros too (cos(1.57079637) = -4.4e-8): arguments up to 3e4 must be reduced accurately. Infinities and
    NaN are not tested. Both results are new tensors of the input's shape; the input may be non-contiguous, 0-d or empty
    and is not changed.
    """
    y = torch.cos(input)
    return y, torch.signbit(y)
