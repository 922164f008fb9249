"""matrixmultiply/matrix_multiply_and_row_dot."""

import torch
from kbx_env.tasks._varied import LARGE, TINY, longs, sizes

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Cost, Normal, Outlier, Paper, T, task


def _case(n, m, p, alpha, beta, **more):
    return Case({"N": n, "M": m, "P": p}, {"alpha": alpha, "beta": beta}, **more)


def _eager(A, B, alpha, beta, C):
    product = torch.addmm(C, A, B, beta=beta, alpha=alpha)
    return torch.dot(product[0], product[1])


@task(
    difficulty=2,
    eager=_eager,
    takes={"A": T("N M"), "B": T("M P"), "C": T("N P")},
    truth=Close(ulps=16),
    cost=Cost(flops="4 * M * P", reads={"A": "2 * M", "C": "2 * P * nonzero(beta)"}),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="Bytes and operations are those of the two rows that matter; the tolerance follows from the conditioning, since the "
    "dot product may cancel. fp32 is timed: in fp16 the result overflows. A 0-d tensor is returned, not a Python float.",
    cases=(
        _case(2, 2, 2, 1.0, 0.0),
        _case(2, 3, 4, 0.5, 0.5),
        _case(64, 50, 70, 1.0, 1.0),
        _case(33, 300, 257, 0.3, -1.2, draw=Outlier()),
        _case(5, 1000, 31, 1.5, 2, draw=Normal(mean=0.5)),
        _case(40, 31, 1025, -1, 0.5),
        _case(16, 64, 48, 1.0, 1.0, layouts={"A": "transposed", "B": "transposed", "C": "transposed"}),
        _case(9, 30, 20, 1.0, 0.3, layouts={"A": "strided", "B": "strided", "C": "strided"}),
        _case(7, 1, 1, 2.0, 1.0),
        _case(21, 130, 83, 0.9, 0.4, held=True),
    ),
    varied=(
        sizes(
            longs({"N": (2, 9), "M": (2, 40), "P": (2, 40)}, {"N": 140, "M": 700, "P": 1100}, most=5_000_000),
            lambda p, s: {"alpha": p.real(-2, 2), "beta": p.real(-2, 2)},
        ),
        # All numbers below 0.0001, and nearly all above 16: C is about as large as the products.
        *(
            sizes(
                lambda p: {"N": p.whole(2, 4), "M": p.whole(5, 9), "P": p.whole(20, 40)},
                lambda p, s: {"alpha": p.real(0.5, 2), "beta": p.real(0.5, 2)},
                draws={"A": factor, "B": factor, "C": Normal(scale=factor.scale**2)},
            )
            for factor in (TINY, LARGE)
        ),
    ),
    timed=tuple(_case(n, n, n, 1.0, 1.0) for n in (2048, 4096, 8192)),
)
def matrix_multiply_and_row_dot(A, B, alpha, beta, C):
    """The dot product of the first two rows of alpha * A @ B + beta * C, as a 0-d fp32 tensor.

    Example: matrix_multiply_and_row_dot([[1, 2], [0, 1]], [[1, 0], [1, 1]], 1.0, 0.5, [[0, 2], [4, 0]]) = 12.0

    A (N, M), B (M, P), C (N, P), N at least 2; alpha and beta are numbers. Only two rows of the product matter and
    nothing else need be computed. Products and sums in IEEE fp32: TF32 is too coarse and fails. A new tensor is returned;
    inputs may have any strides and are not changed.
    """
    rows = alpha * (A[:2] @ B) + beta * C[:2]
    return (rows[0] * rows[1]).sum()
