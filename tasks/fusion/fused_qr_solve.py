"""fusion/fused_qr_solve."""

import torch
from kbx_env.tasks._varied import LARGE, TINY, sizes

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Cost, Literal, Normal, Orthogonal, Outlier, Paper, Spectrum, T, task

FALLING = Spectrum(*(4 * 0.97**i for i in range(128)))
"""Condition numbers up to 48 (n = 128)."""


def _sized(m, n, k, *batch):
    return {"*batch": batch, "m": m, "n": n, "k": k}


@task(
    difficulty=3,
    takes={"A": T("*batch m n"), "b": T("*batch m k")},
    truth=Close(ulps=16, path="2 * m * n - 2 * n ** 2 / 3 + 2 * m + n"),
    cost=Cost(
        flops="batch * (2 * m * n ** 2 - 2 * n ** 3 / 3 + 2 * m * n * k + n ** 2 * k)",
        least="batch * (2 * n ** 3 / 3 - n ** 2 + 2 * m * n * k - n * k)",
    ),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="Batches (*, m, n) are allowed and timed: a single small system is all latency.",
    cases=(
        Case(_sized(2, 2, 1), draws={"A": Literal(1, 2, 3, 4), "b": Literal(5, 6)}),
        Case(_sized(3, 2, 1), draws={"A": Literal(1, 2, 3, 4, 5, 6), "b": Literal(7, 8, 9)}),
        Case(_sized(2, 2, 2), draws={"A": Literal(1, 2, 3, 4), "b": Literal(5, 6, 7, 8)}),
        Case(_sized(3, 2, 2), draws={"A": Literal(1, 2, 3, 4, 5, 6), "b": Literal(7, 9, 8, 12)}),
        Case(_sized(48, 24, 16)),
        Case(_sized(48, 24, 16), draw=Outlier(p=0.01)),
        Case(_sized(64, 7, 3)),
        Case(_sized(33, 33, 5), draws={"A": FALLING}),
        Case(_sized(29, 1, 4, 3)),
        # One element of each column is far above the others. A reflection that does not move it away from zero cancels it.
        Case(_sized(5, 2, 3), draws={"A": Literal(-1, 2e-4, 1e-4, -1, 1e-4, -1e-4, -1e-4, 1e-4, 1e-4, 2e-4)}),
        Case(_sized(5, 2, 3), draws={"A": Literal(1, 2e-4, 1e-4, 1, 1e-4, -1e-4, -1e-4, 1e-4, 1e-4, 2e-4)}),
        Case(_sized(20, 12, 5, 2, 2)),
        Case(_sized(31, 15, 40), draws={"A": FALLING}),
        Case(_sized(24, 10, 5, 2)),
        Case(_sized(21, 16, 6, 3), layouts={"A": "transposed", "b": "transposed"}),
        Case(_sized(17, 11, 7, 2), layouts={"A": "strided", "b": "strided"}),
        Case(_sized(14, 14, 2, 2), draws={"A": Orthogonal()}),
        # Numbers far below 1, whose squares fp32 does not hold.
        Case(_sized(7, 3, 2), draw=Normal(scale=2.0**-80)),
        Case(_sized(5, 3, 2, 0)),
        Case(_sized(37, 13, 9), held=True),
        Case(_sized(26, 17, 3, 3), held=True),
    ),
    varied=(
        # A square matrix of normal numbers may be all but singular: then the errors of two right kernels differ by any factor.
        sizes(lambda p: {"*batch": p.batch(), "n": 3, "m": p.whole(3, 12), "k": p.among(1, 70)},
              draws=lambda p, s: {"A": FALLING} if s["m"] < 6 else {}),
        sizes(lambda p: {"*batch": (), "n": p.whole(49, 58), "m": p.whole(90, 110), "k": 2}, draws={"b": LARGE}),
        *(
            sizes(lambda p: {"*batch": (), "n": 3, "m": p.whole(6, 12), "k": 2}, draws={"A": law, "b": law})
            for law in (TINY, LARGE)
        ),
    ),
    timed=tuple(Case(_sized(m, n, 10, b)) for m, n, b in ((32, 16, 1024), (64, 32, 512), (128, 64, 512))),
)  # fmt: skip
def fused_qr_solve(A, b):
    """The least-squares solution x of A x = b by way of A = Q R: x = R^-1 Q^T b, for A (*, m, n) with m >= n >= 1.

    b is (*, m, k); * are the same batch axes for both, any number of them, which may be empty. Both are fp32. The result
    (*, n, k) is a new tensor. A has full rank; for m = n, x solves the system.

    IEEE fp32 arithmetic (no TF32). Errors are compared to the typical element of the result and to the conditioning:
    forming A^T A squares the condition number and may be too inexact. Shapes up to 128 x 64 are used, and no element of A
    is above 1e6. A and b are not changed and may have any strides.

    Example: fused_qr_solve([[1, 2], [3, 4]], [[5], [6]]) = [[-4], [4.5]]
    Example: fused_qr_solve([[1, 0], [1, 1], [1, 2]], [[1], [2], [6]]) = [[0.5], [2.5]]
    """
    q, r = torch.linalg.qr(A)
    return torch.linalg.solve_triangular(r, q.mT @ b, upper=True)
