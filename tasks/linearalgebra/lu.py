"""linearalgebra/lu."""

import torch
from kbx_env.tasks._varied import LARGE, TINY, plain, sizes

from kbx_env.spec.criteria import Invariant
from kbx_env.spec.task import Case, Cost, Dominant, Literal, Normal, Outlier, Paper, T, Uniform, task

PLAIN = {"pivot": False}
F64 = {"A": "f64"}


def _sized(m, n, *B):
    return {"*B": B, "m": m, "n": n}


@task(
    difficulty=4,
    takes={"A": T("*B m n")},
    truth=Invariant("lu"),
    cost=Cost(flops="2 * numel(A) * min(m, n) / 3", least="2 * numel(A) * min(m, n) / 3 - numel(A)"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="Judged by what an LU factorisation promises. Without pivoting the matrices have a strong diagonal; as "
    "published, they were normal. out, published as a triple, is the tensor that receives P. Timed on batches.",
    cases=(
        Case(_sized(2, 2), draw=Literal(1, 2, 3, 4)),
        Case(_sized(3, 3), draw=Literal(0, 2, 1, 1, 1, 0, -4, 3, 2)),
        Case(_sized(2, 3), PLAIN, draw=Literal(2, 1, 5, 1, 3, -1)),
        # Without pivoting the pivots are 1, -5 and 4.2, beside larger elements.
        Case(_sized(3, 4), PLAIN, draw=Literal(1, 2, 0, 1, 3, 1, 2, -1, -2, 4, 1, 3)),
        Case(_sized(2, 2, 4), draw=Normal()),
        Case(_sized(1, 1, 3)),
        Case(_sized(4, 4), draw=Literal(1, 0, 2, 3, 2, 0, 1, 1, -1, 0, 4, 2, 3, 0, 3, 5)),
        Case(_sized(16, 16), {"pivot": True}, dtypes=F64),
        Case(_sized(8, 12), PLAIN, draw=Dominant(3), dtypes=F64),
        Case(_sized(16, 16, 4), draw=Outlier(), dtypes=F64),
        Case(_sized(33, 33, 2), draw=Outlier()),
        Case(_sized(48, 29)),
        Case(_sized(19, 43), draw=Uniform()),
        Case(_sized(37, 37), PLAIN, draw=Dominant(4)),
        Case(_sized(31, 18, 2), PLAIN, draw=Dominant(4)),
        Case(_sized(11, 13, 2, 2), draw=Normal(scale=1e4)),
        Case(_sized(26, 15), draw=Normal(scale=1e-3), layouts={"A": "transposed"}),
        Case(_sized(9, 21, 3), PLAIN, draw=Dominant(3), layouts={"A": "strided"}),
        Case(_sized(20, 20), out=True),
        Case(_sized(6, 1)),
        Case(_sized(1, 4), PLAIN, draw=Dominant(3)),
        Case(_sized(3, 2, 0)),
        Case(_sized(39, 27, 2), held=True),
        Case(_sized(25, 34, 2), PLAIN, draw=Dominant(4), held=True),
    ),
    varied=(
        sizes(lambda p: {"*B": p.batch(), "m": p.whole(1, 12), "n": p.whole(1, 12)}, lambda p, s: {"pivot": True}, out=True),
        sizes(lambda p: {"*B": (), "m": p.whole(50, 64), "n": p.whole(50, 64)}, lambda p, s: {"pivot": True}, out=True),
        *(
            sizes(lambda p: {"*B": (2,), "m": p.whole(3, 5), "n": p.whole(3, 5)}, lambda p, s: {"pivot": True},
                  where=plain, draws={"A": draw})
            for draw in (TINY, LARGE)
        ),
    ),
    timed=tuple(Case(_sized(n, n, b), draw=Uniform()) for n, b in ((16, 4096), (32, 2048), (64, 512))),
)  # fmt: skip
def lu(A, pivot=True, out=None):
    """LU factorisation of each matrix of a batch A (*, m, n), fp32 or fp64; returns the tuple (P, L, U).

    With k = min(m, n): L (*, m, k) is unit lower triangular (ones on the diagonal and zeros above it, exactly), U (*,
    k, n) is upper triangular (exact zeros below the diagonal); both have A's dtype. With pivot=True (partial pivoting)
    A = P L U, P (*, m, m) is a permutation matrix of A's dtype (zeros and ones), and no element of L is larger than 1
    in magnitude, up to rounding; which of equally large pivots is taken is free, and singular matrices are factorised,
    too. With pivot=False A = L U, and P is an empty tensor of shape (0,), whatever the batch; all leading blocks of A
    are then far from singular. out: None (the default: new tensors), or, with pivot=True only, a contiguous tensor of
    P's shape and dtype with any contents, which is filled with P and returned as the first result; L and U are new.

    Tolerance of A = P L U: 16 * eps * max(m, n) times the largest element of A times sqrt(n): IEEE arithmetic of A's
    dtype, no TF32. Batches may be empty. A is not changed and may have any strides; matrices up to 64 x 64 are used.

    Example: lu([[1, 2], [4, 6]]) = ([[0, 1], [1, 0]], [[1, 0], [0.25, 1]], [[4, 6], [0, 0.5]])
    Example: lu([[2, 1, 5], [1, 3, -1]], pivot=False) = ([], [[1, 0], [0.5, 1]], [[2, 1, 5], [0, 2.5, -3.5]])
    """
    if pivot:
        p, lower, upper = torch.linalg.lu(A)
        return (p if out is None else out.copy_(p)), lower, upper
    k = min(A.shape[-2:])  # torch factorises without pivoting on GPUs only
    x = A.clone()
    for j in range(k):
        x[..., j + 1 :, j] /= x[..., j, j, None]
        x[..., j + 1 :, j + 1 :] -= x[..., j + 1 :, j, None] * x[..., j, None, j + 1 :]
    lower = x.tril(-1)[..., :k] + torch.eye(A.shape[-2], k, dtype=A.dtype, device=A.device)
    return A.new_empty((0,)), lower, x.triu()[..., :k, :]
