"""linearalgebra/matrix_power_eig."""

import torch
from kbx_env.tasks._varied import batches, plain, sizes

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import SPD, Case, Constant, Cost, Literal, Paper, Scaled, Spectrum, Symmetric, T, task
from kbx_env.spec.varied import flat

MIXED = Spectrum(*((-1) ** i * (0.5 + 1.5 * i / 64) for i in range(64)), symmetric=True)
"""Eigenvalues of both signs, none nearer to 0 than 0.5."""
F64 = {"A": "f64"}


def _sized(n, *B):
    return {"*B": B, "n": n}


NEARLY_ONE = Literal(
    *(
        float(i == j) * (b == 3) + (7e-6 if b == 3 else 1) * ((i * j * 7 + 3 * (i + j)) % 11 - 5) / 5
        for b in range(4) for i in range(6) for j in range(6)
    )
)  # fmt: skip


@task(
    difficulty=3,
    takes={"A": T("*B n n")},
    # The exact answer for fp64 is torch's own fp64 result. Its rounding error is as large as a kernel's, and the floor must cover
    # both: a plain Jacobi differs from it by up to 170 units. TF32 is off by thousands.
    truth=Close(ulps=256),
    cost=Cost(
        flops="4 * numel(A) * n + 2 * numel(A) * n",
        reads={"A": "numel(A) / 2 * nonzero(k)"},
        least="numel(A) * n",
    ),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="Batches give the power of every matrix; as published, they gave a value that depended on the signs of "
    "eigenvectors. k is real; complex k, documented but never tested, does not exist here. out= is exercised.",
    cases=(
        Case(_sized(2), {"k": 2}, draw=Literal(0, 1, 1, 3)),
        Case(_sized(3), {"k": 0.5}, draw=Literal(4, 1, 0, 1, 3, -1, 0, -1, 5)),
        Case(_sized(2, 2), {"k": 3}, draw=Literal(1, 2, 2, 1, 5, -6, -6, 8)),
        Case(_sized(16), {"k": 0.5}, draw=SPD(0.5), dtypes=F64),
        Case(_sized(16), {"k": 2.0}, draw=Symmetric(), dtypes=F64),
        Case(_sized(19, 2), {"k": -3}, draw=MIXED, dtypes=F64),
        Case(_sized(33), {"k": 3}, draw=Symmetric()),
        Case(_sized(15, 4), {"k": 2}, draw=Symmetric(0.5)),
        Case(_sized(21, 2, 2), {"k": -1}, draw=MIXED),
        Case(_sized(24), {"k": 7}, draw=MIXED),
        Case(_sized(30), {"k": -0.5}, draw=SPD(0.5)),
        Case(_sized(17, 3), {"k": 1.3}, draw=SPD(0.5)),
        # An exponent that fp32 does not hold.
        Case(_sized(6), {"k": 3.1}, draw=SPD(0.5), dtypes=F64),
        Case(_sized(10), {"k": 5}, draw=Spectrum(2, 2, -2, -2, 1, 1, 0, 0, 0, -0.5, symmetric=True)),
        Case(_sized(5, 2), {"k": 0}, draw=Symmetric()),
        Case(_sized(4), {"k": 8}, draw=MIXED, dtypes=F64),
        # A large exponent amplifies each rounding of an eigenvalue as many times; the eigenvalues of this matrix are exact.
        Case(_sized(2), {"k": 20}, draw=Literal(2, 0, 0, -0.5), dtypes=F64),
        # One matrix is near the identity: its directions count. The others keep the typical element from being small.
        Case(_sized(6, 4), {"k": 2}, draw=NEARLY_ONE, dtypes=F64),
        Case(_sized(12), {"k": 4}, draw=Symmetric(), layouts={"A": "strided"}),
        Case(_sized(13, 2), {"k": 3}, draw=SPD(), layouts={"A": "transposed"}),
        Case(_sized(11), {"k": -2}, draw=MIXED, out=True),
        Case(_sized(1, 3), {"k": 2}, draw=Symmetric()),
        Case(_sized(4, 2), {"k": 3}, draw=Constant(0)),
        # Eigenvalues of both sides of 1 in size, one of them 1.
        Case(_sized(2), {"k": 3}, draw=Literal(-1, 0, 0, 0.5)),
        Case(_sized(3, 0), {"k": 2}),
        Case(_sized(23, 3), {"k": -3}, draw=MIXED, held=True),
        Case(_sized(27), {"k": 0.7}, draw=SPD(0.5), held=True),
    ),
    varied=(
        *batches("*B", n=(2, 9), large=(50, 60), out=True, where=lambda c: isinstance(c.args["k"], int) and 0 <= c.args["k"] < 4,
                args=lambda p: {"k": p.whole(0, 6)}, fields=lambda n: {"draw": SPD(0.5)}),
        batches("*B", n=(2, 9), where=lambda c: c.draw == SPD(0.5), args=lambda p: {"k": p.real(-2, 2)})[0],
        *flat(
            sizes(lambda p: {"*B": (2,), "n": p.whole(5, 9)}, lambda p, s: {"k": p.whole(1, 2)},
                  where=plain, draws={"A": Scaled(MIXED, factor)})
            for factor in (2.0**-15, 64)
        ),
    ),
    timed=tuple(
        Case(_sized(n, b), {"k": k}, draw=SPD(0.5)) for n, b, k in ((16, 512, 2), (32, 256, 0.5), (64, 32, 3))
    ),
)  # fmt: skip
def matrix_power_eig(A, k, *, out=None):
    """The power A^k of each symmetric matrix of a batch A (*, n, n), fp32 or fp64; k is a Python int or float.

    With the eigenvalues w and an orthonormal basis Q of eigenvectors, A = Q diag(w) Q^T, the result (*, n, n), of A's
    dtype, is Q diag(w^k) Q^T: for an integer k the k-th matrix power, for k = 0 the identity, for negative k the power
    of the inverse, for k = 0.5 the principal square root. Eigenvalues may be negative, equal or zero where k is an
    integer that is not negative (2.0 counts as an integer); for negative k none is nearer to 0 than 0.4; where k is not
    an integer, all are above 0.4. The result does not depend on the choice of Q, and other ways to it are allowed. out:
    None (the default: a new tensor), or a contiguous tensor of the result's shape and dtype with any contents, which is
    filled and returned.

    A is symmetric up to rounding; either triangle may be read, or both. Accuracy: IEEE arithmetic of A's dtype (no
    TF32); errors are compared to the typical element of the result and to the conditioning of the problem. Batches may
    be empty. A is not changed and may have any strides; matrices up to 64 x 64 are used. No element of A is above 1e6,
    and the largest of each matrix is above 1e-6, or all are zero.

    Example: matrix_power_eig([[2, 1], [1, 2]], 2) = [[5, 4], [4, 5]]
    Example: matrix_power_eig([[2.5, 1.5], [1.5, 2.5]], 0.5) = [[1.5, 0.5], [0.5, 1.5]]
    Example: matrix_power_eig([[0, 2], [2, 0]], -1) = [[0, 0.5], [0.5, 0]]
    """
    w, q = torch.linalg.eigh(A)
    power = (q * w.pow(k)[..., None, :]) @ q.mT
    if k == 0:
        # Exact zeros: rounding noise in their place would be taken for the typical element.
        power = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device).repeat(*A.shape[:-2], 1, 1)
    return power if out is None else out.copy_(power)
