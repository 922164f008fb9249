"""linearalgebra/eig."""

import torch
from kbx_env.tasks._varied import LARGE, TINY, batches, plain, sizes

from kbx_env.spec.criteria import Invariant
from kbx_env.spec.task import (
    Case,
    Cost,
    Dominant,
    Eye,
    Literal,
    Normal,
    Outlier,
    Paper,
    Spectrum,
    Symmetric,
    T,
    Uniform,
    task,
)

F64 = {"A": "f64"}
FIRST_KNOWN = Literal(
    *(5 * (i == 0) if j == 0 else 9 * ((j == i + 1) - (i == j + 1)) + (i + j) % 3 for i in range(16) for j in range(16))
)
SKEW = Literal(*((j == i + 1) - (i == j + 1) for i in range(6) for j in range(6)))


def _case(n, *B, **more):
    return Case({"*": B, "n": n}, **more)


def _usual(c):
    return c.axes["n"] > 5 and not isinstance(c.draw, Literal | Spectrum)


@task(
    difficulty=3,
    takes={"A": T("* n n")},
    truth=Invariant("eig"),
    cost=Cost(flops="25 * numel(A) * n", least="10 * numel(A) * n / 3"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="Judged by what eigenpairs promise, order and phase are free; as published, they had to equal the vendor "
    "library's bit for bit. Batches of small matrices are timed, not one matrix of up to 1024 x 1024.",
    cases=(
        _case(2, draw=Literal(2, 0, 0, 3)),
        _case(2, draw=Literal(0, -1, 1, 0)),
        _case(3, draw=Literal(0, 0, 1, 1, 0, 0, 0, 1, 0)),
        _case(3, draw=Literal(4, 1, 0, 2, 3, 0, 0, 0, 5)),
        _case(4, draw=Eye()),
        # The first column's reflection loses all digits of its small element unless it turns away from -3 and from 0.75.
        _case(3, 2, draw=Literal(4, 1, 0.5, -3, 5, 1, 1e-7, 2, 6, 4, 1, 0.5, 0.75, 5, 1, 1e-7, 2, 6), dtypes=F64),
        # Skew-symmetric: under imaginary shifts elements beside the diagonal become imaginary.
        _case(6, draw=SKEW, dtypes=F64),
        # The identity with rounding errors: its eigenvectors are independent only where these do not count.
        _case(10, 40, draw=Spectrum(*[1] * 10, symmetric=True), dtypes=F64),
        # The first column tells an eigenvalue: every step works on the other rows and columns, with complex shifts.
        _case(16, draw=FIRST_KNOWN, dtypes=F64),
        _case(8, draw=Symmetric(0.001), dtypes=F64),
        _case(16, draw=Symmetric(0.001), dtypes=F64),
        _case(14),
        _case(10, 2, draw=Outlier(0.05)),
        _case(18, draw=Dominant()),
        _case(7, 3, 2, draw=Normal(scale=1e4)),
        _case(11, 2, dtypes=F64),
        _case(12, draw=Uniform(0, 1)),
        _case(9, 3, layouts={"A": "transposed"}),
        _case(6, 2, layouts={"A": "strided"}, dtypes=F64),
        _case(2, 200),
        # What counts as small is relative to the matrix.
        _case(3, 64, draw=Normal(scale=1e-18), dtypes=F64),
        _case(1, 5),
        _case(3, 0),
        _case(15, held=True),
        _case(13, dtypes=F64, held=True),
    ),
    varied=(
        *batches("*", n=(1, 6), large=(17, 20), where=_usual),
        *(
            sizes(lambda p: {"*": (2,), "n": p.whole(3, 5)}, where=lambda c: plain(c) and _usual(c), draws={"A": draw})
            for draw in (TINY, LARGE)
        ),
    ),
    timed=(_case(8, 64), _case(16, 32), _case(32, 16)),
)  # fmt: skip
def eig(A):
    """Eigenvalues and right eigenvectors of every real square matrix of a batch A (*, n, n), fp32 or fp64.

    Example: eig([[2, 0], [0, 3]]) = ([2 + 0j, 3 + 0j], [[1 + 0j, 0j], [0j, 1 + 0j]])

    Returns the tuple (w, v), both complex (complex64 for fp32, complex128 for fp64) even where all values are real:
    w (*, n) holds the n eigenvalues, each as often as its multiplicity, column k of v (*, n, n) the eigenvector of
    w[k]: A v = v diag(w). The columns of v have length 1 (the root of the sum of |v|^2) and are linearly independent.
    The order of the pairs and the phase of each column are free, and so is the basis where an eigenvalue is repeated.

    A need not be symmetric; generic matrices have complex pairs of eigenvalues. The tested matrices can be
    diagonalised. Tolerance: |A v - v diag(w)| at most 16 * eps * n, relative to the largest |A| times sqrt(n), and
    16 * eps * n for the lengths, with eps of A's dtype. fp32 matrices may be decomposed in fp32 or fp64 arithmetic, not
    in TF32. Triton has no complex type: torch.view_as_real gives the parts of the results as a last axis of 2. A is not
    changed and may have any strides; batches may be empty; matrices up to 32 x 32 are used.
    """
    return tuple(torch.linalg.eig(A))
