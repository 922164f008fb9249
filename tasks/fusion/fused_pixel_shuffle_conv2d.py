"""fusion/fused_pixel_shuffle_conv2d."""

import math
from dataclasses import replace

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
    differs=TF32 + "Factors 1 to 3, dilation and groups are exercised; a middle and a deep layer are timed as well.",
    cases=(
        *conv_cases({}, {"upscale_factor": 2}, out_step=4),
        *conv_cases({"upscale_factor": 3}, out_step=9)[4:6],
        conv_cases({"upscale_factor": 1})[3],
        replace(ONE, args={"upscale_factor": 1}),
    ),
    varied=(
        *convs(
            out_step=lambda p: p.among(1, 4, 5, 2) ** 2,
            more=lambda p, s: {"args": {"upscale_factor": math.isqrt(s["step"])}},
        ),
    ),
    timed=conv_timed(),
)
def fused_pixel_shuffle_conv2d(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1, upscale_factor=2):
    """pixel_shuffle(conv2d(input, weight, bias), upscale_factor) for fp32 images.

    Example: fused_pixel_shuffle_conv2d([[[[2]]]], [[[[1]]], [[[2]]], [[[3]]], [[[4]]]]) = [[[[2, 4], [6, 8]]]]

    conv2d as torch's: input (N, C, H, W), weight (O, C/groups, R, S), bias (O,) or None, zero padding; stride, padding
    and dilation are an int or a pair (height, width), groups splits the channels. Products and sums in IEEE fp32: TF32
    is too coarse and fails. A new tensor is returned; inputs may have any strides and are not changed.

    With r = upscale_factor (an int that divides O twice) the convolution (N, O, H', W') becomes (N, O / r^2, r * H',
    r * W'): y[n, c, i * r + a, j * r + b] = conv[n, c * r^2 + a * r + b, i, j].
    """
    return F.pixel_shuffle(F.conv2d(input, weight.contiguous(), bias, stride, padding, dilation, groups), upscale_factor)
