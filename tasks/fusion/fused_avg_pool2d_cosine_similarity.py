"""fusion/fused_avg_pool2d_cosine_similarity."""

import torch.nn.functional as F
from kbx_env.tasks._varied import longs, sized

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Choice, Cost, Outlier, Paper, T, Uniform, task

POOLED = "N * C * " + " * ".join(
    f"touched({size}, kernel_size, first(stride, kernel_size), padding)" for size in ("H", "W")
)
"""Elements that a window looks at."""
TOY = {"N": 1, "C": 3, "H": 8, "W": 8}
MIDDLE = {"N": 4, "C": 16, "H": 32, "W": 32}
SPOTS = {"x1": Choice(*[0.0] * 8, 1.0, -2.0), "x2": Choice(*[0.0] * 8, 3.0, 0.5)}


def _any_windows(p, s):
    k = p.whole(1, 7)
    args = {
        "kernel_size": k,
        "stride": p.among(None, p.whole(1, 4)),
        "padding": p.among(k // 2, p.whole(0, k // 2)),
        "eps": p.among(1e-8, p.real(1, 4)),
    }
    return p.like(s, args, draw=Uniform(-1, 2))


@task(
    difficulty=3,
    takes={"x1": T("N C H W"), "x2": T("N C H W")},
    truth=Close(ulps=16),
    cost=Cost(
        flops="6 * numel(x1)",
        reads={"x1": POOLED, "x2": POOLED},
        least="2 * numel(x1)",
    ),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="eps is judged where it acts, zero vectors among them.",
    cases=(
        Case(TOY, {"kernel_size": 2}),
        Case(TOY, {"kernel_size": 2, "stride": 1}),
        Case(TOY, {"kernel_size": 2, "padding": 1}),
        Case(TOY, {"kernel_size": 3, "eps": 1.5}),
        Case(MIDDLE, {"kernel_size": 2, "stride": 2, "padding": 0, "eps": 1e-8}),
        Case(MIDDLE, {"kernel_size": 3, "stride": 2, "padding": 1}, draw=Outlier(0.01, 30)),
        Case(MIDDLE, {"kernel_size": 5, "stride": 3, "eps": 4.0}, draw=Uniform(-1, 2)),
        Case({"N": 2, "C": 4, "H": 9, "W": 12}, {"kernel_size": 2}, draws=SPOTS),
        Case({"N": 3, "C": 1, "H": 17, "W": 5}, {"kernel_size": 3, "stride": 1, "padding": 1}),
        Case({"N": 1, "C": 130, "H": 11, "W": 19}, {"kernel_size": 4, "stride": 3, "padding": 2}, draw=Uniform()),
        Case({"N": 2, "C": 5, "H": 12, "W": 9}, {"kernel_size": 2}, layouts={"x1": "transposed", "x2": "strided"}),
        Case({"N": 2, "C": 5, "H": 12, "W": 9}, {"kernel_size": 4}, layouts={"x1": "channels_last"}),
        Case({"N": 0, "C": 5, "H": 6, "W": 6}, {"kernel_size": 2}),
        Case({"N": 2, "C": 7, "H": 23, "W": 37}, {"kernel_size": 5, "stride": 2, "padding": 2}, held=True),
        Case({"N": 3, "C": 19, "H": 14, "W": 33}, {"kernel_size": 3, "eps": 3.5}, draw=Outlier(), held=True),
    ),
    varied=(
        sized(
            _any_windows,
            longs(
                {"N": (1, 2), "C": (1, 4), "H": (7, 9), "W": (7, 9)},
                {"N": 20, "C": 130, "H": 130, "W": 130},
                most=200_000,
            ),
        ),
    ),
    timed=tuple(
        Case({"N": 16, "C": 64, "H": h, "W": h}, {"kernel_size": 3, "stride": 2, "padding": 1}) for h in (128, 256, 448)
    ),
)
def fused_avg_pool2d_cosine_similarity(x1, x2, kernel_size, stride=None, padding=0, eps=1e-8):
    """Cosine similarity of two fp32 maps (N, C, H, W) over the channels, then 2-D average pooling: (N, 1, Ho, Wo).

    s[n, h, w] = (a . b) / (max(|a|, eps) * max(|b|, eps)) with the vectors a = x1[n, :, h, w] and b = x2[n, :, h, w]; a
    zero vector gives 0.

    Pooling: square windows of kernel_size (int), stride (int; None: kernel_size) and padding (int, at most kernel_size
    / 2) in both directions, Ho = floor((H + 2 padding - kernel_size) / stride) + 1, Wo likewise. Padded positions count
    as 0, and the sum is always divided by kernel_size^2.

    Example: fused_avg_pool2d_cosine_similarity([[[[1, 0], [2, 1]], [[0, 2], [1, 1]]]], [[[[1, 1], [0, 1]], [[0, 1], [1,
    -1]]]], 2) = [[[[0.538580]]]]

    Compute in fp32; squares of the tested values neither overflow nor underflow. The result is a new tensor; the inputs
    are not changed and may have any strides. N may be 0, C is at least 1.
    """
    return F.avg_pool2d(F.cosine_similarity(x1, x2, dim=1, eps=eps).unsqueeze(1), kernel_size, stride, padding)
