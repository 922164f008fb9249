"""normalization/symmetric_matrix_vector_norm."""

import torch
from kbx_env.tasks._varied import LARGE, TINY, sizes

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import (
    Case,
    Constant,
    Cost,
    Eye,
    Literal,
    Normal,
    Outlier,
    Paper,
    Scaled,
    Spectrum,
    Symmetric,
    T,
    Uniform,
    task,
)
from kbx_env.spec.varied import layout


def _case(n, alpha, beta, p=None, **more):
    return Case({"N": n}, {"alpha": alpha, "beta": beta} | ({} if p is None else {"p": p}), **more)


@task(
    difficulty=2,
    takes={"A": T("N N", draw=Symmetric()), "x": T("N", draw=Normal())},
    truth=Close(ulps=16),
    # One triangle tells the matrix.
    cost=Cost(flops="2 * N * N", reads={"A": "N * (N + 1) / 2"}),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="Published text, published code and reference disagree on the term with beta; here, as in the reference, "
    "it repeats the product. p other than 1 and 2 is exercised.",
    cases=(
        _case(2, 1.0, 1.0, draws={"A": Literal(2, 1, 1, 3), "x": Literal(1, -0.5)}),
        _case(2, 2.0, 0.5, draws={"A": Literal(2, 1, 1, 2), "x": Literal(1, 1)}),
        _case(3, 1.5, 0.5, 1.0),
        _case(1, -2.0, 0.25, 3.0),
        _case(128, 1.0, 0.5, 2.0),
        _case(128, 1.0, 1.0, 1.0, draws={"x": Outlier()}),
        _case(300, -0.7, 0.5),
        _case(257, 1.25, -0.5, float("inf")),
        _case(200, 0.8, -3.0, 3.0, draws={"x": Uniform(0, 2)}),
        _case(130, 3.0, 0.0, 0.5),
        _case(65, 1.1, 2.0, 4.0, draws={"A": Eye(), "x": Outlier()}),
        _case(90, 1.0, 0.3, layouts={"A": "transposed", "x": "strided"}),
        _case(77, 2.5, -0.1, 1.5, layouts={"A": "strided"}),
        # A long vector. All elements of the matrix are one, so that it takes no memory.
        _case(2100, 1.25, -0.5, float("inf"), layouts={"A": layout((0, 1), (0, 0))}, draws={"A": Constant(0.75)}),
        _case(173, -1.5, 0.75, 1.0, held=True),
        _case(211, 0.35, 1.5, 2.5, draws={"x": Outlier()}, held=True),
    ),
    varied=(
        sizes(
            lambda p: {"N": p.whole(300, 400)},
            lambda p, s: {
                "alpha": p.real(-2, 2),
                "beta": p.real(-3, 2),
                "p": p.among(float("inf"), p.real(0.5, 5), p.real(0.5, 5), p.real(0.5, 5)),
            },
        ),
        # Elements below 0.0001.
        sizes(lambda p: {"N": p.whole(6, 9)}, lambda p, s: {"alpha": p.real(0.5, 2), "beta": p.real(-0.5, 2), "p": p.real(0.5, 5)},
              draws={"A": Spectrum(9e-5, 8e-5, -7e-5, 6e-5, -5e-5, symmetric=True), "x": LARGE}),
        sizes(lambda p: {"N": p.whole(6, 9)}, lambda p, s: {"alpha": p.real(0.5, 2), "beta": p.real(-0.5, 2), "p": p.real(0.5, 5)},
              draws={"A": Scaled(Symmetric(), 64), "x": TINY}),
    ),
    timed=tuple(_case(n, 1.0, 1.0, 2.0) for n in (6144, 11264, 16384)),
)
def symmetric_matrix_vector_norm(A, x, alpha, beta, p=2.0):
    """Norm of a scaled matrix-vector product: with y = alpha * (A @ x), the result is ||y + beta * y||_p.

    Example: symmetric_matrix_vector_norm([[2, 1], [1, 3]], [1, -0.5], 2.0, 0.5) = 4.74342

    A is an fp32 matrix (N, N), exactly symmetric (either triangle may be used), x an fp32 vector (N), N >= 1; alpha,
    beta and p are floats. The term with beta repeats the product y, it is not beta * x. ||v||_p = (sum |v|^p)^(1 / p)
    for p > 0; p = inf is the largest |v|. Products and sums in IEEE fp32 (no TF32); no overflow is tested. The result
    is a new 0-d fp32 tensor. A and x may have any strides and are not changed.
    """
    y = alpha * torch.mv(A, x)
    return torch.linalg.vector_norm(y + beta * y, p)
