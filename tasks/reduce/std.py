"""reduce/std."""

import torch
from kbx_env.tasks._varied import TINY, long_axis, reduced, sizes

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Cost, Linspace, Literal, Normal, Outlier, Paper, T, Uniform, task


@task(
    difficulty=2,
    takes={"input": T("*")},
    truth=Close(ulps=16),
    cost=Cost(flops="4 * numel(input)"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="Means far from zero and out= are exercised; timed along axes too, not over everything only.",
    cases=(
        Case({"*": (5,)}, draw=Literal(1, 2, 3, 4, 6)),
        Case({"*": (2, 3)}, {"dim": 0}, draw=Normal(scale=3)),
        Case({"*": (4097,)}, draw=Uniform(), out=True),
        Case({"*": (128, 300)}, {"dim": 0}),
        Case({"*": (128, 300)}, {"dim": 1, "keepdim": True}, draw=Outlier(scale=100)),
        Case({"*": (128, 300)}, {"dim": 1, "correction": 0}, draw=Normal(mean=1000, scale=3)),
        Case({"*": (70, 40)}, {"dim": -1, "correction": 7}, draw=Uniform(-3, 8)),
        Case({"*": (40, 9, 50)}, {"keepdim": True, "correction": 0}, draw=Normal(mean=-300)),
        Case({"*": (5, 301, 6)}, {"dim": 1}, draw=Normal(mean=50, scale=0.5)),
        Case({"*": (3, 40001)}, {"dim": 1}, draw=Outlier()),
        Case({"*": (90, 130)}, {"dim": 1}, draw=Linspace(-2000, 1500)),
        Case({"*": (33, 65)}, {"dim": 0}, layouts={"input": "transposed"}, out=True),
        Case({"*": (5, 4, 6, 7)}, {"dim": 0}, layouts={"input": "transposed"}),
        Case({"*": (31, 17)}, layouts={"input": "strided"}, draw=Normal(mean=4)),
        Case({"*": (31, 17)}, layouts={"input": "transposed"}, draw=Normal(mean=4)),
        Case({"*": (3, 0, 4)}, {"dim": 0}),
        # Two runs of axes, the outer one of length 2.
        Case({"*": (2, 9)}, layouts={"input": "transposed"}),
        # 2**19 elements and more: kernels share columns between programs, here all of them and two.
        Case({"*": (33434, 17)}, {"dim": 0, "correction": 0}),
        Case({"*": (128, 4100)}, {"dim": 0}, draw=Normal(mean=3)),
        Case({"*": (6, 5, 173)}, {"dim": -2, "keepdim": True}, draw=Normal(mean=9), held=True),
        Case({"*": (7, 11, 213)}, {"correction": 3}, draw=Normal(scale=20), held=True),
    ),
    varied=(
        reduced(lambda p: {"keepdim": p.chance(), "correction": p.among(-3, -2, -1, 1, 2)}, none=True, out=True),
        long_axis(lambda p: {"correction": 0}, out=True, where=lambda c: c.args.get("dim") is not None),
        sizes(lambda p: {"*": tuple(max(n, 2) for n in p.shape(2, 3, 90))},
              lambda p, s: {"dim": p.axis(len(s["*"])), "correction": 0},
              where=lambda c: c.args.get("dim") is not None, draw=TINY, draws={}),
    ),
    timed=(
        *(Case({"*": (1 << k,)}, draw=Uniform()) for k in (25, 27)),
        Case({"*": (16384, 4096)}, {"dim": 1}, draw=Uniform()),
        Case({"*": (16384, 4096)}, {"dim": 0}, draw=Uniform()),
    ),
)
def std(input, dim=None, correction=1, keepdim=False, out=None):
    """Standard deviation of input, an fp32 tensor of any rank >= 1, over one axis or (dim None) over all elements.

    Example: std([1, 2, 4, 7]) = 2.64575
    Example: std([[1, 2], [4, 7]], dim=1, correction=0, keepdim=True) = [[0.5], [1.5]]

    y = sqrt(sum((x - mean)^2) / (n - correction)), n the number of reduced elements; correction is an integer below n.
    dim may be negative. With keepdim the reduced axes stay with length 1; otherwise dim None gives a 0-d tensor. Means
    a thousand times the deviation must not spoil it: two passes or a running mean, not the mean of squares. fp32
    throughout. out: None (the default: a new tensor), or a tensor of the result's shape and dtype with any strides and
    any contents, which is filled and returned. input may have any strides; kept axes may be empty, reduced ones are
    not.
    """
    y = torch.std(input, dim, correction=correction, keepdim=keepdim)
    return y if out is None else out.copy_(y)
