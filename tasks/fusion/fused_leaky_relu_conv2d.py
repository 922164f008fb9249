"""fusion/fused_leaky_relu_conv2d."""

import torch.nn.functional as F
from kbx_env.tasks._conv import FLOPS, LEAST, ONE, READS, TAKES, TF32, conv_cases, conv_timed
from kbx_env.tasks._varied import convs

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Cost, Paper, task


@task(
    difficulty=3,
    takes=TAKES,
    truth=Close(ulps=16),
    cost=Cost(flops=FLOPS, reads=READS, least=LEAST),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs=TF32 + "Random images with negative sums are timed.",
    cases=(*conv_cases({}, {"negative_slope": 0.2}, {"inplace": True}, {"negative_slope": -1.5}), ONE),
    varied=(
        *convs(lambda p: {"negative_slope": p.real(-2, 3)}),
    ),
    timed=conv_timed(),
)
def fused_leaky_relu_conv2d(
    input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1, negative_slope=0.01, inplace=False
):
    """leaky_relu(conv2d(input, weight, bias), negative_slope) for fp32 images.

    Example: fused_leaky_relu_conv2d([[[[1, 2, 3], [3, 4, -5]]]], [[[[1, -1], [0, 1]]]]) = [[[[3, -0.06]]]]

    conv2d as torch's: input (N, C, H, W), weight (O, C/groups, R, S), bias (O,) or None, zero padding; stride, padding
    and dilation are an int or a pair (height, width), groups splits the channels. Products and sums in IEEE fp32: TF32
    is too coarse and fails. A new tensor is returned; inputs may have any strides and are not changed.

    y = z where the convolution z is positive, else negative_slope * z (any float). inplace concerns only the intermediate
    result and changes nothing that a caller sees.
    """
    return F.leaky_relu(F.conv2d(input, weight.contiguous(), bias, stride, padding, dilation, groups), negative_slope)
