"""fusion/fused_cholesky_solve."""

import torch
from kbx_env.tasks._varied import LARGE, batches

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import SPD, Case, Cost, Literal, Outlier, Paper, Spectrum, T, task

GRADED = Spectrum(*(4 * 0.97**i for i in range(128)), symmetric=True)
WIDE = {"A": Spectrum(*(50 * 0.9**i for i in range(40)), symmetric=True)}


def _sized(n, k, *batch):
    return {"*batch": batch, "n": n, "k": k}


@task(
    difficulty=4,
    takes={"A": T("*batch n n", draw=SPD()), "b": T("*batch n k")},
    truth=Close(ulps=16, path="n ** 2 / 3 + 2 * n"),
    cost=Cost(flops="batch * (n ** 3 / 3 + 2 * n ** 2 * k)", reads={"A": "batch * n * (n + 1) / 2"}),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="Well-conditioned systems: as published, rounding errors of the reference exceed the tolerance 150 times. "
    "Batches (*, n, n) are allowed and timed: a single small system is all latency.",
    cases=(
        Case(_sized(2, 1), draws={"A": Literal(4, 1, 1, 3), "b": Literal(1, 2)}),
        Case(_sized(3, 1), draws={"A": Literal(6, 2, 1, 2, 5, 2, 1, 2, 4), "b": Literal(1, 2, 3)}),
        Case(_sized(2, 2), draws={"A": Literal(5, 2, 2, 3), "b": Literal(1, 2, 3, 4)}),
        Case(_sized(3, 2), draws={"A": Literal(7, 2, 1, 2, 6, 3, 1, 3, 5), "b": Literal(1, 2, 3, 4, 5, 6)}),
        Case(_sized(48, 8)),
        Case(_sized(48, 8), draws={"b": Outlier(p=0.02)}),
        Case(_sized(33, 5), draws=WIDE),
        Case(_sized(40, 1), draws={"A": GRADED}),
        Case(_sized(16, 3, 6)),
        Case(_sized(17, 40, 2, 2), draws={"A": GRADED}),
        Case(_sized(24, 5, 2)),
        Case(_sized(21, 6, 3), layouts={"A": "transposed", "b": "transposed"}),
        Case(_sized(11, 7, 2), layouts={"A": "strided", "b": "strided"}),
        Case(_sized(1, 3, 4)),
        Case(_sized(4, 2, 0)),
        Case(_sized(27, 5, 3), held=True),
        Case(_sized(37, 2), draws={"A": GRADED}, held=True),
    ),
    varied=batches(more={"k": (1, 70)}, large=(65, 80),
                   fields=lambda n: {"draws": {"A": SPD(0.5)} | ({"b": LARGE} if n > 64 else {})}),
    timed=tuple(Case(_sized(n, 1, b)) for n, b in ((16, 8192), (32, 8192), (64, 1024), (128, 256))),
)  # fmt: skip
def fused_cholesky_solve(A, b):
    """The x with A x = b for symmetric positive definite fp32 A (*, n, n), by way of A = L L^T.

    b is fp32, (*, n, k); * are the same batch axes for both, any number of them, which may be empty; n >= 1. The result
    (*, n, k) is a new tensor. A is symmetric to rounding: either triangle may be used, and no pivoting is needed.

    IEEE fp32 arithmetic (no TF32). Errors are compared to the typical element of the result and to the conditioning;
    condition numbers are below 100. Matrices that are not positive definite are not tested; n up to 128 is used. A and
    b are not changed and may have any strides.

    Example: fused_cholesky_solve([[4, 1], [1, 3]], [[1], [2]]) = [[0.090909], [0.636364]]
    """
    return torch.cholesky_solve(b, torch.linalg.cholesky(A))
