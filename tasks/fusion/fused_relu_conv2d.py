"""fusion/fused_relu_conv2d."""

import torch.nn.functional as F
from kbx_env.tasks._conv import FLOPS, LEAST, ONE, READS, TAKES, TF32, conv_cases, conv_timed
from kbx_env.tasks._varied import convs

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Cost, Paper, task


@task(
    difficulty=4,
    takes=TAKES,
    truth=Close(ulps=16),
    cost=Cost(flops=FLOPS, reads=READS, least=LEAST),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs=TF32 + "inplace is exercised.",
    cases=(*conv_cases({}, {"inplace": True}), ONE),
    varied=convs(),
    timed=conv_timed(given=()),
)
def fused_relu_conv2d(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1, inplace=False):
    """relu(conv2d(input, weight, bias)) for fp32 images.

    Example: fused_relu_conv2d([[[[1, 2, 3], [3, 4, -5]]]], [[[[1, -1], [0, 1]]]]) = [[[[3, 0]]]]

    conv2d as torch's: input (N, C, H, W), weight (O, C/groups, R, S), bias (O,) or None, zero padding; stride, padding
    and dilation are an int or a pair (height, width), groups splits the channels. Products and sums in IEEE fp32: TF32
    is too coarse and fails. A new tensor is returned; inputs may have any strides and are not changed.

    y = max(conv2d, 0). inplace concerns only the intermediate result and changes nothing that a caller sees.
    """
    return F.relu(F.conv2d(input, weight.contiguous(), bias, stride, padding, dilation, groups))
