"""fusion/fused_fractional_max_pool2d_with_relu."""

import torch.nn.functional as F
from kbx_env.tasks._varied import longs, sized

from kbx_env.spec.criteria import Windows
from kbx_env.spec.task import Case, Cost, Normal, Outlier, Paper, T, task

SMALL = {"N": 1, "C": 1, "H": 8, "W": 8}
MANY = {"N": 3, "C": 40, "H": 12, "W": 9}
"""Enough planes to see how the windows are drawn."""


FINE = {"N": 4, "C": 100, "H": 14, "W": 14}
"""With windows that are 1.1 elements apart, each tenth of the random numbers has windows of its own."""


def _planes(n, c, out):
    # A step of 2.5 between windows: few different sequences, so that a large plane can be judged.
    size = 2 + 5 * (out - 1) // 2
    return Case({"N": n, "C": c, "H": size, "W": size}, {"kernel_size": 2, "output_size": out})


def _any_windows(p, s):
    # The judge recognises windows by their maxima: it needs several windows, and values that are not all cut to 0.
    kernel = p.among((2, 3), (3, 2), (2, 2), (3, 3), (2, 4), (4, 2))
    size = (p.whole(3, 5), p.whole(3, 5))
    return p.like({"N": p.whole(1, 2), "C": 40} | s, {"kernel_size": kernel, "output_size": size, "output_ratio": None},
                  where=lambda case: case.axes["C"] > 30, draw=Normal())  # fmt: skip


@task(
    difficulty=4,
    takes={"input": T("N C H W")},
    truth=Windows(tensor="input", kernel="kernel_size"),
    # Windows leave out rows and columns wherever they are further apart than long; else they cover everything.
    cost=Cost(
        flops="numel(input)",
        reads={
            "input": "N * C * min(H, first(kernel_size) * size(result, 2)) * min(W, second(kernel_size) * size(result, 3))",
        },
        least="0",
    ),
    paper=Paper(),
    differs="Any fair windows are right: the values must be the maxima of windows that some pair of random numbers gives, and "
    "the numbers must look drawn for every plane; as published, torch's own random stream was demanded bit for bit. Any "
    "position of a tied maximum is right.",
    cases=(
        Case(SMALL, {"kernel_size": (2, 2), "output_size": (4, 4)}),
        Case(SMALL, {"kernel_size": 2, "output_ratio": (0.5, 0.5)}),
        Case(MANY, {"kernel_size": 2, "output_size": (5, 4)}),
        Case(MANY, {"kernel_size": (3, 2), "output_size": (4, 5), "return_indices": True}),
        Case(MANY, {"kernel_size": (2, 3), "output_ratio": (0.7, 0.4)}, draw=Outlier(p=0.01)),
        # More results in a plane than a block has.
        Case({"N": 2, "C": 8, "H": 67, "W": 52}, {"kernel_size": 2, "output_size": (27, 21), "return_indices": True}),
        Case({"N": 1, "C": 60, "H": 7, "W": 17}, {"kernel_size": 3, "output_size": 3}),
        Case({"N": 1, "C": 60, "H": 7, "W": 9}, {"kernel_size": 2, "output_size": (1, 4)}),
        Case({"N": 1, "C": 60, "H": 9, "W": 7}, {"kernel_size": 2, "output_size": (4, 1)}),
        Case(FINE, {"kernel_size": 3, "output_size": 11}),
        Case(MANY, {"kernel_size": 2, "output_size": 4}, layouts={"input": "transposed"}),
        Case(MANY, {"kernel_size": 2, "output_size": 5, "return_indices": True}, layouts={"input": "channels_last"}),
        Case({"N": 0, "C": 2, "H": 8, "W": 8}, {"kernel_size": 2, "output_size": 3}),
        Case({"N": 2, "C": 50, "H": 11, "W": 14}, {"kernel_size": 2, "output_size": (4, 6), "return_indices": True}, held=True),
    ),
    varied=sized(_any_windows, longs({"H": (9, 12), "W": (9, 14)}, {"H": 140, "W": 140}, most=3000)),
    timed=(_planes(16, 3, 401), _planes(16, 3, 801), _planes(16, 3, 1601)),
    held_timed=(_planes(16, 3, 301), _planes(16, 3, 601), _planes(16, 3, 1201)),
)  # fmt: skip
def fused_fractional_max_pool2d_with_relu(
    input, kernel_size, output_size=None, output_ratio=None, return_indices=False
):
    """Fractional max pooling (Graham, 2014) of relu(input), fp32 (N, C, H, W) -> (N, C, Ho, Wo).

    Example: fused_fractional_max_pool2d_with_relu([[[[1, 2, 0], [3, -4, 5], [0, 1, 1]]]], 2, 2) = [[[[3, 5], [3, 5]]]]

    kernel_size (kh, kw), an int or a pair. The size of the result is output_size, an int or a pair, or, where that is None,
    int(H * output_ratio[0]) and int(W * output_ratio[1]). Each plane (n, c) draws two uniform numbers u in [0, 1), one for
    each axis. Along an axis of size H with Ho windows of kh elements, window i < Ho - 1 starts at
    floor((i + u) * a) - floor(u * a) with a = (H - kh) / (Ho - 1), the last window at H - kh (so does a single one). y is the
    maximum of max(input, 0) over the window, rows and columns alike.

    Any random stream will do; it must be fresh on every call and independent between planes and axes. return_indices=True
    returns the pair (y, positions): int64, the row times W plus the column of an element of the window that holds the
    maximum (any of several). The results are new tensors; input may have any strides; N may be 0.
    """
    return F.fractional_max_pool2d(F.relu(input), kernel_size, output_size, output_ratio, return_indices)
