"""linearalgebra/svd."""

import torch
from kbx_env.tasks._varied import LARGE, TINY, longs, plain, sizes

from kbx_env.spec.criteria import Invariant
from kbx_env.spec.task import Case, Constant, Cost, Eye, Literal, Normal, Outlier, Paper, T, task

FULL, THIN = {"full_matrices": True}, {"full_matrices": False}
TALL = {"*": (), "m": 64, "n": 32}


@task(
    difficulty=4,
    takes={"A": T("* m n")},
    truth=Invariant("svd"),
    cost=Cost(flops="4 * numel(A) * min(m, n)", least="4 * numel(A) * min(m, n) / 3"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="Judged by what an SVD promises; as published, the signs of the vectors, the basis of a degenerate "
    "identity and 32 arbitrary null-space columns had to equal the vendor library's.",
    cases=(
        Case({"*": (), "m": 2, "n": 2}, FULL, draw=Literal(3, 1, 1, 3)),
        Case({"*": (), "m": 3, "n": 2}, THIN, draw=Literal(1, 2, 3, 4, 5, 6)),
        Case({"*": (), "m": 2, "n": 3}, FULL, draw=Literal(1, 2, 3, 4, 5, 6)),
        Case({"*": (), "m": 3, "n": 3}, THIN, draw=Eye()),
        # A line and a column beside which the squares of the other elements overflow, if they give the scale.
        Case({"*": (), "m": 4, "n": 4}, draw=Literal(*[1e-25] * 5, 3, 1, 2, 1e-25, 1, 4, 1, 1e-25, 2, 1, 5)),
        Case({"*": (), "m": 4, "n": 3}, FULL, draw=Constant(0)),
        # The basis is completed by the first two unit vectors: the others lie in the range.
        Case({"*": (), "m": 5, "n": 3}, FULL, draw=Literal(0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 2, 0, 0, 0, 1)),
        Case(TALL, FULL),
        Case(TALL, THIN, draw=Outlier()),
        Case({"*": (4,), "m": 24, "n": 16}, THIN),
        Case({"*": (), "m": 16, "n": 29}, FULL),
        Case({"*": (2,), "m": 9, "n": 21}, THIN, draw=Normal(scale=1e-3)),
        Case({"*": (), "m": 12, "n": 7}, draw=Literal(1, 2, 2, 4), layouts={"A": "transposed"}),
        Case({"*": (2, 2), "m": 13, "n": 13}, draw=Normal(scale=1e4)),
        Case({"*": (), "m": 1, "n": 5}, THIN),
        Case({"*": (500,), "m": 2, "n": 2}, FULL),
        Case({"*": (0,), "m": 3, "n": 2}, THIN),
        Case({"*": (), "m": 2, "n": 2}, FULL, draw=Literal(-1, 0, 0, 0)),
        Case({"*": (3,), "m": 27, "n": 11}, FULL, held=True),
    ),
    varied=(
        sizes(
            lambda p: {"*": p.batch(), "m": p.whole(1, 9), "n": p.whole(1, 9)},
            lambda p, s: {"full_matrices": p.chance()},
        ),
        sizes(
            longs({"m": (2, 6), "n": (2, 6)}, {"m": 75, "n": 75}, lambda p, s: {"*": ()}, most=2000),
            lambda p, s: {"full_matrices": False},
        ),
        *(
            sizes(
                lambda p: {"*": (2,), "m": p.whole(3, 5), "n": p.whole(3, 5)}, lambda p, s: {"full_matrices": False},
                where=plain, draws={"A": draw},
            )
            for draw in (TINY, LARGE)
        ),
    ),
    timed=tuple(Case({"*": (), "m": n, "n": n}) for n in (16, 32, 64)),
)
def svd(A, full_matrices=True):
    """Singular value decomposition of fp32 matrices: A = U diag(S) Vh, for every matrix of a batch (*, m, n).

    Example: svd([[3, 0], [0, 2]]) = ([[1, 0], [0, 1]], [3, 2], [[1, 0], [0, 1]])

    Returns the tuple (U, S, Vh), k = min(m, n): S (*, k) descending and not negative; U (*, m, m) and Vh (*, n, n) if
    full_matrices, else U (*, m, k) and Vh (*, k, n). U has orthonormal columns and Vh orthonormal rows, also where
    singular values are zero or equal; the extra vectors of full_matrices complete the basis. Signs, and the choice of
    basis where it is not unique, are free. Tolerance: 16 * eps * max(m, n), relative to the largest singular value:
    IEEE fp32 throughout, no TF32. A is not changed and may have any strides; batches may be empty. No element is above
    1e6, and the largest of each matrix is above 1e-6, or all are zero.
    """
    return tuple(torch.linalg.svd(A, full_matrices=full_matrices))
