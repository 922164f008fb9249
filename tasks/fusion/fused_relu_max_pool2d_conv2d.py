"""fusion/fused_relu_max_pool2d_conv2d."""

import torch.nn.functional as F
from kbx_env.tasks._conv import FLOPS, LEAST, TAKES, TF32, conv_cases, conv_timed
from kbx_env.tasks._varied import LARGE_FLAT_IMAGE, LARGE_IMAGE, convs

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Cost, Paper, Uniform, task

POOLED = " * ".join((
    "N * C",
    *(f"pooled({size}, {of}(conv_stride), {of}(conv_padding), {of}(conv_dilation), {of}(pool_kernel_size), "
      f"{of}(pool_stride, pool_kernel_size), {of}(pool_padding), {of}(pool_dilation), pool_ceil_mode)"
      for size, of in (("H, R", "first"), ("W, S", "second"))),
))  # fmt: skip
"""Elements of the image that windows touch of whose sums some window of the pooling makes use."""


@task(
    difficulty=4,
    takes=TAKES,
    truth=Close(ulps=16),
    cost=Cost(flops=FLOPS, reads={"input": POOLED}, least=LEAST),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs=TF32 + "Every option of the pooling is exercised; no size dominates the time.",
    cases=(
        *conv_cases(
            {},
            {"pool_kernel_size": 3, "pool_stride": 1, "pool_padding": 1},
            {"pool_stride": 1},
            {"pool_kernel_size": (3, 2), "pool_padding": (1, 0)},
            {"pool_kernel_size": 3, "pool_stride": 2, "pool_ceil_mode": True, "inplace": True},
            {"pool_kernel_size": 2, "pool_stride": (3, 2), "pool_dilation": 2},
            {"pool_kernel_size": (2, 3), "pool_stride": 2, "pool_padding": 1, "pool_ceil_mode": True},
            # Of an odd number of rows: the last window would begin where the padding does, and is dropped.
            {"pool_padding": 1, "pool_ceil_mode": True},
            prefix="conv_",
        ),
        # One result, which no relu makes zero.
        Case({"N": 1, "C": 3, "D": 3, "H": 4, "W": 4, "O": 1, "R": 3, "S": 3},
             draws={"input": Uniform(1, 2), "weight": Uniform(0.5, 1)}),
    ),
    varied=(
        *convs(
            lambda p: {
                "pool_kernel_size": p.among(2, 3, 4, (2, 4), (4, 3)),
                "pool_stride": p.among(None, 1, (2, 1)),
                "pool_padding": p.among(0, 1, (0, 1), (1, 0)),
                "pool_dilation": p.among(1, 1, (1, 2)),
                "pool_ceil_mode": p.chance(),
            },
            prefix="conv_",
            least=8,
        ),
        # Of large images, with fewer channels than a block has, whose windows are all looked at.
        *convs(
            lambda p: {"pool_kernel_size": p.among(2, 3), "pool_stride": 1, "pool_padding": p.among(0, 1), "pool_dilation": 1},
            prefix="conv_",
            long=(LARGE_IMAGE | {"C": 20, "D": 20, "H": 81, "W": 81}, LARGE_FLAT_IMAGE),
        ),
    ),
    timed=conv_timed("conv_"),
)
def fused_relu_max_pool2d_conv2d(
    input, weight, bias=None, conv_stride=1, conv_padding=0, conv_dilation=1, conv_groups=1, pool_kernel_size=2,
    pool_stride=None, pool_padding=0, pool_dilation=1, pool_ceil_mode=False, inplace=False,
):  # fmt: skip
    """relu(max_pool2d(conv2d(input, weight, bias))) for fp32 images.

    Example: fused_relu_max_pool2d_conv2d([[[[1, 2, 3, 9], [3, 4, -5, 0]]]], [[[[2]]]]) = [[[[8, 18]]]]

    conv2d as torch's: input (N, C, H, W), weight (O, C/conv_groups, R, S), bias (O,) or None, zero padding; conv_stride,
    conv_padding and conv_dilation are an int or a pair (height, width). Products and sums in IEEE fp32: TF32 is too
    coarse and fails. max_pool2d as torch's: windows of pool_kernel_size, pool_stride apart (None: the kernel size), taps
    pool_dilation apart, pool_padding of -inf (at most half the kernel); each an int or a pair. The number of windows is
    (size + 2 * padding - dilation * (kernel - 1) - 1) / stride + 1, rounded down, with pool_ceil_mode up, where a last
    window that would begin beyond the image and its left padding is dropped; taps beyond the image count as -inf.

    y = max(pooled, 0), a new tensor. inplace concerns only the intermediate result. Inputs may have any strides.
    """
    y = F.conv2d(input, weight.contiguous(), bias, conv_stride, conv_padding, conv_dilation, conv_groups)
    return F.relu(F.max_pool2d(y, pool_kernel_size, pool_stride, pool_padding, pool_dilation, pool_ceil_mode))
