"""fusion/fused_silu_layer_norm_conv2d."""

import torch.nn.functional as F
from kbx_env.tasks._conv import TF32, conv_cases, conv_reads, conv_timed
from kbx_env.tasks._varied import convs, sizes

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Cost, Normal, Paper, T, Uniform, task


@task(
    difficulty=4,
    takes={
        "x": T("N C H W"),
        "weight": T("U", optional=True),
        "conv_weight": T("O D R S"),
        "conv_bias": T("O", optional=True),
    },
    truth=Close(ulps=32),
    cost=Cost(
        flops="2 * N * O * H * W * D * R * S",
        reads={"weight": "0"} | conv_reads("conv_", "x"),
        least="2 * N * O * H * W * D",
    ),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs=TF32
    + "conv_groups and ln_eps are exercised. weight stays without effect, as published, and is said to be so.",
    cases=(
        *conv_cases(
            {"weight": None, "axes": {"U": 1}},
            {"given": ("weight",), "axes": {"U": 5}, "ln_eps": 0.1},
            {"given": ("weight",), "axes": {"U": 3}},
            prefix="conv_",
            bias="conv_bias",
            names=("x", "conv_weight"),
        ),
        # 1,024 numbers to an image: they end with a block.
        Case({"N": 2, "C": 3, "D": 3, "H": 16, "W": 16, "O": 4, "R": 1, "S": 1, "U": 1}, {"weight": None}),
        # One result, which is 0.
        Case({"N": 1, "C": 2, "D": 2, "H": 3, "W": 3, "O": 1, "R": 3, "S": 3, "U": 1}, {"weight": None}),
    ),
    varied=(
        # Not one channel: the bias of all there is does not change what is standardised.
        *convs(lambda p: {"ln_eps": p.real(0.001, 0.5)}, image="x", weight="conv_weight", prefix="conv_", out_step=lambda p: 2),
        # 2**17 results. 2,697 in each image are an odd number above 2048, which is not exact in fp16.
        *sizes(lambda p: {"N": 49, "C": 1, "D": 1, "H": 35, "W": 37, "O": 3, "R": 7, "S": 7},
               lambda p, s: {"conv_stride": 1, "conv_padding": 0, "conv_dilation": 1, "conv_groups": 1, "ln_eps": 1e-5},
               draw=Normal(), draws={"x": Normal(mean=30, scale=3), "conv_weight": Uniform(0.9, 1.1)}),
    ),
    timed=conv_timed("conv_", ("weight", "conv_bias"), ({"U": 64},) * 3),
)
def fused_silu_layer_norm_conv2d(
    x, weight, conv_weight, conv_bias=None, conv_stride=1, conv_padding=0, conv_dilation=1, conv_groups=1, ln_eps=1e-5
):
    """silu(layer_norm(conv2d(x, conv_weight, conv_bias))) for fp32 images.

    Example: fused_silu_layer_norm_conv2d([[[[1, 2, 5]]]], None, [[[[1]]]]) = [[[[-0.267479, -0.15814, 1.09527]]]]

    conv2d as torch's: x (N, C, H, W), conv_weight (O, C/conv_groups, R, S), conv_bias (O,) or None, zero padding;
    conv_stride, conv_padding and conv_dilation are an int or a pair (height, width), conv_groups splits the channels.
    Products and sums in IEEE fp32: TF32 is too coarse and fails.

    Then each image is standardised over all its channels and pixels, (z - mean) / sqrt(variance + ln_eps) with the
    variance divided by their number and without affine weights; silu(z) = z / (1 + exp(-z)). weight is a tensor or None
    and has no effect. A new tensor is returned; inputs may have any strides and are not changed.
    """
    y = F.conv2d(x, conv_weight.contiguous(), conv_bias, conv_stride, conv_padding, conv_dilation, conv_groups)
    return F.silu(F.layer_norm(y, y.shape[1:], eps=ln_eps))
