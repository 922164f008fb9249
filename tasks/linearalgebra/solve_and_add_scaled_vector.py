"""linearalgebra/solve_and_add_scaled_vector."""

import torch
from kbx_env.tasks._varied import LARGE, sizes

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Cost, Dominant, Literal, Outlier, Paper, Scaled, T, Triangular, task

DOUBLE = {"A": "f64", "b": "f64", "y": "f64"}
TOY = {"A": Literal(2, 1, 0, 3), "b": Literal(5, 6, 7, 8), "y": Literal(1, 2)}
WILD = {"b": Outlier(p=0.05), "y": Outlier(p=0.05)}


def _sized(n, k, columns=1):
    return {"n": n, "k": k, "c": columns}


def _many_right_hand_sides(p):
    return {"n": p.whole(5, 6), "k": (1 << 17) + p.whole(1, 90), "c": 1}


@task(
    difficulty=1,
    takes={"A": T("n n", draw=Triangular()), "b": T("n k"), "y": T("n c")},
    truth=Close(ulps=16),
    cost=Cost(flops="n ** 2 * k + 2 * n * k", reads={"A": "n * (n + 1) / 2", "y": "numel(y) * nonzero(alpha)"}),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="What lies below the diagonal of A may be anything; alpha also 0 and negative. Timed with many right-hand "
    "sides and well-conditioned triangles: as published the results overflow and a single column is all latency.",
    cases=(
        Case(_sized(2, 2), {"alpha": 0.5}, draws=TOY),
        Case(_sized(8, 4), {"alpha": 0.1}, dtypes=DOUBLE),
        Case(_sized(16, 4), {"alpha": 0.1}, dtypes=DOUBLE, draws=WILD),
        Case(_sized(16, 4, 4), {"alpha": -1.7}, dtypes=DOUBLE),
        Case(_sized(8, 3), {"alpha": 0.1}, draws=WILD),
        Case(_sized(33, 1), {"alpha": 1.0}),
        Case(_sized(48, 100), {"alpha": 2.5}),
        Case(_sized(47, 33, 33), {"alpha": 0.3}),
        Case(_sized(21, 257), {"alpha": -0.75}, draws={"A": Dominant()}),
        Case(_sized(64, 40), {"alpha": 0.7}, dtypes=DOUBLE),
        Case(_sized(40, 19, 19), {"alpha": 1.5}, layouts={"A": "transposed", "b": "transposed", "y": "transposed"}),
        Case(_sized(18, 50), {"alpha": 1.5}, layouts={"A": "strided", "b": "strided", "y": "strided"}),
        Case(_sized(14, 20), {"alpha": 0.0}, draws={"A": Dominant()}),
        Case(_sized(1, 7), {"alpha": 3.0}),
        Case(_sized(5, 0), {"alpha": 3.0}),
        Case(_sized(37, 70), {"alpha": 1.25}, held=True),
        Case(_sized(29, 11, 11), {"alpha": -2.0}, held=True),
    ),
    varied=(
        sizes(lambda p: {"n": p.whole(65, 90), "k": p.among(1, 5), "c": 1}, lambda p, s: {"alpha": p.real(-3, 3)}),
        sizes(lambda p: {"n": p.whole(2, 9), "k": p.whole(530, 600), "c": 1}, lambda p, s: {"alpha": p.real(-3, 3)}),
        # Right-hand sides of 2^19 numbers and more: kernels take other blocks there.
        sizes(_many_right_hand_sides, lambda p, s: {"alpha": p.real(-3, 3)}),
        sizes(lambda p: {"n": p.whole(5, 9), "k": p.whole(3, 9), "c": 1}, lambda p, s: {"alpha": p.real(1, 3)},
              draws={"A": Scaled(Triangular(), 64), "b": LARGE, "y": LARGE}),
    ),
    timed=tuple(Case(_sized(n, k), {"alpha": 1.0}) for n, k in ((32, 1 << 17), (64, 1 << 17), (128, 1 << 16))),
)  # fmt: skip
def solve_and_add_scaled_vector(A, b, y, alpha):
    """x + alpha * y with x the solution of the upper triangular system A x = b.

    A (n, n), n >= 1; b (n, k), where k may be 0; y (n, 1), added to every column, or (n, k); alpha a float of any sign,
    or 0. The result is a new tensor (n, k). Only the upper triangle of A is read; whatever finite numbers lie below
    its diagonal count as zeros. Its diagonal has no zeros, and the system is well-conditioned.

    fp32, or all three tensors fp64; IEEE arithmetic in that dtype (no TF32; in fp64 alpha is not rounded to fp32).
    Errors are compared to the typical element of the result and to the conditioning. n up to 128 is used. Inputs are
    not changed and may have any strides.

    Example: solve_and_add_scaled_vector([[2, 1], [0, 4]], [[5], [4]], [[1], [2]], 0.5) = [[2.5], [2]]
    """
    return torch.linalg.solve_triangular(A, b, upper=True) + alpha * y
