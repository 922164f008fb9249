"""fusion/fused_pairwise_distance_adaptive_avg_pool2d."""

import math

import torch.nn.functional as F
from kbx_env.tasks._varied import adaptive

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Cost, Literal, Normal, Outlier, Paper, T, Uniform, task


def _case(lead, h, w, size, args=None, **more):
    return Case({"*": lead, "H": h, "W": w}, {"output_size": size} | (args or {}), **more)


def _any_bins(p, s, size):
    args = {"p": p.among(math.inf, p.real(1, 5), p.real(1, 5)), "eps": p.real(0.01, 1), "keepdim": p.chance()}
    return p.like({"*": p.shape(1, 2, 6)} | s, {"output_size": size} | args, draw=Normal())


@task(
    difficulty=4,
    takes={"x1": T("* H W"), "x2": T("* H W")},
    truth=Close(ulps=16),
    cost=Cost(flops="2 * numel(x1)"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="The distance is torch's pairwise_distance, as the text always said: over the last axis, with eps added to "
    "the differences. The published reference reduced all axes but the first and added eps to the norm.",
    cases=(
        _case((1, 1), 2, 2, 1, draw=Literal(1, 2, 3, 5)),
        _case((2, 3), 32, 32, (8, 8), draw=Uniform()),
        _case((2, 3), 32, 32, (8, 8), {"p": 1.0}, draw=Uniform()),
        _case((2, 3), 32, 32, (8, 8), {"keepdim": True}, draw=Uniform()),
        _case((4, 8), 48, 48, (8, 8), draw=Outlier(scale=20)),
        _case((4, 8), 33, 65, (5, 9), {"p": 3.0}),
        _case((2, 3), 40, 50, 1, {"eps": 0.25}, draw=Normal(mean=3)),
        _case((2, 3), 40, 50, (20, 25), {"p": float("inf"), "keepdim": True}),
        _case((2, 3), 40, 50, (7, 11), {"p": 2.5, "eps": 1e-3}),
        _case((2, 5), 3, 4, (7, 9), {"eps": 0.1}),
        _case((2, 5), 6, 10, (None, 3), {"p": 1.0, "eps": 0.5}),
        _case((6,), 9, 700, (3, 350)),
        _case((2, 3), 60, 150, (2, 2), {"keepdim": True}),
        _case((3, 4), 11, 14, 6, layouts={"x1": "transposed", "x2": "channels_last"}),
        _case((3, 4), 12, 14, (6, 7), {"p": 4.0}, layouts={"x2": "strided"}),
        _case((0, 4), 5, 5, 2),
        _case((2, 7), 23, 17, (6, 5), {"eps": 0.05}, held=True),
        _case((3,), 41, 38, (4, 19), {"p": 1.5, "keepdim": True}, held=True),
    ),
    varied=adaptive(_any_bins),
    timed=tuple(_case((16, 3), n, n, (n // 2, n // 2)) for n in (512, 1024, 2048)),
)  # fmt: skip
def fused_pairwise_distance_adaptive_avg_pool2d(x1, x2, output_size, p=2.0, eps=1e-6, keepdim=False):
    """Distance of two averaged maps: pairwise_distance(pool(x1), pool(x2), p, eps, keepdim), all fp32.

    Example: fused_pairwise_distance_adaptive_avg_pool2d([[[1, 2], [3, 4]]], [[[1, 0], [0, 1]]], (2, 1)) = [[1.000001,
    3.000001]]
    Example: fused_pairwise_distance_adaptive_avg_pool2d([[[1, 2], [3, 4]]], [[[1, 0], [0, 1]]], 2, p=1.0, eps=0.5,
    keepdim=True) = [[[3.0], [7.0]]]

    x1 and x2 have the same shape, (N, C, H, W) or (C, H, W). pool is adaptive average pooling to (oH, oW): output_size
    is an int (both axes) or a pair, in which None means the input's own size; output row i averages input rows
    floor(i * H / oH) up to but excluding ceil((i + 1) * H / oH), columns alike; bins may overlap, oH > H is allowed.

    Along the last axis only, the result is (sum over j of |pool(x1)[..., j] - pool(x2)[..., j] + eps|^p)^(1 / p), shape
    (N, C, oH), or (N, C, oH, 1) with keepdim (without N for maps without it). p >= 1, or infinity: the largest
    |difference + eps|. eps is a number. The averages of the difference are as good as the difference of the averages.
    Sum in fp32. New tensor; inputs may have any strides and are not changed; N may be 0.
    """
    a, b = F.adaptive_avg_pool2d(x1, output_size), F.adaptive_avg_pool2d(x2, output_size)
    return F.pairwise_distance(a, b, p, eps, keepdim)
