"""fusion/fused_gelu_conv2d."""

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
    differs=TF32 + "out= is filled and judged.",
    cases=(*conv_cases({}, {"approximate": "tanh"}, {"out": True}), ONE),
    varied=convs(lambda p: {"approximate": p.among("none", "tanh")}, out=True),
    timed=conv_timed(given=()),
)
def fused_gelu_conv2d(
    input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1, approximate="none", out=None
):
    """gelu(conv2d(input, weight, bias)) for fp32 images.

    Example: fused_gelu_conv2d([[[[1, 2, 3], [3, 4, 1]]]], [[[[1, -1], [0, 1]]]]) = [[[[2.99595, 0]]]]

    conv2d as torch's: input (N, C, H, W), weight (O, C/groups, R, S), bias (O,) or None, zero padding; stride, padding
    and dilation are an int or a pair (height, width), groups splits the channels. Products and sums in IEEE fp32: TF32
    is too coarse and fails. A new tensor is returned; inputs may have any strides and are not changed.

    gelu: approximate="none" is z / 2 * (1 + erf(z / sqrt 2)); "tanh" is z / 2 * (1 + tanh(sqrt(2 / pi) * (z + 0.044715 *
    z^3))). out: None (the default: a new tensor), or a tensor of the result's shape and dtype with any strides and any
    contents, which is filled and returned.
    """
    y = F.gelu(F.conv2d(input, weight.contiguous(), bias, stride, padding, dilation, groups), approximate=approximate)
    return y if out is None else out.copy_(y)
