"""linearalgebra/qr."""

import torch
from kbx_env.tasks._varied import LARGE, TINY, plain, sizes

from kbx_env.spec.criteria import Invariant
from kbx_env.spec.task import Case, Constant, Cost, Eye, Literal, Normal, Outlier, Paper, T, Uniform, task

REDUCED, COMPLETE, ONLY_R = {"mode": "reduced"}, {"mode": "complete"}, {"mode": "r"}
F64 = {"A": "f64"}


def _sized(m, n, *B):
    return {"*B": B, "m": m, "n": n}


@task(
    difficulty=5,
    takes={"A": T("*B m n")},
    truth=Invariant("qr"),
    cost=Cost(flops="4 * numel(A) * min(m, n)", least="4 * numel(A) * min(m, n) / 3"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="Judged by what a QR factorisation promises; as published, the signs and the extra columns of mode "
    "'complete' had to equal LAPACK's. out, published as a tuple and ignored, is the tensor that receives Q.",
    cases=(
        Case(_sized(2, 2), REDUCED, draw=Literal(1, 2, 3, 4)),
        Case(_sized(3, 2), COMPLETE, draw=Literal(1, 2, 3, 4, 5, 6)),
        Case(_sized(2, 3), ONLY_R, draw=Literal(1, 2, 3, 4, 5, 6)),
        Case(_sized(2, 2, 2), draw=Literal(1, 2, 3, 4, 5, 6, 7, 8)),
        Case(_sized(3, 4), COMPLETE, draw=Literal(0, 1, 2, 0, 0, 0, 3, 0, 0, 4, 5, 0)),
        # A reflection cancels where little is below the diagonal, unless it takes the sign that makes it larger.
        Case(_sized(3, 3), draw=Literal(4, 1, 0.5, 3e-4, 5, 1, 1e-4, 2, 6)),
        Case(_sized(3, 3), draw=Literal(-4, 1, 0.5, 3e-4, -5, 1, 1e-4, 2, -6)),
        Case(_sized(5, 3), draw=Eye(), dtypes=F64),
        Case(_sized(4, 3), draw=Constant(0)),
        Case(_sized(1, 1, 3)),
        Case(_sized(48, 32), REDUCED, dtypes=F64),
        Case(_sized(48, 32), COMPLETE, draw=Outlier(), dtypes=F64),
        Case(_sized(32, 48), ONLY_R, dtypes=F64),
        Case(_sized(33, 20, 3), REDUCED, draw=Outlier()),
        Case(_sized(41, 19), COMPLETE),
        Case(_sized(37, 37, 2), ONLY_R, draw=Uniform()),
        Case(_sized(18, 35), COMPLETE, draw=Normal(scale=1e4)),
        Case(_sized(11, 13, 2, 2), draw=Normal(scale=1e-3)),
        Case(_sized(24, 14), draw=Normal(), layouts={"A": "transposed"}),
        Case(_sized(9, 21, 3), COMPLETE, layouts={"A": "strided"}),
        Case(_sized(20, 12), REDUCED, out=True),
        Case(_sized(6, 1)),
        Case(_sized(1, 4), COMPLETE),
        Case(_sized(3, 2, 0), REDUCED),
        Case(_sized(29, 23, 2), COMPLETE, held=True),
        Case(_sized(31, 17, 2), ONLY_R, held=True),
    ),
    varied=(
        sizes(lambda p: {"*B": p.batch(), "m": p.whole(1, 12), "n": p.whole(1, 12)},
              lambda p, s: {"mode": p.among("reduced", "complete")}, out=True),
        sizes(lambda p: {"*B": (), "m": p.whole(50, 64), "n": p.whole(50, 64)},
              lambda p, s: {"mode": p.among("reduced", "complete", "r")}),
        *(
            sizes(lambda p: {"*B": (2,), "m": p.whole(3, 5), "n": p.whole(3, 5)}, lambda p, s: {"mode": "reduced"},
                  where=plain, draws={"A": draw})
            for draw in (TINY, LARGE)
        ),
    ),
    timed=tuple(Case(_sized(n, n, b), REDUCED, draw=Uniform()) for n, b in ((16, 1024), (32, 1024), (64, 512))),
)  # fmt: skip
def qr(A, mode="reduced", out=None):
    """QR factorisation A = Q R of each matrix of a batch A (*, m, n), fp32 or fp64; returns the tuple (Q, R).

    Q has orthonormal columns, R is upper triangular with exact zeros below the diagonal; both have A's dtype. With k =
    min(m, n), mode "reduced" gives Q (*, m, k) and R (*, k, n); mode "complete" gives Q (*, m, m) and R (*, m, n), the
    rows of R below the n-th being exact zeros; mode "r" gives an empty Q of shape (0,), whatever the batch, and R (*,
    k, n) with R^T R = A^T A. Signs (also of R's diagonal) and the extra columns of mode "complete" are free; Q is
    orthonormal also where A has dependent or zero columns. out: None (the default: new tensors), or, not with mode "r",
    a contiguous tensor of Q's shape and dtype with any contents, which is filled with Q and returned as the first
    result; R is new.

    Tolerance: 16 * eps * max(m, n), relative to the largest element of A times sqrt(n) for A = Q R, to 1 for the
    columns of Q, and to the largest element of A^T A times sqrt(n) for R^T R: IEEE arithmetic of A's dtype, no TF32.
    Batches may be empty. A is not changed and may have any strides; matrices up to 64 x 64 are used. No element is
    above 1e6, and the largest of each matrix is above 1e-6, or all are zero.

    Example: qr([[2, 3], [0, 4]], mode="r") = ([], [[2, 3], [0, 4]])
    Example: qr([[3, 5], [4, 0]]) = ([[-0.6, -0.8], [-0.8, 0.6]], [[-5, -3], [0, -4]])
    """
    q, r = torch.linalg.qr(A, mode=mode)
    return (q if out is None else out.copy_(q)), r
