"""linearalgebra/solve_symmetric_ldl."""

import torch
from kbx_env.tasks._varied import LARGE, TINY, plain, sizes

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import SPD, Case, Cost, Literal, Outlier, Paper, Scaled, Spectrum, Symmetric, T, task

HERMITIAN = {"hermitian": True}
MIXED = Spectrum(*((-1) ** i * (0.5 + 1.5 * i / 128) for i in range(128)), symmetric=True)
"""Eigenvalues of both signs, none nearer to 0 than 0.5."""
HOLLOW = {"A": Literal(0, 1, 2, 3, 1, 0, 4, -1, 2, 4, 0, 5, 3, -1, 5, 0)}
"""Zeros on the diagonal: the first pivot must be a 2x2 block. Both parts of a complex matrix are these numbers."""
IMAGINARY = {"A": Scaled(HOLLOW["A"], 1 + 1j)}
"""The same with real parts that are zero."""
NEARLY_TRIDIAGONAL = {"A": Literal(2, 1, 1e-3, -1e-3, 1, -2, 1, 1e-3, 1e-3, 1, 2, 1, -1e-3, 1e-3, 1, -2)}
"""Columns that are nearly a multiple of a unit vector: a reflection of the wrong sign cancels."""
PLAIN = {"A": Symmetric(hermitian=False)}
"""Complex symmetric, not Hermitian."""
BOTH, REAL_B = {"A": "c64", "b": "c64"}, {"A": "c64"}


def _sized(n, k=(), *batch):
    return {"*batch": batch, "n": n, "*k": k}


def _by_ldl(A, b, hermitian=False, out=None):
    """LAPACK's solution by the factorisation that the contract names. Its pivots let elements grow more than those of LU do."""
    vectors = b.dim() < A.dim()
    b = b.to(A.dtype).unsqueeze(-1) if vectors else b.to(A.dtype)
    x = torch.linalg.ldl_solve(*torch.linalg.ldl_factor(A, hermitian=hermitian), b, hermitian=hermitian)
    return x.squeeze(-1) if vectors else x


@task(
    difficulty=4,
    takes={"A": T("*batch n n", draw=MIXED), "b": T("*batch n *k")},
    truth=Close(ulps=16, path="n ** 2 / 3 + 2 * n", rival=_by_ldl),
    cost=Cost(
        flops="batch * (n ** 3 / 3 + 2 * n ** 2 * k)",
        reads={"A": "numel(A) / 2"},
        least="batch * (n ** 3 / 3 - n ** 2 + (2 * n ** 2 - n) * k)",
    ),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="Solves A x = b, as the published text says; the published reference multiplied LD by the pivot indices "
    "and solved another system. Complex results have a real tolerance. out= is exercised, and so are batches, for a "
    "single small system is all latency. A is symmetric in every case.",
    cases=(
        Case(_sized(2), draws={"A": Literal(1, 2, 2, 3), "b": Literal(1, 2)}),
        Case(_sized(2), draws={"A": Literal(0, 2, 2, 0), "b": Literal(2, 4)}),
        Case(_sized(3), draws={"A": Literal(0, 2, 1, 2, 0, 3, 1, 3, 0), "b": Literal(3, 5, 4)}),
        Case(_sized(4, (2,)), draws=HOLLOW),
        Case(_sized(16), {"hermitian": False}),
        Case(_sized(16), HERMITIAN, dtypes=REAL_B),
        Case(_sized(16, (3,)), HERMITIAN, dtypes=BOTH),
        Case(_sized(16, (2,), 2), draws=PLAIN, dtypes=BOTH),
        Case(_sized(4), draws=HOLLOW, dtypes=BOTH),
        Case(_sized(4), draws=IMAGINARY, dtypes=BOTH),
        Case(_sized(33, (1,), 1, 1)),
        Case(_sized(3, (), 2), draws={"A": Literal(0.25, 0, 0, 0, -0.5, 0, 0, 0, 0.5, 0.25, 0.5, 0, 0.5, 1, 0.25, 0, 0.25, 0.25)}),
        Case(_sized(40, (5,)), draws={"b": Outlier(p=0.05)}),
        Case(_sized(13, (), 6), draws={"A": Symmetric()}),
        Case(_sized(17, (40,), 2, 2), HERMITIAN),
        Case(_sized(24), draws={"A": SPD(0.5)}),
        Case(_sized(11, (2,), 3), draws={"A": Symmetric(1e3)}),
        Case(_sized(27, (), 2), draws=PLAIN, dtypes=REAL_B),
        Case(_sized(21, (3,), 2), layouts={"A": "transposed", "b": "transposed"}),
        Case(_sized(10, (6,), 3), HERMITIAN, dtypes=BOTH, layouts={"A": "transposed", "b": "strided"}),
        Case(_sized(14), dtypes=REAL_B, draws=PLAIN, layouts={"A": "strided", "b": "strided"}),
        Case(_sized(19, (4,)), out=True),
        Case(_sized(9), HERMITIAN, dtypes=REAL_B, out=True),
        Case(_sized(4, (3,)), draws=NEARLY_TRIDIAGONAL),
        Case(_sized(5, (5,), 5)),
        Case(_sized(1, (2,), 3), draws={"A": SPD(0.5)}),
        Case(_sized(4, (2,), 0)),
        Case(_sized(3), draws={"A": Literal(0.5, 1, 0, 1, 2, 16, 0, 16, 1), "b": Literal(1, 2, 3)}),
        # Small as a whole: pivots are chosen by ratios.
        Case(_sized(3), draws={"A": Literal(2e-9, 2e-5, 0, 2e-5, 2e-9, 4e-5, 0, 4e-5, 6e-5), "b": Literal(1e-5, 2e-5, 3e-5)}),
        Case(_sized(29, (7,), 2), held=True),
        Case(_sized(22, (), 3), HERMITIAN, dtypes=BOTH, held=True),
    ),
    varied=(
        sizes(lambda p: {"*batch": p.batch(), "n": p.whole(2, 12), "*k": p.among((), (p.whole(1, 5),), (70,))}, out=True),
        sizes(lambda p: {"*batch": (), "n": p.whole(65, 90), "*k": p.among((), (3,))}, where=lambda c: not c.dtypes),
        *(
            sizes(lambda p: {"*batch": (), "n": p.whole(5, 9), "*k": (3,)}, where=plain,
                  draws={"A": Scaled(MIXED, factor), "b": law})
            for factor, law in ((2.0**-15, TINY), (64, LARGE))
        ),
    ),
    timed=tuple(Case(_sized(n, (1,), b)) for n, b in ((16, 8192), (32, 2048), (64, 512), (128, 128))),
)  # fmt: skip
def solve_symmetric_ldl(A, b, hermitian=False, out=None):
    """The x with A x = b, for a batch of symmetric invertible matrices A (*, n, n), n >= 1, in general indefinite.

    A = A^T; with hermitian=True complex matrices are Hermitian instead, A = A^H (for real ones nothing changes). b is
    (*, n, k), as many axes as A, or (*, n), one axis less: vectors. * are the same batch axes for both (no
    broadcasting), any number of them, which may be empty. The result has b's shape and A's dtype. It is meant to be
    found by an LDL factorisation with 1x1 and 2x2 pivots, but any solver is right that is as accurate; the diagonal may
    hold zeros or tiny elements, so without pivoting none is.

    A is fp32 or complex64; b has the same dtype, or is fp32 beside a complex64 A. IEEE arithmetic in fp32 (no TF32).
    Triton has no complex type: torch.view_as_real gives the parts as a last axis of 2, without a copy. Errors (of real
    and imaginary parts alike) are compared to the typical element of the result and to the conditioning of the problem.
    A is symmetric up to rounding: either triangle may be read, or both, and imaginary parts on a Hermitian diagonal
    count as zeros. Singular systems are not tested; n up to 128 is used.

    out: None (the default: a new tensor), or a contiguous tensor of the result's shape and dtype with any contents,
    which is filled and returned. A and b are not changed and may have any strides.

    Example: solve_symmetric_ldl([[1, 2], [2, 3]], [1, 2]) = [1, 0]
    Example: solve_symmetric_ldl([[0, 2], [2, 0]], [[2, 6], [4, 8]]) = [[2, 4], [1, 3]]
    Example: solve_symmetric_ldl([[2, 1j], [-1j, 1]], [1, 2], hermitian=True) = [1 - 2j, 4 + 1j]
    """
    x = torch.linalg.solve(A, b.to(A.dtype))
    return x if out is None else out.copy_(x)
