"""matrixmultiply/tril_mm_and_scale."""

import torch
from kbx_env.tasks._varied import LARGE, SHARE, longs, sizes

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Cost, Normal, Outlier, Paper, T, task


def _case(n, p, alpha, beta, **more):
    return Case({"N": n, "P": p}, {"alpha": alpha, "beta": beta}, **more)


@task(
    difficulty=3,
    takes={"A": T("N N"), "B": T("N P")},
    truth=Close(ulps=16),
    cost=Cost(flops="N * (N + 1) * P", reads={"A": "N * (N + 1) / 2"}),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="Operations and bytes are those of the triangle, half of the published count; values above the diagonal are huge in "
    "one case, to show that they do not matter.",
    cases=(
        _case(2, 2, 1.0, 1.0),
        _case(3, 4, 0.5, 2.0),
        _case(64, 70, -0.3, 1.0),
        _case(129, 33, 1.5, 0.7, draw=Outlier(scale=5)),
        _case(100, 257, 1.0, -2, draw=Normal(mean=3)),
        _case(48, 40, 0.5, 0.5, layouts={"A": "transposed", "B": "transposed"}),
        _case(31, 29, 2.0, 1.0, layouts={"A": "strided", "B": "strided"}),
        _case(1, 5, 3.0, 1.0),
        _case(50, 1, 0.2, 4),
        _case(0, 4, 1.0, 1.0),
        _case(83, 61, 0.9, 1.1, held=True),
    ),
    varied=(
        sizes(
            longs({"N": (2, 30), "P": (2, 40)}, {"N": 140, "P": 270}),
            lambda p, s: {"alpha": p.real(-2, 2), "beta": p.real(-2, 2)},
        ),
        # A has 2**19 elements and more.
        sizes(
            lambda p: {"N": p.whole(726, 740), "P": p.whole(2, 9)},
            lambda p, s: {"alpha": p.real(-2, 2), "beta": p.real(-2, 2)},
        ),
        *(
            sizes(lambda p: {"N": p.whole(5, 9), "P": p.whole(5, 9)}, lambda p, s: {"alpha": 1.5, "beta": p.real(0.5, 2)},
                  draws=draws)
            for draws in ({"A": LARGE, "B": SHARE}, {"A": SHARE, "B": LARGE})
        ),
    ),
    timed=tuple(_case(n, n, 0.5, 0.5) for n in (1024, 2048, 4096)),
)
def tril_mm_and_scale(A, B, alpha, beta):
    """beta * (alpha * (tril(A) @ B)), fp32.

    Example: tril_mm_and_scale([[1, 9], [2, 3]], [[1, 0], [1, 1]], 0.5, 2.0) = [[1, 0], [5, 3]]

    A (N, N), of which only the lower triangle with the diagonal counts, B (N, P); alpha and beta are numbers. Products and
    sums in IEEE fp32: TF32 is too coarse and fails. A new (N, P) tensor is returned; inputs may have any strides and are
    not changed; N may be 0.
    """
    return beta * (alpha * (torch.tril(A) @ B))
