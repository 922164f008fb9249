"""quantization/conv2d_w8a8."""

import torch.nn.functional as F
from kbx_env.tasks._schemes import int8_symmetric, operand
from kbx_env.tasks._varied import LARGE_IMAGE, convs

from kbx_env.spec.criteria import QuantizationScheme
from kbx_env.spec.task import Case, Choice, Constant, Cost, Normal, Outlier, Paper, T, task
from kbx_env.spec.varied import layout

IMAGE = {"N": 2, "C": 8, "H": 10, "W": 12, "O": 16, "R": 3, "S": 3}
BIAS = ("bias",)


def _eager(input, weight, bias=None, stride=1, padding=0):
    return F.conv2d(input, weight, bias, stride, padding)


def _layer(n, c, size, o):
    return Case({"N": n, "C": c, "H": size, "W": size, "O": o, "R": 3, "S": 3}, {"padding": 1})


LARGE = LARGE_IMAGE | {"C": 30, "D": 30, "H": 67, "W": 67}
"""Fewer channels than a block of the depth has."""


@task(
    difficulty=3,
    takes={"input": T("N C H W"), "weight": T("O C R S"), "bias": T("O", optional=True)},
    # A kernel may leave out the taps that lie in the padding: less than half of them in every case.
    truth=QuantizationScheme(operands="int8", accumulate="int32", least="numel(result) * C * R * S"),
    cost=Cost(flops="2 * N * O * H * W * C * R * S", least="2 * N * O * H * W * C"),
    paper=Paper(cosine=0.95, l1=0.05, rmse=0.1),
    eager=_eager,
    differs="The scheme is stated: one scale per image and one per output channel. Judged against it, with evidence of an int8 "
    "product; as published, the check compared with the unquantized convolution, failed honest int8 kernels on outliers and "
    "passed fp32. The timed baseline is the unquantized convolution.",
    cases=(
        Case(IMAGE | {"R": 1, "S": 1, "H": 4, "W": 4}),
        Case(IMAGE | {"C": 3, "O": 4}, {"stride": 2}),
        Case(IMAGE, {"padding": 1}, given=BIAS, draw=Normal(clamp=10)),
        Case(IMAGE, {"padding": (2, 0), "stride": (1, 2)}, given=BIAS),
        Case(IMAGE | {"C": 33, "O": 20}, {"padding": 1}, draw=Outlier(p=0.01, scale=100)),
        Case(IMAGE | {"R": 2, "S": 3}, layouts={"input": "channels_last", "weight": "transposed", "bias": "strided"}, given=BIAS),
        Case(IMAGE, {"padding": 1}, draw=Normal(scale=1e-6)),
        Case(IMAGE, draws={"input": Normal(scale=1000), "weight": Normal(scale=0.01)}),
        Case(IMAGE, {"padding": 1}, draws={"input": Constant(0)}, given=BIAS),
        Case(IMAGE | {"N": 3}, draw=Choice(0, 0, 0, 1, -3)),
        Case(IMAGE | {"N": 0}),
        # An image whose largest number is 1, one result, more weights of a channel than a block has, lines that are not dense.
        Case(IMAGE | {"N": 3}, draws={"input": Choice(0, 0.5, 1, -1, 0.25), "weight": Choice(0, 0.3, 1, -1, 0.7)}),
        Case(IMAGE | {"N": 1, "C": 3, "H": 3, "W": 3, "O": 1}),
        Case({"N": 1, "C": 460, "H": 4, "W": 4, "O": 3, "R": 3, "S": 3}, given=BIAS),
        Case(IMAGE | {"C": 70, "R": 1, "S": 1, "H": 4, "W": 4}, layouts={"weight": layout((1, 0, 2, 3), (1, 1, 1, 1))}),
        # Many results of few channels.
        Case({"N": 1, "C": 4, "H": 24, "W": 24, "O": 1000, "R": 1, "S": 1}),
        Case(IMAGE | {"N": 3, "C": 21, "O": 9, "H": 9}, {"padding": 1, "stride": 2}, given=BIAS, draw=Normal(scale=7), held=True),
    ),
    varied=convs(groups=False, long=({"C": 130}, {"O": 130}, {"N": 20}, LARGE, LARGE_IMAGE), draw=Normal(scale=2)),
    timed=(_layer(16, 64, 56, 128), _layer(16, 128, 28, 256), _layer(32, 256, 28, 256)),
)  # fmt: skip
def conv2d_w8a8(input, weight, bias=None, stride=1, padding=0):
    """2-D convolution of fp32 images, computed with int8 operands and int32 accumulation; fp32 result.

    Example: conv2d_w8a8([[[[1, 3]]]], [[[[1, -0.5]]]], bias=[1]) = [[[[0.480315]]]]

    input (N, C, H, W), weight (O, C, R, S), bias (O,) or None; stride and padding (of zeros) are an int or a pair (height,
    width). Each image of input (over C, H and W) and each output channel of weight (over C, R and S) is quantized
    symmetrically: scale = max|x| / 127 (1 if all are zero), q = round(x / scale) to int8, half to even, in fp32. The int8
    products accumulate exactly in int32 (tl.dot on int8); y[n, o, i, j] = acc * scale_input[n] * scale_weight[o] + bias[o]
    in fp32.

    Quotients within 4 units in the last place of a half may round either way, so that the fast division of the GPU and
    a product with 127 / max are accepted too. A float product fails, and so does a product more exact than the scheme.
    A new tensor is returned; inputs may have any strides; N may be 0.
    """
    (qx, sx), (qw, sw) = int8_symmetric(input, dim=(1, 2, 3)), int8_symmetric(weight, dim=(1, 2, 3))
    y = F.conv2d(operand(qx), operand(qw), None, stride, padding) * sx * sw.view(1, -1, 1, 1)
    return y if bias is None else y + bias.view(1, -1, 1, 1)
