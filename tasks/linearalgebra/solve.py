"""linearalgebra/solve."""

import torch
from kbx_env.tasks._varied import LARGE, sizes

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Cost, Dominant, Literal, Orthogonal, Outlier, Paper, Scaled, Spectrum, T, task

FALLING = Spectrum(*(4 * 0.97**i for i in range(128)))
"""Condition numbers 1.6 (n = 16) to 48 (n = 128), and pivots all over the matrix."""
DOUBLE = {"A": "f64", "B": "f64"}


def _sized(n, k=(), *batch):
    return {"*batch": batch, "n": n, "*k": k}


@task(
    difficulty=4,
    takes={"A": T("*batch n n", draw=FALLING), "B": T("*batch n *k")},
    truth=Close(ulps=16, path="2 * n ** 2 / 3 + 2 * n"),
    cost=Cost(
        flops="batch * (2 * n ** 3 / 3 + 2 * n ** 2 * k)",
        least="batch * (2 * n ** 3 / 3 - n ** 2 + (2 * n ** 2 - n) * k)",
    ),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="The texts of torch's exceptions are not compared; systems are well-conditioned and need pivoting. "
    "Timed in batches: a single small system is all latency.",
    cases=(
        Case(_sized(2), draws={"A": Literal(3, 1, 1, 2), "B": Literal(9, 8)}),
        Case(_sized(3), draws={"A": Literal(0, 2, 1, 1, 0, 3, 4, 5, 6), "B": Literal(3, 4, 6)}),
        Case(_sized(8), draws={"A": Dominant()}, dtypes=DOUBLE),
        Case(_sized(8, (4,)), dtypes=DOUBLE),
        Case(_sized(16), draws={"A": Orthogonal()}, dtypes=DOUBLE),
        Case(_sized(16, (4,)), draws={"A": Dominant(), "B": Outlier(p=0.1)}, dtypes=DOUBLE),
        Case(_sized(33, (1,))),
        Case(_sized(48, (5,)), draws={"A": Orthogonal(), "B": Outlier(p=0.02)}),
        Case(_sized(13, (), 6)),
        Case(_sized(17, (40,), 2, 2)),
        Case(_sized(21, (3,), 2), layouts={"A": "transposed", "B": "transposed"}),
        Case(_sized(10, (6,), 3), layouts={"A": "strided", "B": "strided"}, dtypes=DOUBLE),
        Case(_sized(5, (5,), 5), draws={"A": Orthogonal()}),
        Case(_sized(1, (2,), 3), draws={"A": Dominant()}),
        Case(_sized(4, (2,), 0)),
        Case(_sized(27, (7,), 3), held=True),
        Case(_sized(19, (), 4), draws={"A": Orthogonal()}, held=True),
    ),
    varied=(
        sizes(lambda p: {"*batch": p.batch(), "n": p.whole(1, 12), "*k": p.among((), (p.whole(1, 5),), (70,))}),
        sizes(lambda p: {"*batch": (), "n": p.whole(65, 90), "*k": p.among((), (3,))}),
        *(
            sizes(lambda p: {"*batch": (), "n": p.whole(5, 9), "*k": (3,)}, draws={"A": Scaled(FALLING, factor), "B": LARGE})
            for factor in (2.0**-16, 64)
        ),
    ),
    timed=tuple(Case(_sized(n, (1,), b)) for n, b in ((16, 8192), (32, 8192), (64, 1024), (128, 256))),
)  # fmt: skip
def solve(A, B):
    """The X with A X = B, for a batch of square invertible matrices A (*, n, n), n >= 1.

    B is (*, n, k), as many axes as A, or (*, n), one axis less: vectors. * are the same batch axes for both (no
    broadcasting), any number of them, which may be empty. The result is a new tensor of B's shape. All of A counts, and
    a zero or tiny element may stand on the diagonal: pivot.

    fp32, or both tensors fp64; IEEE arithmetic in that dtype (no TF32). Errors are compared to the typical element of
    the result and to the conditioning; condition numbers are below 100. Singular systems are not tested; n up to 128 is
    used. A and B are not changed and may have any strides.

    Example: solve([[3, 1], [1, 2]], [9, 8]) = [2, 3]
    Example: solve([[0, 2], [4, 0]], [[2, 6], [4, 8]]) = [[1, 2], [1, 3]]
    """
    return torch.linalg.solve(A, B)
