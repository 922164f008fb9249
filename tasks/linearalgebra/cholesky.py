"""linearalgebra/cholesky."""

import torch
from kbx_env.tasks._varied import batches, plain, sizes

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import SPD, Case, Cost, Eye, Literal, Normal, Paper, Scaled, Spectrum, T, task

UPPER = {"upper": True}
F64, C64, C128 = ({"A": kind} for kind in ("f64", "c64", "c128"))
STEEP = Spectrum(*(10 * 0.9**i for i in range(40)), symmetric=True)
"""Positive definite; condition numbers 8 (n = 21) to 61 (n = 40)."""


def _sized(n, *B):
    return {"*B": B, "n": n}


@task(
    difficulty=4,
    takes={"A": T("*B n n", draw=SPD(0.5))},
    truth=Close(ulps=32),
    cost=Cost(flops="numel(A) * n / 3", reads={"A": "numel(A) / 2"}),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="Complex factors have a real tolerance; as published they were compared bit for bit. No exception is "
    "raised or tested for matrices that are not Hermitian. out= and fp32 are exercised. Timed on batches of "
    "well-conditioned matrices: a single small one is all latency.",
    cases=(
        Case(_sized(2), draws={"A": Literal(4, 2, 2, 3)}),
        Case(_sized(3), UPPER, draws={"A": Literal(4, 2, -2, 2, 10, 2, -2, 2, 6)}),
        Case(_sized(2), draws={"A": SPD(1)}, dtypes=F64),
        Case(_sized(2), UPPER, draws={"A": SPD(1)}, dtypes=C128),
        Case(_sized(16), dtypes=F64),
        Case(_sized(16), UPPER, dtypes=F64),
        Case(_sized(16, 2), draws={"A": SPD(0.1)}, dtypes=C64),
        Case(_sized(16), UPPER, draws={"A": SPD(0.1)}, dtypes=C64),
        Case(_sized(33, 2)),
        Case(_sized(40), UPPER, draws={"A": STEEP}, dtypes=F64),
        Case(_sized(37), {"upper": False}, draws={"A": SPD(1e4)}),
        Case(_sized(13, 3, 2), UPPER, draws={"A": SPD(0.02)}),
        Case(_sized(21, 2), draws={"A": STEEP}, dtypes=C128),
        Case(_sized(10, 2), draws={"A": Eye()}),
        Case(_sized(19, 2), layouts={"A": "transposed"}),
        Case(_sized(11, 3), UPPER, dtypes=C64, layouts={"A": "strided"}),
        Case(_sized(17, 2), dtypes=C64, layouts={"A": "transposed"}),
        Case(_sized(9, 2), UPPER, out=True),
        Case(_sized(14), dtypes=C64, out=True),
        Case(_sized(1, 3)),
        Case(_sized(4, 0)),
        Case(_sized(27, 2), UPPER, dtypes=C64, held=True),
        Case(_sized(29, 3), held=True),
    ),
    varied=(
        *batches("*B", large=(65, 80), out=True, fields=lambda n: {"draws": {"A": SPD(0.5)}}),
        *(
            sizes(lambda p: {"*B": (2,), "n": p.whole(5, 9)}, where=plain, draw=Normal(), draws={"A": Scaled(SPD(0.5), factor)})
            for factor in (2.0**-16, 64)
        ),
    ),
    timed=tuple(Case(_sized(n, b)) for n, b in ((16, 8192), (32, 2048), (64, 512), (128, 128))),
)  # fmt: skip
def cholesky(A, upper=False, out=None):
    """The Cholesky factor of each Hermitian positive definite matrix of a batch A (*, n, n), n >= 1.

    upper=False gives the lower triangular L with A = L L^H, upper=True the upper triangular U = L^H with A = U^H U; ^H
    is the conjugate transpose, for real matrices the transpose. The diagonal is real and positive (the imaginary parts of
    a complex factor are zero there, up to rounding), which makes the factor unique; the other triangle holds zeros.

    A is fp32, fp64, complex64 or complex128; the result has A's shape and dtype. out: None (the default: a new tensor),
    or a contiguous tensor of the result's shape and dtype with any contents, which is filled and returned. Triton has
    no complex type: torch.view_as_real gives the parts as a last axis of 2, without a copy. A is Hermitian up to
    rounding (either triangle may be read, or both; imaginary parts on its diagonal count as zeros); others are not
    tested, nor is anything raised for them.

    Accuracy: IEEE arithmetic of A's dtype, no TF32; errors (of real and imaginary parts alike) are compared to the
    typical element of the result and to the conditioning. Batches may be empty. A is not changed and may have any
    strides; n up to 128 is used.

    Example: cholesky([[4, 2], [2, 5]]) = [[2, 0], [1, 2]]
    Example: cholesky([[4, 2], [2, 5]], upper=True) = [[2, 1], [0, 2]]
    Example: cholesky([[4, 2j], [-2j, 2]]) = [[2, 0], [-1j, 1]]
    """
    return torch.linalg.cholesky(A, upper=upper, out=out)
