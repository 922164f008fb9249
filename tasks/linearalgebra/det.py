"""linearalgebra/det."""

import torch
from kbx_env.tasks._varied import batches, unit_determinant

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Cost, Dominant, Eye, Literal, Normal, Outlier, Paper, Spectrum, T, Uniform, task


def _sized(n, *batch):
    return {"*batch": batch, "n": n}


def _unit(n):
    """N(0, 1) scaled so that determinants neither overflow nor vanish."""
    return Normal(scale=1.6 / n**0.5)


@task(
    difficulty=4,
    takes={"A": T("*batch n n")},
    truth=Close(ulps=16),
    cost=Cost(flops="batch * 2 * n ** 3 / 3", least="batch * (2 * n ** 3 / 3 - n ** 2)"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="Tensors are judged, not Python numbers; batches are exercised; timed matrices are scaled (as published, "
    "determinants overflow from n = 64 on) and come in batches.",
    cases=(
        Case(_sized(2), draw=Eye()),
        Case(_sized(2), draw=Literal(3, 7, 2, 5)),
        Case(_sized(3), draw=Uniform(0, 1)),
        Case(_sized(16), draw=Literal(0)),
        Case(_sized(3, 2), draw=Literal(0, 2, 1, 1, 0, 3, 4, 5)),
        Case(_sized(4, 50)),
        Case(_sized(4, 50), draw=Outlier(p=0.02, scale=20)),
        Case(_sized(16, 20), draw=_unit(16)),
        Case(_sized(33, 5), draw=_unit(33)),
        Case(_sized(48), draw=_unit(48)),
        Case(_sized(17, 3), draw=Dominant()),
        Case(_sized(40, 2, 3), draw=Spectrum(-1.1, symmetric=True)),
        Case(_sized(19, 6), draw=_unit(19), layouts={"A": "transposed"}),
        Case(_sized(11, 7), draw=_unit(11), layouts={"A": "strided"}),
        Case(_sized(1, 9)),
        Case(_sized(3, 0)),
        Case(_sized(27, 4, 2), draw=_unit(27), held=True),
    ),
    varied=batches(fields=lambda n: {"draw": unit_determinant(n)}),
    timed=tuple(Case(_sized(n, b), draw=_unit(n)) for n, b in ((16, 8192), (32, 8192), (64, 1024), (128, 256))),
)
def det(A):
    """Determinants of a batch of square fp32 matrices A (*, n, n), n >= 1; the result has the batch's shape (*).

    A single matrix gives a 0-d tensor; batches may be empty. Singular matrices give 0 (a zero matrix exactly 0), zeros
    may stand on the diagonal, so pivot. Accuracy: IEEE fp32 (no TF32), compared to the typical determinant of the batch
    and to the conditioning: how much the result moves when the elements of A do, in relative terms. Results neither
    overflow nor vanish; matrices up to 128 x 128 are used. A is not changed and may have any strides.

    Example: det([[3, 7], [2, 5]]) = 1
    Example: det([[0, 2], [4, 1]]) = -8
    """
    return torch.linalg.det(A)
