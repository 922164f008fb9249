"""fusion/fused_dropout_relu_batch_norm_conv2d."""

import torch.nn.functional as F
from kbx_env.tasks._conv import FLOPS, LEAST, READS, TAKES, TF32, conv_cases, conv_timed
from kbx_env.tasks._seams import dropout
from kbx_env.tasks._varied import convs, images_first, large_conv_result, sizes

from kbx_env.spec.criteria import Close, Dropout
from kbx_env.spec.task import Case, Choice, Constant, Cost, Normal, Paper, task


@task(
    difficulty=3,
    takes=TAKES,
    truth=Dropout(rate="p", active="training", close=Close(ulps=32)),
    cost=Cost(flops=FLOPS, reads=READS, least=LEAST),
    paper=Paper(),
    differs=TF32
    + "Any random stream is right: each element must be the kept or the dropped value and the mask must look "
    "random; as published, torch's own CUDA stream was demanded bit for bit. training=False, which raised as published, "
    "leaves the dropout out.",
    cases=(
        *conv_cases({"training": False}, {"p": 0.0}, {}, {"p": 0.2}, {"p": 0.3, "inplace": True}),
        # Two values, of which one survives the relu: a mask made of them shows.
        Case(
            {"N": 4, "C": 1, "D": 1, "H": 50, "W": 51, "O": 5, "R": 1, "S": 1},
            draws={
                "input": Choice(-1, *(3,) * 8),
                "weight": Constant(0.5),
            },
        ),
        # Small numbers without a bias.
        Case(
            {"N": 2, "C": 3, "D": 3, "H": 5, "W": 5, "O": 2, "R": 3, "S": 3},
            {"training": False},
            draws={"input": Normal(scale=2.0**-13)},
        ),
    ),
    varied=(
        *convs(lambda p: {"training": False, "p": p.real(0, 1)}),
        *large_conv_result(lambda p: {"training": False}),
        # A large image of few channels: kernels take another path for a short sum, here of 18 products.
        *sizes(
            lambda p: {"N": 1, "C": 3, "D": 3, "H": 409, "W": 432, "O": 5, "R": 2, "S": 3},
            lambda p, s: {"training": False, "stride": (17, 16), "padding": (1, 2), "dilation": (2, 1), "groups": 1},
            draw=Normal(), draws={}, layouts=lambda p, s: images_first(p, "input"),
        ),
    ),
    timed=conv_timed(),
)
def fused_dropout_relu_batch_norm_conv2d(
    input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1, p=0.5, training=True, inplace=False
):
    """dropout(relu(batch_norm(conv2d(input, weight, bias))), p) for fp32 images.

    Example: fused_dropout_relu_batch_norm_conv2d([[[[1, 2, 6]]]], [[[[1]]]], p=0) = [[[[0, 0, 1.388729]]]]

    conv2d as torch's: input (N, C, H, W), weight (O, C/groups, R, S), bias (O,) or None, zero padding; stride, padding
    and dilation are an int or a pair (height, width), groups splits the channels. Products and sums in IEEE fp32: TF32
    is too coarse and fails. A new tensor is returned; inputs may have any strides and are not changed.

    batch_norm takes the statistics of this batch, whatever training says: per output channel (z - mean) / sqrt(variance
    + 1e-5) over batch and pixels, variance divided by their number; no affine weights, no running statistics. relu is
    max(z, 0).

    dropout, only if training: each element is independently zeroed with probability p (0 <= p < 1) and otherwise
    multiplied by 1 / (1 - p). Any random stream will do; it must be fresh on every call, independent between elements,
    and the keep rate must be 1 - p. inplace concerns only the intermediate result.
    """
    y = F.conv2d(input, weight.contiguous(), bias, stride, padding, dilation, groups)
    return dropout(F.relu(F.batch_norm(y, None, None, training=True)), p, training)
