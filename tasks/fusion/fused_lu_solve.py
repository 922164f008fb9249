"""fusion/fused_lu_solve."""

import torch
from kbx_env.tasks._varied import LARGE, sizes

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Cost, Dominant, Literal, Orthogonal, Outlier, Paper, Scaled, Spectrum, T, task

FALLING = Spectrum(*(4 * 0.97**i for i in range(128)))
"""Condition numbers 1.6 (n = 16) to 48 (n = 128), and pivots all over the matrix."""


def _sized(n, k=(), *batch):
    return {"*batch": batch, "n": n, "*k": k}


@task(
    difficulty=5,
    takes={"A": T("*batch n n", draw=FALLING), "b": T("*batch n *k")},
    truth=Close(ulps=16, path="2 * n ** 2 / 3 + 2 * n"),
    cost=Cost(
        flops="batch * (2 * n ** 3 / 3 + 2 * n ** 2 * k)",
        least="batch * (2 * n ** 3 / 3 - n ** 2 + (2 * n ** 2 - n) * k)",
    ),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="A x = b is solved: the published reference drops the permutation and solves L U x = b. Well-conditioned "
    "systems, no exception texts; batches are allowed and timed.",
    cases=(
        Case(_sized(2), draws={"A": Literal(3, 1, 1, 2), "b": Literal(9, 8)}),
        Case(_sized(3), draws={"A": Literal(0, 2, 1, 1, 0, 3, 4, 5, 6), "b": Literal(3, 4, 6)}),
        Case(_sized(4), draws={"A": Literal(4, 1, 2, 3, 2, 4, 1, 1, 1, 3), "b": Literal(10, 11, 12, 13)}),
        Case(_sized(3), draws={"A": Literal(0, 0, 2, 4, 0, 0, 0, 5, 0), "b": Literal(1, 2, 3)}),
        Case(_sized(48)),
        Case(_sized(48), draws={"A": Orthogonal(), "b": Outlier(p=0.05)}),
        Case(_sized(33, (3,))),
        Case(_sized(40, (1,)), draws={"A": Dominant()}),
        Case(_sized(16, (), 6)),
        Case(_sized(17, (40,), 2, 2)),
        Case(_sized(24, (5,), 2)),
        Case(_sized(21, (6,), 3), layouts={"A": "transposed", "b": "transposed"}),
        Case(_sized(35), layouts={"A": "transposed", "b": "strided"}),
        Case(_sized(11, (7,), 2), draws={"A": Orthogonal()}, layouts={"A": "strided"}),
        Case(_sized(1, (), 4), draws={"A": Dominant()}),
        Case(_sized(4, (), 0)),
        Case(_sized(37), held=True),
        Case(_sized(27, (5,), 3), draws={"A": Orthogonal()}, held=True),
    ),
    varied=(
        sizes(lambda p: {"*batch": p.batch(), "n": p.whole(1, 12), "*k": p.among((), (p.whole(1, 5),), (70,))}),
        sizes(lambda p: {"*batch": (), "n": p.whole(65, 90), "*k": p.among((), (3,))}),
        *(
            sizes(lambda p: {"*batch": (), "n": p.whole(5, 9), "*k": (3,)}, draws={"A": Scaled(FALLING, factor), "b": LARGE})
            for factor in (2.0**-16, 64)
        ),
    ),
    timed=tuple(Case(_sized(n, (), b)) for n, b in ((16, 8192), (32, 8192), (64, 1024), (128, 256))),
)  # fmt: skip
def fused_lu_solve(A, b):
    """The x with A x = b for square invertible fp32 A (*, n, n), n >= 1, by way of A = P L U with row swaps.

    b is fp32: (*, n), one axis less than A: vectors; or (*, n, k). * are the same batch axes for both, any number of
    them, which may be empty. The result is a new tensor of b's shape. It solves the given system: the permutation
    belongs to it, x = U^-1 L^-1 P^T b. A zero or tiny element may stand on the diagonal.

    IEEE fp32 arithmetic (no TF32). Errors are compared to the typical element of the result and to the conditioning;
    condition numbers are below 100. Singular systems are not tested; n up to 128 is used. A and b are not changed and
    may have any strides.

    Example: fused_lu_solve([[0, 2], [4, 1]], [2, 9]) = [2, 1]
    Example: fused_lu_solve([[3, 1], [1, 2]], [[9, 4], [8, 3]]) = [[2, 1], [3, 1]]
    """
    return torch.linalg.solve(A, b)
