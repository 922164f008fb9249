"""matrixmultiply/symmetric_mm_and_abs_sum."""

from kbx_env.tasks._varied import LARGE, TINY, longs, sizes

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Constant, Cost, Normal, Outlier, Paper, T, task


def _case(n, m, alpha, beta, **more):
    return Case({"N": n, "M": m}, {"alpha": alpha, "beta": beta}, **({"draws": {"A": Normal(scale=m**-0.25)}} | more))


@task(
    difficulty=4,
    takes={"A": T("N M"), "C": T("N N")},
    truth=Close(ulps=8),
    cost=Cost(flops="N * (N + 1) * M + 4 * N * N", least="N * (N + 1) * M + 2 * N * N"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="Operations are those of one triangle: A @ A^T is symmetric.",
    cases=(
        _case(2, 2, 1.0, 1.0),
        _case(3, 2, 0.5, 2.0),
        _case(64, 50, -1.0, 0.5),
        _case(129, 70, 0.3, -1.2, draws={}, draw=Outlier(scale=3)),
        _case(100, 257, 1.5, 0.0),
        _case(70, 20, 0.0, 1.0),
        _case(90, 33, 1.0, 1.0, draws={"C": Constant(0)}),
        _case(48, 40, 1.0, 0.5, layouts={"A": "transposed", "C": "transposed"}),
        _case(31, 29, 2.0, 1.0, layouts={"A": "strided", "C": "strided"}),
        _case(83, 61, 0.9, 1.1, held=True),
    ),
    varied=(
        sizes(
            longs({"N": (2, 30), "M": (2, 40)}, {"N": 140, "M": 600}),
            lambda p, s: {"alpha": p.real(-2, 2), "beta": p.real(-2, 2)},
        ),
        *(
            sizes(
                lambda p: {"N": p.whole(5, 9), "M": p.whole(5, 9)},
                lambda p, s: {"alpha": p.real(0.5, 2), "beta": p.real(0.5, 2)},
                draws={"A": factor, "C": Normal(scale=factor.scale**2)},
            )
            for factor in (TINY, LARGE)
        ),
    ),
    timed=tuple(_case(n, n, 1.0, 0.5) for n in (1024, 2048, 4096)),
)
def symmetric_mm_and_abs_sum(A, C, alpha, beta):
    """The sum of |alpha * A @ A^T + beta * C| over all elements, as a 0-d fp32 tensor.

    Example: symmetric_mm_and_abs_sum([[1, 2], [0, 1]], [[0, -8], [1, 0]], 1.0, 0.5) = 10.5

    A (N, M), C (N, N), not necessarily symmetric; alpha and beta are numbers. Products and sums in IEEE fp32: TF32 is too
    coarse and fails. A new tensor is returned; inputs may have any strides and are not changed.
    """
    return (alpha * (A @ A.mT) + beta * C).abs().sum()
