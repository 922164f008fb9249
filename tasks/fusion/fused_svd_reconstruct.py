"""fusion/fused_svd_reconstruct."""

import torch
from kbx_env.tasks._varied import longs, sizes

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Cost, Literal, Normal, Outlier, Paper, Scaled, Spectrum, T, Uniform, task


def _sized(m, n, *B):
    return {"*B": B, "m": m, "n": n}


@task(
    difficulty=5,
    takes={"A": T("*B m n")},
    truth=Close(ulps=32),
    cost=Cost(flops="4 * numel(A) * min(m, n) + 2 * numel(A) * min(m, n)", least="4 * numel(A) * min(m, n) / 3"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="Returns the tuple (product, S); as published, the product alone is A itself, so that a copy was right. "
    "Takes batches, and is timed on batches of small matrices rather than on single ones up to 1024 x 1024.",
    cases=(
        Case(_sized(2, 2), draw=Literal(1, 2, 3, 4)),
        Case(_sized(3, 2), draw=Literal(1, 2, 3, 4, 5, 6)),
        Case(_sized(2, 3), draw=Literal(1, 2, 3, 4, 5, 6)),
        Case(_sized(1, 1), draw=Literal(42)),
        Case(_sized(16, 16)),
        Case(_sized(32, 16), draw=Outlier()),
        Case(_sized(16, 32), draw=Uniform()),
        Case(_sized(40, 21, 2), draw=Normal(scale=1e3)),
        Case(_sized(13, 13, 2, 3), draw=Uniform(-1e-3, 1e-3)),
        Case(_sized(18, 25), draw=Spectrum(3, 3, 3, 2, 2, 1, 1, 0.5)),
        Case(_sized(11, 30), layouts={"A": "transposed"}),
        Case(_sized(9, 14, 3), layouts={"A": "strided"}),
        Case(_sized(7, 1), draw=Outlier()),
        Case(_sized(4, 3, 0)),
        Case(_sized(40, 32)),
        Case(_sized(16, 18), draw=Spectrum(*(3 * 0.5**i for i in range(16)))),
        Case(_sized(32, 18), draw=Scaled(Spectrum(*(0.5**i for i in range(18))), 5e-6)),
        # One direction outweighs the second by far, and the third by more, but all three count.
        Case(_sized(64, 64), draw=Literal(1 + 1 / 64, *[1 / 64] * 130, 1 / 64 + 1e-5, *[1 / 64] * 3964)),
        Case(_sized(27, 35, 2), held=True),
    ),
    varied=(
        sizes(lambda p: {"*B": p.batch(), "m": p.whole(1, 9), "n": p.whole(1, 9)}),
        sizes(longs({"m": (2, 9), "n": (2, 9)}, {"m": 52, "n": 52}, lambda p, s: {"*B": ()}, most=2000)),
    ),
    timed=tuple(Case(_sized(n, n, b), draw=Uniform()) for n, b in ((16, 512), (32, 256), (64, 32))),
)  # fmt: skip
def fused_svd_reconstruct(A):
    """Decomposes each fp32 matrix of a batch A (*, m, n) and multiplies the factors again: returns (product, S).

    With the thin SVD A = U diag(S) Vh, k = min(m, n): product (*, m, n) is U diag(S) Vh, which is A up to rounding, and
    S (*, k) holds the singular values, in descending order and not negative. Both are new fp32 tensors. Singular values
    may be equal or zero; both results are unique nevertheless. Accuracy: IEEE fp32 (no TF32); errors are compared to
    the typical element of each result: a small singular value counts beside the others, not by itself. Batches may be
    empty. A is not changed and may have any strides; matrices up to 64 x 64 are used. No element is above 1e6, and the
    largest of each matrix is above 1e-6.

    Example: fused_svd_reconstruct([[3, 0], [4, 5]]) = ([[3, 0], [4, 5]], [6.7082, 2.23607])
    """
    u, s, vh = torch.linalg.svd(A, full_matrices=False)
    return (u * s[..., None, :]) @ vh, s
