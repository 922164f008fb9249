"""fusion/fused_sigmoid_adaptive_avg_pool2d."""

import torch
import torch.nn.functional as F
from kbx_env.tasks._varied import adaptive

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Cost, Normal, Outlier, Paper, T, task


def _case(lead, h, w, size, **more):
    return Case({"*": lead, "H": h, "W": w}, {"output_size": size}, **more)


def _any_bins(p, s, size):
    return p.like({"*": p.shape(1, 2, 6)} | s, {"output_size": size})


@task(
    difficulty=2,
    takes={"input": T("* H W")},
    truth=Close(ulps=8),
    cost=Cost(flops="numel(input)"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="Uneven and overlapping bins, pairs with None and inputs without a batch are exercised; timed on larger "
    "maps and on more than one size of bin.",
    cases=(
        _case((1, 3), 8, 8, 4, draw=Normal(scale=3)),
        _case((2, 3), 10, 10, (5, 5), draw=Normal(scale=3)),
        _case((4, 8), 32, 32, 4, draw=Outlier(0.01, 30)),
        _case((4, 8), 32, 32, (8, 8)),
        _case((4, 8), 32, 32, (1, 1), draw=Normal(scale=20)),
        _case((64,), 8, 9, (5, 7)),
        _case((3, 4), 33, 65, (4, 8), draw=Normal(scale=5)),
        _case((2, 5), 3, 4, (7, 9)),
        _case((2, 5), 6, 10, (None, 3)),
        _case((2, 5), 3, 10, (7, None)),
        _case((2, 5), 6, 4, (2, 9)),
        _case((2, 3), 90, 110, (2, 1), draw=Normal(mean=2, scale=9)),
        _case((3, 4), 11, 14, 6, layouts={"input": "transposed"}),
        _case((3, 4), 11, 14, 6, layouts={"input": "channels_last"}),
        _case((2, 3), 4, 6, (2, 3), draw=Normal(scale=60)),
        _case((0, 4), 5, 5, 2),
        # Bins of one width, which is no power of two.
        _case((2, 3), 6, 10, (3, 2)),
        _case((2, 7), 23, 17, (6, 5), held=True),
        _case((3,), 41, 19, (2, 19), draw=Normal(scale=3), held=True),
    ),
    varied=adaptive(_any_bins),
    timed=(
        _case((64, 256), 64, 64, (1, 1)), _case((16, 64), 256, 256, (1, 1)), _case((32, 256), 56, 56, (7, 7)),
        _case((16, 64), 256, 256, (64, 64)),
    ),
)  # fmt: skip
def fused_sigmoid_adaptive_avg_pool2d(input, output_size):
    """sigmoid of the average of an fp32 map over near-equal bins: (N, C, H, W) or (C, H, W) -> (..., oH, oW).

    Example: fused_sigmoid_adaptive_avg_pool2d([[[1, 2], [3, -2]]], 1) = [[[0.731059]]]
    Example: fused_sigmoid_adaptive_avg_pool2d([[[1, 2, 3], [3, -2, -4]]], (2, 2)) = [[[0.817574, 0.924142],
    [0.622459, 0.047426]]]

    output_size is an int (both axes) or a pair, in which None means the input's own size. Output row i averages input
    rows floor(i * H / oH) up to but excluding ceil((i + 1) * H / oH); columns alike; bins may overlap, and oH > H is
    allowed. Sum in fp32, divide by the number of pixels of the bin, then 1 / (1 + exp(-mean)), which must not become
    NaN for large averages. New tensor; the input may have any strides and is not changed; N may be 0.
    """
    return torch.sigmoid(F.adaptive_avg_pool2d(input, output_size))
