"""linearalgebra/determinant_via_qr."""

import torch
from kbx_env.tasks._varied import LARGE, batches, sizes, unit_determinant

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Cost, Dominant, Literal, Normal, Outlier, Paper, T, task

COMPLETE = {"mode": "complete"}
DOUBLE = {"A": "f64"}


def _sized(n, *batch):
    return {"*batch": batch, "n": n}


def _unit(n):
    """N(0, 1) scaled so that determinants neither overflow nor vanish."""
    return Normal(scale=1.6 / n**0.5)


@task(
    difficulty=3,
    takes={"A": T("*batch n n")},
    truth=Close(ulps=16),
    cost=Cost(flops="batch * 4 * n ** 3 / 3", least="batch * (2 * n ** 3 / 3 - n ** 2)"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="The singular case, whose published result is rounding noise, is gone; out= and batches are exercised; "
    "timed matrices are scaled (as published, determinants overflow from n = 64 on) and come in batches.",
    cases=(
        Case(_sized(2), draw=Literal(1, 2, 3, 4)),
        Case(_sized(3), COMPLETE, draw=Literal(2, 0, 1, 3, 1, 0, 4)),
        Case(_sized(2, 3), COMPLETE, draw=Literal(1, 2, 3, 4, 0)),
        # A reflection cancels where little is below the diagonal, unless it takes the sign that makes it larger.
        Case(_sized(3, 2), draw=Literal(3, 1, 2, 1e-3, 2, -1, -2e-3, 1, 3, -3, 1, 2, 1e-3, -2, -1, -2e-3, 1, 3)),
        Case(_sized(8, 9), draw=_unit(8), dtypes=DOUBLE),
        Case(_sized(8, 3), COMPLETE, draw=Dominant(), dtypes=DOUBLE),
        Case(_sized(16), {"mode": "reduced"}, draw=Outlier(p=0.01), dtypes=DOUBLE),
        Case(_sized(16, 2, 2), COMPLETE, draw=_unit(16), dtypes=DOUBLE),
        Case(_sized(31, 4), draw=_unit(31)),
        Case(_sized(29, 5), COMPLETE, draw=_unit(29)),
        Case(_sized(48), draw=_unit(48)),
        Case(_sized(24, 3), draw=Dominant(2.5)),
        Case(_sized(13, 6), draw=_unit(13), layouts={"A": "transposed"}),
        Case(_sized(9, 5), draw=_unit(9), layouts={"A": "strided"}),
        Case(_sized(14, 7), COMPLETE, draw=_unit(14), out=True),
        Case(_sized(6), draw=Dominant(), out=True),
        Case(_sized(1, 5)),
        Case(_sized(3, 0)),
        Case(_sized(21, 3, 2), draw=_unit(21), held=True),
        Case(_sized(23), COMPLETE, draw=_unit(23), held=True),
    ),
    varied=(
        *batches(
            large=(50, 64),
            args=lambda p: {"mode": p.among("reduced", "complete")},
            out=True,
            fields=lambda n: {"draw": unit_determinant(n)},
        ),
        *sizes(lambda p: {"*batch": p.batch(), "n": p.whole(2, 3)}, draw=LARGE),
    ),
    timed=tuple(Case(_sized(n, b), draw=_unit(n)) for n, b in ((16, 1024), (32, 1024), (64, 512))),
)
def determinant_via_qr(A, *, mode="reduced", out=None):
    """Determinants of a batch of square matrices A (*, n, n) by QR: det(Q) * product of R's diagonal, A = Q R.

    det(Q) is 1 or -1 (each Householder reflection contributes -1). mode, "reduced" or "complete", is the form of QR a
    library would be asked for; for square matrices both are the same. The value is the determinant, sign included.

    fp32 or fp64, IEEE arithmetic in that dtype (no TF32). The result has the batch's shape (*), 0-d for one matrix, and
    A's dtype. out: None (the default: a new tensor), or a contiguous tensor of the result's shape and dtype with any
    contents, which is filled and returned. Batches may be empty. Errors are compared to the typical determinant of the
    batch and to the conditioning. Results neither overflow nor vanish, no matrix is singular; n >= 1, up to 64 x 64 is
    used. A is not changed and may have any strides.

    Example: determinant_via_qr([[1, 2], [3, 4]]) = -2
    Example: determinant_via_qr([[2, 0], [0, 3]], mode="complete") = 6
    """
    q, r = torch.linalg.qr(A, mode)
    det = torch.linalg.det(q) * r.diagonal(dim1=-2, dim2=-1).prod(-1)
    return det if out is None else out.copy_(det)
