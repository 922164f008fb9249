"""linearalgebra/pseudoinverse_svd."""

import torch
from kbx_env.tasks._varied import longs, sizes

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Cost, Dominant, Literal, Paper, Scaled, Spectrum, T, task

FALLING = Spectrum(*(4 * 0.95**i for i in range(64)))
"""Every singular value within a factor of 26."""
CLIFF = Spectrum(5, 4, 3, 2.5, 2, 1.5, 1, 0.04, 0.03, 0.02, 0.015, 0.012, 0.01)
"""Seven values from 1 on, the others below 0.05; zeros from the fourteenth on."""
THIN, CUT = {"full_matrices": False}, {"rcond": 0.05}
F64 = {"A": "f64"}


def _sized(m, n, *B):
    return {"*B": B, "m": m, "n": n}


def _polished(A, u, kept):
    """The fp64 truth: T (T^T T)^-1 U^T with T = A^T U from A itself, one step of Newton's for the inverse and for U.

    V diag(1/S) U^T as LAPACK gives it is up to 142 epsilons of the typical element off on these matrices (against 40 digits), more
    than the tolerance; this was at most 31 off (docs/measurements/2026-11-22-report.md).
    """
    t = A.mT @ u
    square = (t * t).sum(-2)
    inverse = torch.where(kept, 1 / torch.where(kept, square, 1.0), 0.0)
    middle = 2 * torch.diag_embed(inverse) - inverse[..., :, None] * (t.mT @ t) * inverse[..., None, :]
    return t @ middle @ (2 * u - (u @ u.mT) @ u).mT


@task(
    difficulty=4,
    takes={"A": T("*B m n")},
    truth=Close(ulps=96),
    cost=Cost(flops="4 * numel(A) * min(m, n) + 2 * numel(A) * min(m, n)", least="2 * numel(A) * (min(m, n) - 1)"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="The cut-off lies well away from every singular value; as published, a matrix of rank 1 with rcond=1e-15 "
    "gave the inverse of rounding noise. full_matrices=True also takes matrices that are not square; out= is used.",
    cases=(
        Case(_sized(2, 2), draw=Literal(1, 2, 3, 4)),
        Case(_sized(3, 2), THIN, draw=Literal(1, 2, 3, 4, 5, 7)),
        Case(_sized(2, 2), {"rcond": 0.01}, draw=Literal(1, 2, 2, 4)),
        Case(_sized(16, 16), draw=Dominant(3)),
        Case(_sized(16, 16), draw=FALLING, dtypes=F64),
        Case(_sized(32, 16), THIN, draw=FALLING, dtypes=F64),
        Case(_sized(16, 16), THIN | CUT, draw=CLIFF, dtypes=F64),
        Case(_sized(32, 40), draw=FALLING),
        # One direction far above the others, which count.
        Case(_sized(8, 8), {"rcond": 1e-6}, draw=Spectrum(1, *(2e-5 * 0.9**i for i in range(7)))),
        Case(_sized(33, 16, 2), CUT, draw=CLIFF),
        Case(_sized(11, 24, 3), CUT, draw=CLIFF),
        Case(_sized(14, 14, 2, 2), {"rcond": 0.7}, draw=CLIFF),
        Case(_sized(21, 17), draw=FALLING, layouts={"A": "transposed"}),
        Case(_sized(7, 9, 5), THIN, draw=FALLING, layouts={"A": "strided"}),
        Case(_sized(17, 10), CUT, draw=CLIFF, out=True),
        Case(_sized(1, 6), draw=FALLING),
        Case(_sized(4, 3, 0)),
        Case(_sized(2, 2), draw=Literal(1, 2, 2, 1)),
        Case(_sized(16, 18), draw=Spectrum(*(4 * 0.75**i for i in range(16)))),
        Case(_sized(1, 1, 3), draw=FALLING),
        Case(_sized(12, 7, 20), draw=FALLING, dtypes=F64),
        Case(_sized(25, 37, 2), CUT, draw=CLIFF, held=True),
    ),
    varied=(
        sizes(lambda p: {"*B": p.batch(), "m": p.whole(2, 9), "n": p.whole(10, 14)}, draw=FALLING, out=True,
              where=lambda c: "rcond" not in c.args),
        sizes(lambda p: {"*B": p.shape(1, 2, 4), "m": p.whole(8, 14), "n": p.whole(8, 14)}, lambda p,
              s: {"rcond": p.real(0.015, 0.12)},
              where=lambda c: c.draw == CLIFF),
        sizes(longs({"m": (5, 9), "n": (5, 9)}, {"m": 52, "n": 52}, lambda p, s: {"*B": ()}, most=2000), draw=FALLING,
              where=lambda c: "rcond" not in c.args),
        *(
            sizes(lambda p: {"*B": (), "m": p.whole(5, 9), "n": p.whole(5, 9)}, draw=Scaled(FALLING, factor),
                  where=lambda c: "rcond" not in c.args)
            for factor in (2.0**-16, 2.0**6)
        ),
    ),
    timed=tuple(Case(_sized(n, n, b), draw=FALLING) for n, b in ((16, 512), (32, 256), (64, 32))),
)  # fmt: skip
def pseudoinverse_svd(A, full_matrices=True, rcond=1e-15, out=None):
    """The Moore-Penrose pseudoinverse of each matrix of a batch A (*, m, n), fp32 or fp64, through its SVD.

    With A = U diag(S) Vh the result (*, n, m), of A's dtype, is V diag(1/S_i where S_i > rcond * max(S), else 0) U^T,
    the maximum taken per matrix. out: None (the default: a new tensor), or a contiguous tensor of the result's shape
    and dtype with any contents, which is filled and returned. No singular value lies within a tenth of rcond * max(S),
    and with the default rcond all of them are larger than max(S) / 100 in fp32: the rank is never decided by rounding.
    full_matrices says which form of SVD a library would be asked for and changes nothing here. Accuracy: IEEE
    arithmetic of A's dtype (no TF32); errors are compared to the typical element of the result and to the conditioning
    of the problem. Batches may be empty. A is not changed and may have any strides; matrices up to 64 x 64 are used. No
    element is above 1e6, and the largest of each matrix is above 1e-6.

    Example: pseudoinverse_svd([[2, 0], [0, 0.5], [0, 0]]) = [[0.5, 0, 0], [0, 2, 0]]
    Example: pseudoinverse_svd([[1, 2], [2, 4]], rcond=0.01) = [[0.04, 0.08], [0.08, 0.16]]
    """
    u, s, vh = torch.linalg.svd(A, full_matrices=False)
    kept = s > rcond * s.amax(-1, keepdim=True)
    if A.dtype == torch.float64:
        pinv = _polished(A, torch.where(kept[..., None, :], u, 0.0), kept)
    else:
        pinv = (vh.mT * torch.where(kept, 1 / s, 0.0)[..., None, :]) @ u.mT
    return pinv if out is None else out.copy_(pinv)
