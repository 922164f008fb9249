"""fusion/fused_elu_linear."""

import torch
import torch.nn.functional as F
from kbx_env.tasks._linear import FLOPS, TAKES, linear_cases, linear_timed
from kbx_env.tasks._varied import linear

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Cost, Paper, task


def _by_exp(input, weight, bias=None, alpha=1.0, inplace=False):
    # exp(z) - 1 is right in fp32, too, but off by a unit of 1: much, where most sums are small by chance.
    z = F.linear(input.float(), weight.float(), None if bias is None else bias.float())
    return torch.where(z > 0, z, alpha * (torch.exp(z) - 1)).to(input.dtype)


@task(
    difficulty=4,
    takes=TAKES,
    truth=Close(ulps=16, rival=_by_exp),
    cost=Cost(flops=FLOPS),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="Strides, an empty batch, alpha and inplace are exercised; fp16 is rounded once.",
    cases=linear_cases({}, {"alpha": 0.5}, {"inplace": True, "alpha": -2.0}, half=True),
    varied=linear(lambda p: {"alpha": p.real(-2, 3)}, halves=True),
    timed=linear_timed(),
)  # fmt: skip
def fused_elu_linear(input, weight, bias=None, alpha=1.0, inplace=False):
    """elu(input @ weight^T + bias).

    Example: fused_elu_linear([[1, 2]], [[3, 1], [0, -1]], [0.5, 1], alpha=2.0) = [[5.5, -1.26424]]

    input (B, K), weight (O, K), bias (O,) or None: z = input @ weight^T + bias. Products and sums in IEEE fp32: TF32 is
    too coarse and fails. fp16 inputs (all of them): accumulate in fp32 and round once, at the end, to fp16.

    y = z where z > 0, else alpha * (exp(z) - 1). inplace concerns only the intermediate result. A new tensor (B, O) is
    returned; inputs may have any strides, B may be 0.
    """
    return F.elu(F.linear(input, weight, bias), alpha)
