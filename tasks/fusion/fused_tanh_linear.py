"""fusion/fused_tanh_linear."""

import torch
import torch.nn.functional as F
from kbx_env.tasks._linear import FLOPS, TAKES, linear_cases, linear_timed
from kbx_env.tasks._varied import linear

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Cost, Paper, task


@task(
    difficulty=3,
    takes=TAKES,
    truth=Close(ulps=16),
    cost=Cost(flops=FLOPS),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="fp16 is rounded once, at the end; as published the product was rounded before the bias was added.",
    cases=linear_cases(half=True),
    varied=linear(halves=True),
    timed=linear_timed(),
)  # fmt: skip
def fused_tanh_linear(input, weight, bias=None):
    """tanh(input @ weight^T + bias).

    Example: fused_tanh_linear([[1, 2]], [[0.5, 0], [0, -1]], [0.5, 1]) = [[0.761594, -0.761594]]

    input (B, K), weight (O, K), bias (O,) or None: z = input @ weight^T + bias. Products and sums in IEEE fp32: TF32 is
    too coarse and fails. fp16 inputs (all of them): accumulate in fp32 and round once, at the end, to fp16. A new
    tensor (B, O) is returned; inputs may have any strides, B may be 0.
    """
    return torch.tanh(F.linear(input, weight, bias))
