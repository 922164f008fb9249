"""pooling/avg_pool1d."""

import torch.nn.functional as F

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Cost, Literal, Normal, Outlier, Paper, T, Uniform, task


def _case(lead, length, size, stride=None, padding=0, **more):
    args = (
        {"kernel_size": size}
        | ({} if stride is None else {"stride": stride})
        | ({"padding": padding} if padding else {})
    )
    return Case({"*": lead, "L": length}, args, **more)


def _any_windows(p):
    k = p.whole(1, 70)
    args = {"kernel_size": k, "stride": p.among(None, p.whole(1, 9), p.whole(4, 9)), "padding": p.whole(0, k // 2)}
    return p.like({"*": p.shape(2, 2, 6), "L": p.whole(k, k + 40)}, args)


def _long(p):
    k = p.whole(1, 70)
    args = {"kernel_size": k, "stride": p.among(1, p.among(4, 5, 6)), "padding": p.whole(0, k // 2)}
    return p.like({"*": (p.whole(2, 3), p.whole(2, 3)), "L": p.whole(4300, 4500)}, args)


@task(
    difficulty=2,
    takes={"input": T("* L")},
    truth=Close(ulps=8),
    cost=Cost(
        flops="numel(input)",
        reads={
            "input": "numel(input) / L * touched(L, first(kernel_size), first(stride, kernel_size), first(padding))",
        },
        least="0",
    ),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="Random, outlier and large-mean inputs, 2-D inputs, spaced windows are exercised; overlaps are timed too.",
    cases=(
        _case((1, 2), 6, 2, draw=Literal(1, 2, 4, 8, 16, 32, -1, 5)),
        _case((2, 4), 32, 4, 2),
        _case((2, 4), 16, 3, 1, 1),
        _case((8, 33), 301, 2),
        _case((8, 33), 301, 3, 1, 1, draw=Outlier()),
        _case((4, 16), 515, 7, 3, 3, draw=Outlier(scale=100)),
        _case((3, 5), 200, 50, 25, 25, draw=Normal(mean=30)),
        _case((3, 5), 2001, 301, 100, 7, draw=Uniform(-1, 2)),
        _case((3, 5), 64, 2, 5),
        _case((20,), 131, 4, 3, 2),
        _case((6, 7), 1, 1),
        _case((5, 9), 40, 3, 2, layouts={"input": "transposed"}),
        _case((5, 9), 40, 5, layouts={"input": "strided"}),
        _case((0, 4), 20, 3),
        _case((7, 11), 173, 6, 4, 2, held=True),
        _case((13,), 211, 9, 1, 4, draw=Outlier(), held=True),
    ),
    varied=(_any_windows, _long),
    timed=(
        *(_case((2, 64), n, 2) for n in (1 << 17, 1 << 19)),
        _case((16, 64), 1 << 15, 3, 1, 1),
        _case((16, 64), 1 << 16, 8, 4),
    ),
)
def avg_pool1d(input, kernel_size, stride=None, padding=0):
    """Average of input over windows of its last axis: (N, C, L) or (C, L) -> (..., floor((L + 2 p - k) / s) + 1).

    Example: avg_pool1d([[[1, 2, 4, 8, 16]]], 2) = [[[1.5, 6]]]
    Example: avg_pool1d([[[1, 2, 4, 8]]], 3, stride=1, padding=1) = [[[1, 2.333333, 4.666667, 4]]]

    k = kernel_size, s = stride (None means kernel_size) and p = padding are ints; 0 <= p <= k / 2. Output j is the sum
    of the inputs j * s - p .. j * s - p + k - 1, zeros outside [0, L), divided by k: padding counts. There is at least
    one whole window in L + 2 p; an end that fills no window is left out. fp32, sums in fp32 in any order. The result is
    a new tensor; input may have any strides; N may be 0.
    """
    return F.avg_pool1d(input, kernel_size, stride, padding)
