"""linearalgebra/invert_matrix_lu."""

import torch
from kbx_env.tasks._seams import refined
from kbx_env.tasks._varied import batches, sizes

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Cost, Dominant, Literal, Orthogonal, Paper, Scaled, Spectrum, T, task

FALLING = Spectrum(*(4 * 0.97**i for i in range(128)))
"""Condition numbers 1.6 (n = 16) to 48 (n = 128), and pivots all over the matrix."""
PLAIN = {"pivot": False}
DOUBLE = {"A": "f64"}


def _sized(n, *batch):
    return {"*batch": batch, "n": n}


@task(
    difficulty=3,
    takes={"A": T("*batch n n", draw=FALLING)},
    truth=Close(ulps=16, path="2 * n ** 2 / 3 + 2 * n"),
    cost=Cost(flops="batch * 2 * n ** 3", least="batch * (2 * n ** 3 - 2 * n ** 2)"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="The true inverse is asked for: the published reference permutes by P instead of its transpose, which is "
    "wrong for cycles of three rows. out= and batches are exercised; timed in batches.",
    cases=(
        Case(_sized(2), draws={"A": Literal(4, 3, 6, 3)}),
        Case(_sized(2), PLAIN, draws={"A": Literal(4, 3, 6, 3)}),
        Case(_sized(3), draws={"A": Literal(0, 0, 2, 4, 0, 0, 0, 5, 0)}),
        Case(_sized(3, 2), PLAIN, draws={"A": Literal(4, 1, 0, -1, 5, 2, 1, 3, 7)}),
        Case(_sized(8), dtypes=DOUBLE),
        Case(_sized(8, 3), PLAIN, draws={"A": Dominant()}, dtypes=DOUBLE),
        Case(_sized(16, 2, 2), draws={"A": Orthogonal()}, dtypes=DOUBLE),
        Case(_sized(16), PLAIN, draws={"A": Dominant(2.5)}, dtypes=DOUBLE),
        Case(_sized(33, 2, 1)),
        Case(_sized(48), {"pivot": True}),
        Case(_sized(40), PLAIN, draws={"A": Dominant(2.5)}),
        Case(_sized(21, 3), layouts={"A": "transposed"}),
        Case(_sized(12, 4), PLAIN, draws={"A": Dominant()}, layouts={"A": "strided"}),
        Case(_sized(17, 3), out=True),
        Case(_sized(9), PLAIN, draws={"A": Dominant()}, out=True),
        Case(_sized(1, 4), draws={"A": Dominant()}),
        Case(_sized(3, 0)),
        Case(_sized(27, 3), held=True),
        Case(_sized(19, 2, 2), PLAIN, draws={"A": Dominant(2.5)}, held=True),
    ),
    varied=(
        *batches(out=True),
        *sizes(lambda p: {"*batch": (2,), "n": p.whole(5, 9)}, lambda p, s: {"pivot": True}, draws={"A": Scaled(FALLING, 64)}),
    ),
    timed=tuple(Case(_sized(n, b)) for n, b in ((16, 8192), (32, 8192), (64, 1024), (128, 256))),
)  # fmt: skip
def invert_matrix_lu(A, *, pivot=True, out=None):
    """Inverses of a batch of square matrices A (*, n, n), n >= 1, by LU factors: A = P L U, inverse U^-1 L^-1 P^T.

    pivot=True: rows are swapped as needed (zeros may stand on the diagonal); the columns of the inverse come back into
    order, so that the true inverse results for any permutation. pivot=False: P is the identity; only matrices that are
    safe without row swaps are used, so the value is the true inverse in both modes.

    fp32 or fp64, IEEE arithmetic in that dtype (no TF32). The result has the shape (*, n, n). out: None (the default: a
    new tensor), or a contiguous tensor of the result's shape and dtype with any contents, which is filled and returned.
    Batches may be empty. Errors are compared to the typical element of the result and to the conditioning; condition
    numbers are below 100. Singular matrices are not tested, matrices up to 128 x 128 are used. A is not changed and may
    have any strides.

    Example: invert_matrix_lu([[4, 3], [6, 3]]) = [[-0.5, 0.5], [1, -0.666667]]
    Example: invert_matrix_lu([[2, 0], [1, 4]], pivot=False) = [[0.5, 0], [-0.125, 0.25]]
    """
    inverse = refined(torch.linalg.inv(A), A)
    return inverse if out is None else out.copy_(inverse)
