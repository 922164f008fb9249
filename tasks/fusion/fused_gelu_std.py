"""fusion/fused_gelu_std."""

import torch
import torch.nn.functional as F
from kbx_env.tasks._cases import stream
from kbx_env.tasks._varied import long_axis, reduced

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Cost, Literal, Normal, Outlier, Paper, T, Uniform, task

TANH = {"approximate": "tanh"}


@task(
    difficulty=3,
    takes={"input": T("*")},
    truth=Close(ulps=16),
    cost=Cost(flops="13 * n", least="n"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="correction, out= and means far from zero are exercised; timed along an axis too.",
    cases=(
        Case({"*": (5,)}, draw=Literal(-2, -1, 0, 1, 3)),
        Case({"*": (10, 20)}, {"dim": 1, "keepdim": True}),
        Case({"*": (128, 300)}, TANH, draw=Outlier()),
        # 2**17 elements, which kernels share between programs: more columns than a block has elements, many columns of which the
        # last program has one element, and rows of two blocks and a part.
        Case({"*": (33, 4201)}, {"dim": 0} | TANH),
        Case({"*": (129, 1030)}, {"dim": 0} | TANH, draw=Normal(mean=50, scale=0.5)),
        Case({"*": (13, 10501)}, {"dim": 1}, draw=Normal(mean=50, scale=0.5)),
        Case({"*": (128, 300)}, {"dim": 1, "correction": 0}, draw=Outlier(scale=100)),
        Case({"*": (70, 40)}, {"dim": -1, "correction": 7} | TANH, draw=Uniform(-3, 8)),
        Case({"*": (40, 9, 50)}, {"keepdim": True}, draw=Normal(mean=300)),
        Case({"*": (5, 301, 6)}, {"dim": 1}, draw=Normal(mean=50, scale=0.5)),
        Case({"*": (3, 40001)}, {"dim": 1}, draw=Normal(mean=-0.5)),
        Case({"*": (33, 65)}, {"dim": 0}, layouts={"input": "transposed"}, out=True),
        Case({"*": (5, 4, 6, 7)}, {"dim": 0}, layouts={"input": "transposed"}, out=True),
        Case({"*": (31, 17)}, {"correction": 2}, layouts={"input": "strided"}, out=True),
        Case({"*": (3, 0)}, {"dim": 0}),
        Case({"*": (6, 5, 173)}, {"dim": -2, "keepdim": True} | TANH, draw=Normal(mean=9), held=True),
        Case({"*": (7, 11, 213)}, {"correction": 3}, draw=Normal(scale=20), held=True),
    ),
    varied=(
        reduced(
            lambda p: {"keepdim": p.chance(), "correction": p.whole(-3, 2), "approximate": p.among("none", "tanh")},
            none=True,
            out=True,
        ),
        # Declared numbers are of order one.
        long_axis(lambda p: {"correction": 0}, out=True, where=lambda c: c.args.get("dim") is not None, draw=Normal(scale=1e-4)),
    ),
    timed=(
        *stream(powers=(25, 28)),
        *(Case({"*": (16384, 4096)}, {"dim": d} | TANH) for d in (0, 1)),
    ),
)
def fused_gelu_std(input, dim=None, keepdim=False, correction=1, approximate="none", out=None):
    """Standard deviation of gelu(input) over one axis (dim, may be negative) or over all elements (dim None, 0-d).

    approximate="none": gelu(x) = x / 2 * (1 + erf(x / sqrt 2)); "tanh": x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715
    x^3))). The result is sqrt(sum((g - mean(g))^2) / (n - correction)) over the n values g; correction is an integer
    below n. keepdim leaves reduced axes in the result with length 1.

    Example: fused_gelu_std([-2, -1, 0, 1, 3]) = 1.329556
    Example: fused_gelu_std([[1, 2], [-1, 3]], dim=1, correction=0, approximate="tanh") = [0.556701, 1.577594]

    input is fp32 of rank >= 1; fp32 throughout. A mean hundreds of times the deviation must not spoil it: two passes or
    a running mean, not the mean of squares. out: None (the default: a new tensor), or a contiguous tensor of the
    result's shape and dtype with any contents, which is filled and returned. input may have any strides; kept axes may
    be empty, reduced ones are not.
    """
    y = torch.std(F.gelu(input, approximate=approximate), dim, correction=correction, keepdim=keepdim)
    return y if out is None else out.copy_(y)
