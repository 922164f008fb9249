"""linearalgebra/ldl_factor."""

import torch
from kbx_env.tasks._varied import batches, plain, sizes

from kbx_env.spec.criteria import Invariant
from kbx_env.spec.task import SPD, Case, Choice, Cost, Literal, Paper, Scaled, Spectrum, Symmetric, T, task

HERMITIAN = {"hermitian": True}
F64, C64 = {"A": "f64"}, {"A": "c64"}
PLAIN = {"A": Symmetric(hermitian=False)}
"""Complex symmetric, not Hermitian."""
MIXED = {"A": Spectrum(*((-1) ** i * (0.5 + 1.5 * i / 64) for i in range(64)), symmetric=True)}
"""Eigenvalues of both signs, none nearer to 0 than 0.5."""
HOLLOW = {"A": Literal(0, 1, 2, 3, 1, 0, 4, -1, 2, 4, 0, 5, 3, -1, 5, 0)}
"""Zeros on the diagonal: the first pivot must be a 2x2 block. Both parts of a complex matrix are these numbers."""
IMAGINARY = {"A": Scaled(HOLLOW["A"], 1 + 1j)}
"""The same with real parts that are zero."""


def _sized(n, *B):
    return {"*B": B, "n": n}


EQUAL_PIVOTS = Literal(
    *(0.5, 1, 0, 1, 0, 4, 0, 4, 1), *(0.25, 0, 0, 0, -0.5, 0, 0, 0, 0.5),
    *(0.25, 0.5, 0, 0.5, 1, 0.25, 0, 0.25, 0.25), *(1 / 16, 0.125, 0, 0.125, 0.25, 0.5, 0, 0.5, 1),
)  # fmt: skip
"""Matrices whose choice of a pivot depends on equal or nearly equal numbers."""


@task(
    difficulty=4,
    takes={"A": T("*B n n", draw=Symmetric())},
    truth=Invariant("ldl"),
    # One triangle is read, and one is written: what the other one holds is free. The two halves are one whole written.
    cost=Cost(flops="numel(A) * n / 3", reads={"A": "0"}, least="numel(A) * n / 3 - numel(A)"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="Judged by what the factors are for, solving; as published, pivots and even the unused triangle had to "
    "equal LAPACK's, complex ones bit for bit. A is symmetric in every case and, timed, indefinite and batched. out, "
    "published as a pair, is the tensor that receives LD.",
    cases=(
        Case(_sized(2), draws={"A": Literal(1, 2, 2, 3)}),
        Case(_sized(2), draws={"A": Literal(0, 3, 3, 0)}),
        Case(_sized(4, 2), draws=HOLLOW),
        # The second matrix is small as a whole: pivots are chosen by ratios.
        Case(_sized(3, 2), draws={"A": Literal(1e-4, 1, 0, 1, 1e-4, 2, 0, 2, 3, 2e-9, 2e-5, 0, 2e-5, 2e-9, 4e-5, 0, 4e-5, 6e-5)}),
        Case(_sized(16), {"hermitian": False}, dtypes=F64),
        Case(_sized(16), HERMITIAN, dtypes=C64),
        Case(_sized(16, 3), draws=PLAIN, dtypes=C64),
        Case(_sized(4), draws=HOLLOW, dtypes=C64),
        Case(_sized(4), draws=IMAGINARY, dtypes=C64),
        Case(_sized(33, 2)),
        Case(_sized(40), draws=MIXED, dtypes=F64),
        Case(_sized(27, 2), HERMITIAN, draws=MIXED, dtypes=C64),
        Case(_sized(19, 3), HERMITIAN, draws=MIXED),
        Case(_sized(24), draws={"A": Symmetric(1e3)}),
        Case(_sized(21, 2), draws={"A": SPD(0.5)}),
        Case(_sized(15), draws={"A": Symmetric(-0.5)}, layouts={"A": "strided"}),
        Case(_sized(13, 2), HERMITIAN, dtypes=C64, layouts={"A": "transposed"}),
        Case(_sized(18, 2), draws=MIXED, out=True),
        Case(_sized(9), HERMITIAN, dtypes=C64, out=True),
        Case(_sized(1, 3), draws={"A": Choice(-2, 0.5, 3)}),
        Case(_sized(3, 0)),
        Case(_sized(3, 4), draws={"A": EQUAL_PIVOTS}),
        Case(_sized(29, 2), held=True),
        Case(_sized(22, 3), HERMITIAN, draws=MIXED, dtypes=C64, held=True),
        Case(_sized(17, 2), draws=PLAIN, dtypes=C64, held=True),
    ),
    varied=(
        *batches("*B", large=(55, 64), out=True),
        *(
            sizes(lambda p: {"*B": (2,), "n": p.whole(3, 5)}, where=plain, draws={"A": Scaled(Symmetric(), factor)})
            for factor in (2.0**-16, 64)
        ),
    ),
    timed=tuple(Case(_sized(n, b)) for n, b in ((16, 64), (32, 64), (64, 32), (128, 16))),
)  # fmt: skip
def ldl_factor(A, hermitian=False, out=None):
    """LDL factorisation with symmetric pivoting of each matrix of a batch A (*, n, n), n >= 1: the pair (LD, pivots).

    A is fp32, fp64 or complex64, invertible, in general indefinite, and symmetric: A = A^T; with hermitian=True complex
    matrices are Hermitian instead, A = A^H (for real ones nothing changes). LD (*, n, n), of A's dtype, and pivots (*,
    n), int32, hold the factors in the compact form of LAPACK's sytrf and hetrf with UPLO = 'L', which
    torch.linalg.ldl_solve reads. k = 1, 2, .. counts rows; for each block of D:

    - pivots[k] = p > 0, p >= k: a 1x1 block. Rows and columns k and p of what was left changed places; LD[k, k] is the
      block, and LD[i, k], i > k, the multipliers: column k of L.
    - pivots[k] = pivots[k + 1] = -p < 0, p > k: a 2x2 block. Rows and columns k + 1 and p changed places; LD[k, k],
      LD[k + 1, k] and LD[k + 1, k + 1] are the block, and columns k and k + 1 below it the multipliers. k + 2 is next.

    Columns of L already finished take no part in later exchanges. What LD holds above the diagonal is free, as long as
    it is finite. Any choice of pivots passes that is as stable as needed (Bunch and Kaufman's, say). Triton has no
    complex type: torch.view_as_real gives the parts as a last axis of 2, without a copy.

    Judged by ldl_solve(LD, pivots, 1), done in fp64: A times it may differ from the identity by 16 * eps * n, times the
    largest element of A, times that of the inverse, times n. So IEEE arithmetic of A's dtype, no TF32, and pivots that
    keep the elements from growing: the diagonal may hold zeros. A is symmetric up to rounding: either triangle may be
    read, or both, and imaginary parts on a Hermitian diagonal count as zeros. out: None (the default: new tensors), or
    a contiguous tensor of A's shape and dtype with any contents, which is filled with LD and returned as the first
    result; pivots is new. Batches may be empty. A is not changed and may have any strides; n up to 128 is used.

    Example: ldl_factor([[4]]) = ([[4]], [1])
    Example: ldl_factor([[0, 2], [2, 0]]) = ([[0, 0], [2, 0]], [-2, -2])
    Example: ldl_factor([[4, 2j], [-2j, 3]], hermitian=True) = ([[4, 0], [-0.5j, 2]], [1, 2])
    """
    # On GPUs not every build of torch has the Hermitian kind.
    home = A.cpu() if hermitian and A.is_complex() else A
    packed, pivots = (x.to(A.device) for x in torch.linalg.ldl_factor(home, hermitian=hermitian))
    return packed if out is None else out.copy_(packed), pivots
