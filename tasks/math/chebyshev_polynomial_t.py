"""math/chebyshev_polynomial_t."""

import torch
from kbx_env.tasks._cases import pointwise, stream
from kbx_env.tasks._varied import elementwise

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Choice, Cost, Normal, Paper, T, Uniform, task

DEGREES = ({"n": 5}, {"n": 10}, {"n": 1}, {"n": 2}, {"n": 3})


@task(
    difficulty=3,
    takes={"input": T("*")},
    truth=Close(ulps=16),
    cost=Cost(flops="4 * numel(input)", reads={"input": "numel(input) * nonzero(n)"}, least="numel(input)"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    cases=(
        *pointwise("input", Uniform(-1, 1), args=DEGREES, out=True, tail=False,
                   special=Choice(-1.0, 1.0, 0.0, -0.0, 0.5, -0.9999, 1.25, -2.0)),
        Case({"*": (64, 130)}, {"n": 0}),
        Case({"*": (64, 130)}, {"n": 7}, draw=Normal(clamp=1.0)),
        Case({"*": (64, 130)}, {"n": 6}, draw=Uniform(-2, 2)),
        Case({"*": (3, 421)}, {"n": 32}, draw=Uniform(-1, 1), held=True),
    ),
    varied=(
        elementwise(lambda p: {"n": p.whole(0, 40)}, out=True, draw=Uniform(-1, 1)),
        elementwise(lambda p: {"n": p.whole(0, 10)}, out=True, low=1, draw=Uniform(-2, 2)),
    ),
    timed=stream(args={"n": 3}, draw=Uniform(0, 1)),
    differs="out is filled and returned, as the text says; the published reference ignored it.",
)  # fmt: skip
def chebyshev_polynomial_t(input, n, out=None):
    """Chebyshev polynomial of the first kind T_n(x) of every element of input, an fp32 tensor of any shape.

    Example: chebyshev_polynomial_t([-0.5, 0, 0.25, 2], n=3) = [1, 0, -0.6875, 26]

    T_0 = 1, T_1 = x, T_k = 2 x T_(k-1) - T_(k-2); on [-1, 1] this is cos(n arccos x). n is one Python int for the whole
    tensor, 0 <= n <= 40. Elements outside of [-1, 1] are tested up to |x| = 2 and n = 10. Errors are judged against the
    typical size of the results of a call; the recurrence in fp32 is accurate enough. Infinities and NaN are not
    tested. The result has the shape of input and dtype fp32. out: None (the default: a new tensor), or a tensor of the
    result's shape and dtype with any strides and any contents, which is filled and returned. The input may be
    non-contiguous, 0-d or empty and is not changed.
    """
    return torch.special.chebyshev_polynomial_t(input, n, out=out)
