"""linearalgebra/cholesky_solve."""

import torch
from kbx_env.tasks._varied import LARGE, batches, sizes

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Cost, Dominant, Literal, Outlier, Paper, Scaled, T, Triangular, task

UPPER = {"upper": True}
HIGH = {"L": Triangular(upper=True)}
DOUBLE = {"B": "f64", "L": "f64"}


def _sized(n, k, *batch):
    return {"*batch": batch, "n": n, "k": k}


@task(
    difficulty=4,
    takes={"B": T("*batch n k"), "L": T("*batch n n", draw=Triangular(upper=False))},
    truth=Close(ulps=16),
    cost=Cost(
        flops="batch * 2 * n ** 2 * k",
        reads={"L": "batch * n * (n + 1) / 2"},
        least="batch * (2 * n ** 2 - n) * k",
    ),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="The unused triangle may hold numbers; out= is exercised; factors are well-conditioned (as published, the "
    "timed results overflow) and come in batches when timed.",
    cases=(
        Case(_sized(2, 1), draws={"B": Literal(1, 2), "L": Literal(2, 0, 1, 3)}),
        Case(_sized(2, 1), UPPER, draws={"B": Literal(1, 2), "L": Literal(2, 1, 0, 3)}),
        Case(_sized(2, 1, 2), draws={"B": Literal(1, 2, 3, 4), "L": Literal(2, 0, 1, 3, 1, 0, 2, 4)}),
        Case(_sized(16, 8, 1), {"upper": False}, dtypes=DOUBLE),
        Case(_sized(16, 8, 1), UPPER, draws=HIGH, dtypes=DOUBLE),
        Case(_sized(8, 4, 4), dtypes=DOUBLE, layouts={"L": "transposed"}),
        Case(_sized(48, 3), UPPER, draws=HIGH | {"B": Outlier(p=0.05)}, dtypes=DOUBLE),
        Case(_sized(47, 10)),
        Case(_sized(33, 40, 2), UPPER, draws=HIGH),
        Case(_sized(19, 5, 3), draws={"L": Dominant()}),
        Case(_sized(20, 5, 3), UPPER, draws={"L": Dominant()}),
        Case(_sized(29, 7, 2), layouts={"B": "transposed", "L": "strided"}),
        Case(_sized(31, 6, 2), UPPER, draws=HIGH, layouts={"L": "transposed", "B": "strided"}),
        Case(_sized(13, 9, 2, 2), out=True),
        Case(_sized(1, 3, 4)),
        # Many small matrices: kernels take another path.
        Case(_sized(3, 2, 64)),
        Case(_sized(4, 2, 0)),
        Case(_sized(27, 11, 3), held=True),
        Case(_sized(23, 2), UPPER, draws=HIGH, held=True),
    ),
    varied=(
        *batches(more={"k": (66, 80)}, large=(65, 80), out=True),
        *sizes(lambda p: {"*batch": (), "n": p.whole(5, 9), "k": p.whole(2, 5)}, lambda p, s: {"upper": False},
               draws={"B": LARGE, "L": Scaled(Triangular(upper=False), 64)}),
    ),
    timed=tuple(Case(_sized(n, k, b)) for n, k, b in ((16, 8, 16384), (32, 8, 8192), (64, 16, 2048), (128, 32, 512))),
)  # fmt: skip
def cholesky_solve(B, L, upper=False, out=None):
    """The X with A X = B, given the Cholesky factor L of each matrix A: two triangular solves.

    B (*, n, k) and L (*, n, n) have the same batch axes *, any number of them, which may be empty. upper=False: L is
    lower triangular and A = L L^T. upper=True: L is upper triangular and A = L^T L. Only that triangle is read: the
    other may hold any finite numbers, which count as zeros. The diagonal is positive.

    fp32, or both tensors fp64; IEEE arithmetic in that dtype (no TF32). The result has the shape (*, n, k). out: None
    (the default: a new tensor), or a contiguous tensor of the result's shape and dtype with any contents, which is
    filled and returned. Errors are compared to the typical element of the result and to the conditioning; the systems
    are well-conditioned. n up to 128 is used. B and L are not changed and may have any strides.

    Example: cholesky_solve([[4], [10]], [[2, 0], [1, 3]]) = [[0.555556], [0.888889]]
    Example: cholesky_solve([[4], [8]], [[1, 0], [0, 2]], upper=True) = [[4], [2]]
    """
    x = torch.cholesky_solve(B, L, upper)
    return x if out is None else out.copy_(x)
