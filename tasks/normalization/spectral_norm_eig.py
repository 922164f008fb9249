"""normalization/spectral_norm_eig."""

import torch
from kbx_env.tasks._varied import batches

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import (
    Case,
    Cost,
    Dominant,
    Literal,
    Normal,
    Outlier,
    Paper,
    Spectrum,
    T,
    Triangular,
    Uniform,
    task,
)

CLAMPED = Normal(clamp=10)
TAILS = Outlier(clamp=10)
TIED = Spectrum(3, -3, 3, -3, 2, 1, -1, 0.5, symmetric=True)


def _sized(n, *B):
    return {"*B": B, "n": n}


@task(
    difficulty=4,
    takes={"A": T("*B n n")},
    truth=Close(ulps=16),
    # Of a triangular matrix zeros and diagonal tell all.
    cost=Cost(flops="32 * numel(A) * n", reads={"A": "nonzero(A)"}, least="2 * numel(A)"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="Also graded where the largest eigenvalues tie, are complex or the matrix is triangular. out= is "
    "exercised. Timed on batches: single matrices up to 128 x 128, as published, measure the latency of a solver.",
    cases=(
        Case(_sized(2), draw=Literal(1, 2, 3, 4)),
        Case(_sized(2, 2), draw=Literal(1, -2, 2, 1, 5, 6, 7, 8)),
        Case(_sized(3), draw=Literal(1, 2, 3, 4, 5, 6, 7, 8, 9)),
        Case(_sized(2), draw=Literal(1, 8, 0, 0.5)),
        Case(_sized(3, 2), draw=Literal(0, 0, 2, 1, 0, 0, 0, 3, 0, 4, 0, 0, 0, -5, 1, 0, 0, 2)),
        Case(_sized(32, 8), draw=CLAMPED),
        Case(_sized(32), draw=TAILS),
        Case(_sized(48, 2), draw=CLAMPED),
        Case(_sized(47), draw=TAILS),
        Case(_sized(33, 3), draw=Uniform()),
        Case(_sized(13, 2, 3), draw=TIED),
        Case(_sized(25, 5), draw=Dominant()),
        Case(_sized(11, 4), draw=Triangular()),
        Case(_sized(19, 3), draw=Normal(scale=1e-6)),
        Case(_sized(20, 2), draw=Normal(scale=1e6)),
        Case(_sized(29), draw=CLAMPED, layouts={"A": "transposed"}),
        Case(_sized(14, 4), draw=TAILS, layouts={"A": "strided"}),
        Case(_sized(17, 5), draw=CLAMPED, out=True),
        Case(_sized(1, 3), draw=CLAMPED),
        Case(_sized(4, 0), draw=CLAMPED),
        Case(_sized(37, 3), draw=CLAMPED, held=True),
    ),
    varied=batches("*B", n=(2, 9), large=(50, 60), out=True, fields=lambda n: {"draw": Normal()}),
    timed=tuple(Case(_sized(n, b), draw=Uniform()) for n, b in ((16, 64), (32, 64), (64, 32))),
)  # fmt: skip
def spectral_norm_eig(A, *, out=None):
    """The largest magnitude of an eigenvalue of each real fp32 matrix of a batch A (*, n, n), n >= 1.

    For every matrix max |w_i| over its eigenvalues w_i, real or complex: the spectral radius, in spite of the name not
    the 2-norm. The result is fp32 and has the batch's shape (*), 0-d for a single matrix. out: None (the default: a new
    tensor), or a contiguous tensor of the result's shape and dtype with any contents, which is filled and returned. The
    matrices are in general not symmetric; their elements may be as small as 1e-7 or as large as 1e7 throughout, and
    several eigenvalues may share the largest magnitude (a complex pair, w and -w). Matrices whose largest eigenvalue is
    defective or zero are not tested. Accuracy: IEEE fp32 (no TF32); errors are compared to the typical element of the
    result and to the conditioning of the eigenvalue. Batches may be empty. A is not changed and may have any strides;
    matrices up to 64 x 64 are used.

    Example: spectral_norm_eig([[1, 2], [3, 4]]) = 5.37228
    Example: spectral_norm_eig([[[1, -2], [2, 1]], [[0, 9], [0, -3]]]) = [2.23607, 3]
    """
    radius = torch.linalg.eigvals(A).abs().amax(-1)
    return radius if out is None else out.copy_(radius)
