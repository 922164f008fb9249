"""matrixmultiply/matrix_vector_dot."""

import torch
from kbx_env.tasks._varied import LARGE, SHARE, sizes

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Cost, Normal, Outlier, Paper, T, task


def _case(n, alpha, beta, **more):
    return Case({"N": n}, {"alpha": alpha, "beta": beta}, **({"draws": {"A": Normal(scale=n**-0.5)}} | more))


@task(
    difficulty=2,
    takes={"A": T("N N"), "x": T("N"), "y": T("N")},
    truth=Close(ulps=16),
    cost=Cost(flops="2 * N * N"),
    writes={"y": "always"},
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="The in-place update of y is judged; the tolerance follows from the conditioning, since the dot product may cancel. "
    "fp32 is timed: repeated in fp16 y overflows. A 0-d tensor is returned, not a Python float.",
    cases=(
        _case(2, 1.0, 0.0),
        _case(3, 1.0, 1.0),
        _case(70, 0.5, -1.2),
        _case(129, 1.5, 2, draws={}, draw=Outlier(scale=3)),
        _case(300, -0.3, 1),
        _case(48, 1.0, 0.3, layouts={"A": "transposed", "x": "strided", "y": "strided"}),
        _case(31, 2.0, 0.5, layouts={"A": "strided"}),
        _case(1, 1.0, 1.0),
        _case(211, 0.9, 0.4, held=True),
    ),
    varied=(
        sizes(
            lambda p: {"N": p.whole(300, 400)}, lambda p, s: {"alpha": p.real(-2, 2), "beta": p.real(-2, 2)},
            # Declared vectors are of order one.
            draw=lambda p, s: Normal(scale=p.among(1e-2, 1e-3, 1e-4)),
        ),
        *(
            sizes(lambda p: {"N": p.whole(5, 9)}, lambda p, s: {"alpha": p.real(0.5, 2), "beta": p.real(0.5, 2)}, draws=draws)
            for draws in ({"A": LARGE, "x": SHARE}, {"A": SHARE, "x": LARGE})
        ),
    ),
    timed=tuple(_case(n, 1.0, 0.5) for n in (4096, 8192, 16384)),
)
def matrix_vector_dot(A, x, y, alpha, beta):
    """y becomes alpha * A @ x + beta * y, in place; the dot product of the new y and x is returned, as a 0-d fp32 tensor.

    Example: matrix_vector_dot([[1, 2], [0, 1]], [1, 3], [10, 20], 1.0, 0.5) = 51.0

    A (N, N), x (N,) and y (N,) are fp32 and may have any strides; alpha and beta are numbers. A and x are not changed.
    Sums in fp32.
    """
    y.copy_(alpha * (A @ x) + beta * y)
    return torch.dot(y, x)
