"""fusion/fused_conv2d_add."""

from dataclasses import replace

import torch.nn.functional as F
from kbx_env.tasks._conv import FLOPS, LEAST, ONE, READS, TAKES, TF32, conv_cases, conv_timed
from kbx_env.tasks._varied import convs

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Cost, Paper, T, task


@task(
    difficulty=4,
    takes=TAKES | {"other": T("*o", optional=True)},
    truth=Close(ulps=16),
    cost=Cost(flops=FLOPS, reads=READS, least=LEAST),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs=TF32 + "stride, dilation, groups, alpha, a number and a broadcast tensor as other, and out= are exercised.",
    cases=(
        replace(ONE, axes={**ONE.axes, "*o": (1, 1, 1, 1)}, given=("other",)),
        *conv_cases(
            {"axes": {"*o": (1, 1, 1, 1)}, "given": ("other",), "alpha": 2.0},
            {"axes": {"*o": ()}},
            {"axes": {"*o": ()}, "other": -1.5},
            {"axes": {"*o": (1, 8)}, "given": ("other",), "alpha": -0.5, "out": True},
            {"axes": {"*o": (9, 6)}, "given": ("other",), "out": True},
            {"axes": {"*o": (9, 16, 16)}, "given": ("other",), "alpha": 3},
            {"axes": {"*o": (2, 4, 12, 1)}, "given": ("other",)},
            {"axes": {"*o": (4, 1, 1)}, "given": ("other",)},
            {"axes": {"*o": (2, 14, 13, 9)}, "given": ("other",), "alpha": 0.7},
        ),
    ),
    varied=(
        *convs(lambda p: {"alpha": p.real(-2, 2)}, out=True, where=lambda c: "other" not in c.args, added=("other",),
               more=lambda p, s: {"axes": {"*o": p.broadcast((s["N"], s["O"], s["P"], s["Q"]))}}),
    ),
    timed=conv_timed(
        given=("bias", "other"),
        axes=({"*o": (16, 64, 224, 224)}, {"*o": (32, 64, 56, 56)}, {"*o": (32, 512, 16, 16)}),
    ),
)  # fmt: skip
def fused_conv2d_add(
    input, weight, bias=None, other=None, stride=1, padding=0, dilation=1, groups=1, alpha=1, out=None
):
    """conv2d(input, weight, bias) + alpha * other for fp32 images.

    Example: fused_conv2d_add([[[[1, 2, 3], [3, 4, 1]]]], [[[[1, -1], [0, 1]]]], None, 2, alpha=0.5) = [[[[4, 1]]]]

    conv2d as torch's: input (N, C, H, W), weight (O, C/groups, R, S), bias (O,) or None, zero padding; stride, padding
    and dilation are an int or a pair (height, width), groups splits the channels. Products and sums in IEEE fp32: TF32
    is too coarse and fails. A new tensor is returned; inputs may have any strides and are not changed.

    other: None (nothing is added), a number, or an fp32 tensor that broadcasts to the result (N, O, H', W'); alpha is a
    number. out: None (the default: a new tensor), or a tensor of the result's shape and dtype with any strides and any
    contents, which is filled and returned.
    """
    y = F.conv2d(input, weight.contiguous(), bias, stride, padding, dilation, groups)
    y = y if other is None else y + alpha * other
    return y if out is None else out.copy_(y)
