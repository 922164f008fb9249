"""convolution/conv2d."""

import torch.nn.functional as F
from kbx_env.tasks._conv import IMAGE, ONE, READS, SMALL, conv_timed
from kbx_env.tasks._varied import convs

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Cost, Outlier, Paper, T, task


@task(
    difficulty=4,
    takes={"input": T("N C H W"), "weight": T("O D R S"), "bias": T("O", optional=True)},
    truth=Close(ulps=16),
    cost=Cost(
        flops="2 * N * O * (H - R + 1) * (W - S + 1) * D * R * S",
        reads=READS,
        least="2 * N * O * (H - R + 1) * (W - S + 1) * D",
    ),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="IEEE fp32 products are demanded of candidate, reference and timed baseline alike; as published, the "
    "reference could silently be TF32 (its defect 6.2). bias, groups and pairs are exercised.",
    cases=(
        Case(SMALL),
        ONE,
        Case(SMALL, {"stride": 2}),
        Case(SMALL, {"padding": 1}, given=("bias",)),
        Case(SMALL, {"dilation": 2}),
        Case(IMAGE, {"stride": 2, "padding": 1}),
        Case(IMAGE, {"stride": 2, "padding": 1}, draw=Outlier(scale=20), given=("bias",)),
        Case(IMAGE | {"C": 32, "D": 32, "H": 11, "W": 13, "O": 33}, {"padding": (1, 0), "stride": (1, 2)}),
        Case(IMAGE | {"C": 6, "D": 2, "O": 9}, {"groups": 3, "padding": 1}, given=("bias",)),
        Case(IMAGE | {"C": 4, "D": 1, "O": 4, "R": 5, "S": 1}, {"groups": 4, "dilation": (1, 2)}),
        Case(IMAGE | {"C": 8, "D": 8, "R": 1, "S": 1}, layouts={"input": "channels_last", "weight": "transposed"}),
        Case(IMAGE | {"N": 0}),
        Case(IMAGE | {"C": 20, "D": 10, "H": 19, "W": 7, "O": 14}, {"groups": 2, "padding": 2}, held=True),
    ),
    varied=convs(),
    timed=conv_timed(),
)
def conv2d(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
    """2-D cross-correlation of fp32 images, with zero padding.

    Example: conv2d([[[[1, 2, 3], [3, 4, -5]]]], [[[[1, -1], [0, 1]]]]) = [[[[3, -6]]]]

    y[n, o, i, j] = bias[o] + sum over c, r, s of
        weight[o, c, r, s] * input[n, g * C/groups + c, i * stride + r * dilation - padding, ...]

    input (N, C, H, W), weight (O, C/groups, R, S), bias (O,) or None; output (N, O, H', W') with
    H' = (H + 2 * padding - dilation * (R - 1) - 1) // stride + 1, W' alike. Output channel o belongs to group
    g = o // (O / groups). stride, padding and dilation are an int or a pair (height, width). Inputs may have any
    strides and N may be 0. Products and sums in IEEE fp32: TF32 is too coarse and fails. A new tensor is returned.
    """
    return F.conv2d(input, weight.contiguous(), bias, stride, padding, dilation, groups)
