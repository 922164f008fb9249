"""convolution/conv_transpose2d."""

import torch.nn.functional as F
from kbx_env.tasks._conv import TF32
from kbx_env.tasks._varied import LARGE, SHARE, balanced, longs, sized

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Cost, Normal, Outlier, Paper, T, task

FACTORS = ("input", "weight")
SMALL = {"N": 1, "C": 3, "H": 5, "W": 5, "D": 2, "R": 3, "S": 3, "O": 2}
IMAGE = {"N": 2, "C": 6, "H": 9, "W": 11, "D": 4, "R": 3, "S": 3, "O": 4}


def _twice(n, c):
    axes = {"N": n, "C": c, "H": 16, "W": 16, "D": 2 * c, "R": 3, "S": 3, "O": 2 * c}
    return Case(axes, {"stride": 2, "padding": 1, "output_padding": 1}, given=("bias",))


def _any_options(p, s, **more):
    g = p.among(1, 2, 5, 7)
    c, d, n, h, w = g * s["C"], s["D"], s["N"], s["H"], s["W"]
    stride, dilation = (p.whole(1, 3), p.whole(1, 3)), (p.whole(1, 3), p.whole(1, 2))
    extra = tuple(p.whole(0, max(s, k) - 1) for s, k in zip(stride, dilation, strict=True))
    axes = {"N": n, "C": c, "H": h, "W": w, "D": d, "R": p.whole(2, 4), "S": p.whole(2, 4), "O": d * g}
    return p.like(axes, {"stride": stride, "padding": (p.whole(0, 1), p.whole(0, 1)), "output_padding": extra, "groups": g,
                         "dilation": dilation},
                  **({"full": p.chance(0.9), "draw": Normal(), "draws": balanced(p, *p.shuffled(FACTORS))} | more))  # fmt: skip


@task(
    difficulty=4,
    takes={"input": T("N C H W"), "weight": T("C D R S"), "bias": T("O", optional=True)},
    truth=Close(ulps=16),
    cost=Cost(
        flops="2 * N * C * H * W * D * R * S",
        reads={
            "input": "N * C * landing(H, R, first(stride), first(padding), first(dilation), size(result, 2)) "
            "* landing(W, S, second(stride), second(padding), second(dilation), size(result, 3))"
        },
        least="2 * N * C * H * W * D",
    ),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs=TF32 + "dilation, pairs and groups are exercised.",
    cases=(
        Case(SMALL),
        Case(SMALL, {"stride": 2}, given=("bias",)),
        Case(SMALL, {"stride": 2, "padding": 1, "output_padding": 1}),
        Case(IMAGE, {"padding": 2}, draw=Outlier(scale=20), given=("bias",)),
        Case(IMAGE, {"stride": (3, 2), "output_padding": (2, 0), "padding": (0, 1)}),
        Case(IMAGE, {"dilation": 2, "stride": 2}, given=("bias",)),
        Case(IMAGE | {"O": 12}, {"groups": 3, "stride": 2, "dilation": (1, 3), "output_padding": (0, 1)}, given=("bias",)),
        Case(IMAGE | {"D": 1, "O": 6, "R": 4, "S": 2}, {"groups": 6, "stride": 2, "padding": (1, 0)}),
        Case(IMAGE | {"C": 33, "D": 17, "O": 17}, layouts={"input": "channels_last", "weight": "transposed"}),
        # One result.
        Case({"N": 1, "C": 3, "H": 1, "W": 1, "D": 1, "R": 1, "S": 1, "O": 1}, given=("bias",)),
        # A large image of one channel, most of whose results are cut off: kernels take another path for large tensors.
        Case({"N": 1, "C": 1, "H": 365, "W": 365, "D": 2, "R": 6, "S": 6, "O": 2}, {"padding": 180}),
        # Large by its channels, which are whole blocks.
        Case({"N": 1, "C": 1024, "H": 12, "W": 11, "D": 3, "R": 5, "S": 5, "O": 3},
             {"stride": 2, "padding": 2, "output_padding": 1}),
        Case(IMAGE | {"N": 0}),
        Case(IMAGE | {"C": 10, "D": 5, "O": 10, "H": 7, "W": 6}, {"groups": 2, "stride": 2, "padding": 1}, held=True),
    ),
    varied=(
        *sized(
            _any_options,
            longs({"N": (1, 2), "C": (1, 3), "D": (1, 3), "H": (2, 5), "W": (2, 5)},
                  {"N": 33, "C": 130, "D": 130, "H": 140, "W": 140}, most=40_000),
        ),
        *sized(
            lambda p, s: _any_options(p, s, full=True, draws={"input": LARGE, "weight": SHARE, "bias": LARGE}),
            (lambda p: {"N": 1, "C": p.whole(1, 2), "D": p.whole(2, 4), "H": p.whole(2, 5), "W": p.whole(2, 5)},),
        ),
    ),
    timed=(_twice(16, 64), _twice(32, 128), _twice(32, 256)),
)  # fmt: skip
def conv_transpose2d(input, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1):
    """Transposed 2-D convolution of fp32 images: the gradient of conv2d with respect to its input.

    Example: conv_transpose2d([[[[1, 2]]]], [[[[1, 10, 100]]]], stride=(1, 2)) = [[[[1, 10, 102, 20, 200]]]]

    input (N, C, H, W), weight (C, O/groups, R, S), bias (O,) or None; output (N, O, H', W') with
    H' = (H - 1) * stride - 2 * padding + dilation * (R - 1) + output_padding + 1, W' alike. Every pixel adds
    input[n, c, i, j] * weight[c, o, r, s] to y[n, o, i * stride - padding + r * dilation, j * stride - padding + s *
    dilation] where that lies inside; bias[o] is added once. With groups, input channels of group g reach the output
    channels of group g only. stride, padding, output_padding and dilation are an int or a pair (height, width);
    output_padding is smaller than stride or dilation. Products and sums in IEEE fp32: TF32 is too coarse and fails. A
    new tensor is returned; inputs may have any strides and N may be 0.
    """
    return F.conv_transpose2d(input, weight.contiguous(), bias, stride, padding, output_padding, groups, dilation)
