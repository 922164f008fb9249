"""fusion/fused_instance_norm_selu_conv2d."""

import torch
import torch.nn.functional as F
from kbx_env.tasks._conv import FLOPS, LEAST, READS, TAKES, TF32, conv_cases, conv_timed
from kbx_env.tasks._varied import convs, large_conv_result, sizes

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Cost, Normal, Paper, task


def _by_exp(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1, eps=1e-5, **unused):
    # exp(z) - 1 is right in fp32, too, but off by a unit of 1: much, where a weight by chance makes all sums small.
    z = F.conv2d(input, weight.contiguous(), bias, stride, padding, dilation, groups)
    scale, alpha = 1.0507009873554804934193349852946, 1.6732632423543772848170429916717  # as torch has them
    return F.instance_norm(scale * torch.where(z > 0, z, alpha * (torch.exp(z) - 1)), eps=eps)


@task(
    difficulty=4,
    takes=TAKES,
    truth=Close(ulps=32, rival=_by_exp),
    cost=Cost(flops=FLOPS, reads=READS, least=LEAST),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs=TF32 + "dilation, groups and eps are exercised; the decorative parameters are said to be so.",
    cases=conv_cases(
        {},
        {"eps": 0.1},
        {"num_features": 4, "momentum": 0.3},
        {"affine": True},
        {"track_running_stats": True, "eps": 1e-3},
    ),
    # Sums of smaller pixels cancel in exp(z) - 1.
    varied=(
        *convs(
            lambda p: {"eps": p.real(0.001, 1), "momentum": p.real(0, 1)}, where=lambda c: "num_features" not in c.args,
            small=2.0**-4,
        ),
        *large_conv_result(where=lambda c: "num_features" not in c.args),
        # 1024 pixels: the last chunk is full.
        *sizes(lambda p: {"N": 1, "C": 2, "D": 2, "H": 32, "W": 32, "O": p.whole(2, 3), "R": 3, "S": 3},
               lambda p, s: {"stride": 1, "padding": 1, "dilation": 1, "groups": 1}, where=lambda c: "num_features" not in c.args,
               draw=Normal()),
    ),
    timed=conv_timed(),
)
def fused_instance_norm_selu_conv2d(
    input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1, num_features=None, eps=1e-5, momentum=0.1,
    affine=False, track_running_stats=False,
):  # fmt: skip
    """instance_norm(selu(conv2d(input, weight, bias))) for fp32 images.

    Example: fused_instance_norm_selu_conv2d([[[[1, 2, 5]]]], [[[[1]]]]) = [[[[-0.980579, -0.392232, 1.372811]]]]

    conv2d as torch's: input (N, C, H, W), weight (O, C/groups, R, S), bias (O,) or None, zero padding; stride, padding
    and dilation are an int or a pair (height, width), groups splits the channels. Products and sums in IEEE fp32: TF32
    is too coarse and fails. A new tensor is returned; inputs may have any strides and are not changed.

    selu(z) = 1.0507009873554805 * (z if z > 0 else 1.6732632423543772 * (exp(z) - 1)). Then each image's channel is
    standardised over its own pixels: (z - mean) / sqrt(variance + eps), variance divided by the number of pixels.
    num_features (None or an int), momentum, affine and track_running_stats are accepted and change nothing: there are
    no weights and no running statistics. There is more than one pixel.
    """
    return F.instance_norm(F.selu(F.conv2d(input, weight.contiguous(), bias, stride, padding, dilation, groups)), eps=eps)
