"""pooling/adaptive_avg_pool2d."""

import torch.nn.functional as F
from kbx_env.tasks._varied import adaptive

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Cost, Normal, Outlier, Paper, T, task

BATCH = {"*": (1, 64), "H": 8, "W": 9}


def _any_bins(p, s, size):
    return p.like({"*": p.shape(1, 2, 6)} | s, {"output_size": size})


@task(
    difficulty=3,
    takes={"input": T("* H W")},
    truth=Close(ulps=8),
    cost=Cost(flops="numel(input)"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="Random, outlier and large-mean inputs, pairs with None and more bins than pixels are exercised.",
    cases=(
        Case(BATCH, {"output_size": 5}),
        Case(BATCH, {"output_size": (5, 7)}),
        Case({"*": (64,), "H": 8, "W": 9}, {"output_size": 5}),
        Case({"*": (64,), "H": 8, "W": 9}, {"output_size": (5, 7)}),
        Case({"*": (2, 3), "H": 33, "W": 65}, {"output_size": (4, 8)}, draw=Outlier(scale=20)),
        Case({"*": (2, 3), "H": 40, "W": 50}, {"output_size": 1}, draw=Normal(mean=100)),
        Case({"*": (2, 5), "H": 3, "W": 4}, {"output_size": (7, 9)}),
        Case({"*": (2, 5), "H": 6, "W": 10}, {"output_size": (None, 3)}),
        Case({"*": (2, 3), "H": 4, "W": 100}, {"output_size": (None, 1)}),
        Case({"*": (2, 5), "H": 3, "W": 10}, {"output_size": (7, None)}),
        Case({"*": (3, 4), "H": 11, "W": 14}, {"output_size": 6}, layouts={"input": "transposed"}),
        Case({"*": (3, 4), "H": 11, "W": 14}, {"output_size": 6}, layouts={"input": "channels_last"}),
        Case({"*": (0, 4), "H": 5, "W": 5}, {"output_size": 2}),
        Case({"*": (1, 3), "H": 32, "W": 64}, {"output_size": (16, 32)}),
        Case({"*": (2, 7), "H": 23, "W": 17}, {"output_size": (6, 5)}, held=True),
    ),
    varied=adaptive(_any_bins),
    timed=tuple(Case({"*": (1, 3), "H": n, "W": n}, {"output_size": (n // 2, n // 2)}) for n in (1024, 4096, 8192)),
)
def adaptive_avg_pool2d(input, output_size):
    """Average of an fp32 image over near-equal bins: (N, C, H, W) or (C, H, W) -> (..., oH, oW).

    Example: adaptive_avg_pool2d([[[1, 2, 3], [4, 5, 6]]], (1, 2)) = [[[3, 4]]]

    output_size is an int (both axes) or a pair, in which None means the input's own size. Output row i averages the input's
    rows floor(i * H / oH) up to but excluding ceil((i + 1) * H / oH); columns alike; bins may overlap, and oH > H is
    allowed. Sum in fp32, then divide by the number of pixels of the bin. The result is a new tensor; input may have any
    strides; N may be 0.
    """
    return F.adaptive_avg_pool2d(input, output_size)
