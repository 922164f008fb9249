"""fusion/fused_softplus_linear."""

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
    differs="A batch is timed beside the published single row; the threshold is compared with z, as published, and the text "
    "says so.",
    cases=linear_cases({}, {"beta": 2}, {"threshold": 0.5}, {"beta": 0.3, "threshold": 1}),
    varied=(
        *linear(lambda p: {"beta": p.real(0.3, 3), "threshold": p.whole(20, 40)}),
    ),
    timed=linear_timed((1, 16384, 16384), (1024, 1024, 1024), (4096, 4096, 4096)),
)  # fmt: skip
def fused_softplus_linear(input, weight, bias=None, beta=1, threshold=20):
    """softplus(input @ weight^T + bias) with a linear part for large values.

    Example: fused_softplus_linear([[1, 2]], [[0.5, 0], [0, -1], [9, 8]], beta=2) = [[0.656631, 0.009075, 25]]

    input (B, K), weight (O, K), bias (O,) or None: z = input @ weight^T + bias. Products and sums in IEEE fp32: TF32 is
    too coarse and fails.

    y = z where z > threshold (z itself, not beta * z), else log(1 + exp(beta * z)) / beta, which must not overflow and
    keeps small results. beta (positive) and threshold are numbers; no case has a z so near the threshold that rounding
    would decide. A new tensor (B, O) is returned; inputs may have any strides, B may be 0.
    """
    z = F.linear(input, weight, bias)
    return torch.where(z > threshold, z, torch.logaddexp(beta * z, torch.zeros_like(z)) / beta)
