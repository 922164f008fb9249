"""matrixmultiply/matrix_multiply_symmetric."""

from kbx_env.tasks._varied import LARGE, TINY, WIDE, adjacent, longs, sizes

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Cost, Normal, Outlier, Paper, T, task


def _case(n, m, alpha, beta, **more):
    return Case({"N": n, "M": m}, {"alpha": alpha, "beta": beta}, **({"draw": Normal(scale=m**-0.25)} | more))


@task(
    difficulty=4,
    takes={"A": T("N M"), "B": T("M N"), "C": T("N N")},
    truth=Close(ulps=16),
    cost=Cost(flops="2 * N * M * N + 2 * N * N * N", least="2 * N * M * N + N * (N + 1) * N"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="The tolerance follows from the conditioning of the two chained products; the published 1e-5 is less than what "
    "another order of summation moves. fp32 is timed: in fp16 the result overflows.",
    cases=(
        _case(2, 2, 2.0, 0.5),
        _case(3, 3, 1.0, 1.0),
        _case(50, 40, 1.0, 0.5, draw=Normal()),
        _case(64, 100, 0.3, -1.2),
        # Many rows: kernels walk the tiles in groups of rows, of which the last one is not full. Results of one product.
        _case(363, 1, 1.0, 0.5),
        _case(37, 129, 1.5, 0.0, draw=Outlier(scale=5)),
        _case(33, 17, -0.7, 2, layouts={"A": "transposed", "B": "transposed", "C": "transposed"}),
        _case(20, 31, 1, 1, layouts={"A": "strided", "C": "strided"}),
        _case(24, 9, 0.0, 1.5),
        _case(0, 3, 1.0, 1.0),
        _case(45, 70, 0.9, 0.4, held=True),
    ),
    varied=(
        sizes(
            longs({"N": (2, 30), "M": (2, 40)}, {"N": 140, "M": 600}),
            lambda p, s: {"alpha": p.real(-2, 2), "beta": p.real(-2, 2)},
            draw=Normal(scale=0.3),
        ),
        sizes(
            lambda p: {"N": 2, "M": p.whole(WIDE, WIDE + WIDE // 16)},
            lambda p, s: {"alpha": p.real(-2, 2), "beta": p.real(-2, 2)},
            draw=Normal(scale=0.3),
            layouts=lambda p, s: adjacent(p, 0, "B"),
        ),
        sizes(
            lambda p: {"N": p.whole(70, 80), "M": p.whole(7600, 7700)},
            lambda p, s: {"alpha": p.real(-2, 2), "beta": p.real(-2, 2)},
            draw=Normal(scale=0.2),
        ),
        *(
            sizes(
                lambda p: {"N": p.whole(4, 9), "M": p.whole(5, 9)},
                lambda p, s: {"alpha": p.real(0.5, 2), "beta": p.real(0.5, 2)},
                draws=draws,
            )
            for draws in ({"A": TINY, "B": Normal(), "C": TINY}, {"A": LARGE, "B": LARGE, "C": Normal(scale=4096)})
        ),
    ),
    timed=tuple(_case(n, n, 1.0, 0.5) for n in (1024, 2048, 4096)),
)
def matrix_multiply_symmetric(A, B, C, alpha, beta):
    """C1 = alpha * A @ B + beta * C, then the result alpha * C1 @ C1^T + beta * C1, fp32.

    Example: matrix_multiply_symmetric([[1, 2], [0, 1]], [[1, 0], [1, 1]], [[0, 2], [0, 0]], 1.0, 0.5) =
        [[19.5, 7.5], [6.5, 2.5]]

    A (N, M), B (M, N), C (N, N); alpha and beta are numbers. Products and sums in IEEE fp32: TF32 is too coarse and
    fails. A new (N, N) tensor is returned; inputs may have any strides and are not changed; N may be 0.
    """
    first = alpha * (A @ B) + beta * C
    return alpha * (first @ first.mT) + beta * first
