"""linearalgebra/determinant_lu."""

import torch
from kbx_env.tasks._varied import LARGE, batches, sizes, unit_determinant

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Cost, Dominant, Literal, Normal, Outlier, Paper, T, task

PLAIN = {"pivot": False}
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
    cost=Cost(flops="batch * 2 * n ** 3 / 3", least="batch * (2 * n ** 3 / 3 - n ** 2)"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="out= and larger batches are exercised; matrices for pivot=False are safe without row swaps; timed ones "
    "are scaled (as published, determinants overflow from n = 64 on) and come in batches.",
    cases=(
        Case(_sized(2), draw=Literal(4, 3, 2, 1)),
        Case(_sized(3), PLAIN, draw=Literal(2, 1, 0, 4, 5, 6, -2, 3, 3)),
        Case(_sized(2, 2), draw=Literal(1, 2, 3, 4, 5, 6, 7, 8)),
        Case(_sized(4), draw=Literal(0, 2, -3, 1, 5)),
        Case(_sized(8, 9), draw=_unit(8), dtypes=DOUBLE),
        Case(_sized(8, 3), PLAIN, draw=Dominant(), dtypes=DOUBLE),
        Case(_sized(16), draw=Outlier(p=0.01), dtypes=DOUBLE),
        Case(_sized(16, 2, 2), PLAIN, draw=Dominant(2.5), dtypes=DOUBLE),
        Case(_sized(31, 4), draw=_unit(31)),
        Case(_sized(29, 5), PLAIN, draw=Dominant(2.5)),
        Case(_sized(48), draw=_unit(48)),
        Case(_sized(13, 6), {"pivot": True}, draw=_unit(13), layouts={"A": "transposed"}),
        Case(_sized(9, 5), PLAIN, draw=Dominant(), layouts={"A": "strided"}),
        Case(_sized(14, 7), draw=_unit(14), out=True),
        Case(_sized(6), PLAIN, draw=Dominant(), out=True),
        Case(_sized(3, 0)),
        Case(_sized(21, 3, 2), draw=_unit(21), held=True),
        Case(_sized(23, 5), PLAIN, draw=Dominant(2.5), held=True),
    ),
    varied=(
        *batches(large=(50, 64), args=lambda p: {"pivot": True}, out=True, fields=lambda n: {"draw": unit_determinant(n)}),
        *sizes(lambda p: {"*batch": p.batch(), "n": p.whole(2, 3)}, lambda p, s: {"pivot": True}, draw=LARGE),
    ),
    timed=(
        *(Case(_sized(n, b), draw=_unit(n)) for n, b in ((16, 8192), (32, 8192), (64, 1024))),
        Case(_sized(32, 8192), PLAIN, draw=Dominant(2.5)),
    ),
)  # fmt: skip
def determinant_lu(A, *, pivot=True, out=None):
    """Determinants of a batch of square matrices A (*, n, n) by LU factors: the product of U's diagonal, with its sign.

    pivot=True: rows are swapped (zeros may stand on the diagonal, too), and every swap changes the sign. pivot=False:
    A = L U without swaps; only matrices that are safe this way are used, so the value is the determinant in both modes.

    fp32 or fp64, IEEE arithmetic in that dtype (no TF32). The result has the batch's shape (*), 0-d for one matrix, and
    A's dtype. out: None (the default: a new tensor), or a contiguous tensor of the result's shape and dtype with any
    contents, which is filled and returned. Batches may be empty. Errors are compared to the typical determinant of the
    batch and to the conditioning. Results neither overflow nor vanish; n >= 1, matrices up to 64 x 64 are used. A is
    not changed and may have any strides.

    Example: determinant_lu([[4, 3], [2, 1]]) = -2
    Example: determinant_lu([[2, 1], [4, 5]], pivot=False) = 6
    """
    det = torch.linalg.det(A)
    return det if out is None else out.copy_(det)
