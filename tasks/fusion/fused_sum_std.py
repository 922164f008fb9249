"""fusion/fused_sum_std."""

import torch
from kbx_env.tasks._varied import long_axis, reduced

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Cost, DtypeArg, Literal, Normal, Outlier, Paper, T, Uniform, task

F64 = {"dtype": DtypeArg("f64")}


@task(
    difficulty=4,
    takes={"input": T("*")},
    truth=Close(ulps=32),
    cost=Cost(flops="numel(input)"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="dim is always given: one sum alone has no spread, and as published that constant was what the timing "
    "measured. dtype, correction, tuples of axes and out are exercised.",
    cases=(
        Case({"*": (2, 2)}, {"dim": 0}, draw=Literal(1, 2, 3, 7)),
        Case({"*": (2, 2)}, {"dim": 1}, draw=Literal(1, 2, 3, 4)),
        Case({"*": (2, 2)}, {"dim": 0, "keepdim": True}, draw=Literal(1, 2, 3, 8)),
        # 2**17 elements: kernels share each column between two programs.
        Case({"*": (256, 515)}, {"dim": 0, "keepdim": False, "correction": 1}),
        Case({"*": (128, 256)}, {"dim": 1}, draw=Outlier(scale=20)),
        Case({"*": (100, 300)}, {"dim": 0, "correction": 0}, draw=Normal(mean=3)),
        Case({"*": (9, 5000)}, {"dim": -1, "correction": 2}, draw=Uniform(-1, 2)),
        Case({"*": (5000, 9)}, {"dim": 0, "correction": 5}),
        Case({"*": (60, 70)}, {"dim": 1} | F64, draw=Outlier()),
        Case({"*": (60, 70)}, {"dim": 0, "dtype": DtypeArg("f32"), "keepdim": True}, draw=Normal(scale=1e-6)),
        Case({"*": (5, 37, 60)}, {"dim": 1}),
        Case({"*": (5, 37, 60)}, {"dim": (0, 2), "correction": 3}),
        Case({"*": (7, 6, 5, 31)}, {"dim": (-1, 1)}, draw=Outlier()),
        # Two runs of axes, the outer one of length 2.
        Case({"*": (2, 5, 9)}, {"dim": (0, 2)}),
        Case({"*": (3, 40001)}, {"dim": 0}),
        Case({"*": (3, 20011)}, {"dim": 1, "correction": 0}),
        # Columns of so many parts that a block holds the states of few of them.
        Case({"*": (16401, 17)}, {"dim": 0}),
        Case({"*": (33, 65)}, {"dim": 0}, layouts={"input": "transposed"}),
        Case({"*": (5, 4, 6, 7)}, {"dim": 0}, layouts={"input": "transposed"}),
        Case({"*": (17, 31)}, {"dim": 1}, layouts={"input": "strided"}, out=True),
        Case({"*": (40, 50)}, {"dim": 1, "keepdim": True} | F64, out=True),
        Case({"*": (6, 5, 173)}, {"dim": -1, "correction": 2}, held=True),
        Case({"*": (211, 7, 3)}, {"dim": (0, 1)}, held=True),
    ),
    varied=(
        reduced(lambda p: {"keepdim": p.chance(), "correction": p.among(-3, -2, -1, 1, 2)}, tuples=True, out=True),
        long_axis(lambda p: {"correction": 0}, tuples=True, out=True),
    ),
    timed=(
        *(Case({"*": (n, 4096)}, {"dim": 1}) for n in (4096, 16384)),
        Case({"*": (16384, 4096)}, {"dim": 0}),
        Case({"*": (64, 1024, 1024)}, {"dim": 1}),
    ),
)  # fmt: skip
def fused_sum_std(input, dim=None, keepdim=False, dtype=None, correction=1, out=None):
    """The spread of sums: input is summed over dim, and the standard deviation of all these sums is the result.

    Example: fused_sum_std([[1, 2], [3, 7]], dim=0) = 3.535534
    Example: fused_sum_std([[1, 2], [3, 7], [0, 4]], dim=1, correction=0) = 3.091206

    input is an fp32 tensor of rank >= 2, dim an axis or a tuple of distinct axes, each may be negative; at least one
    axis is not summed. With s the m sums that result and mean(s) their mean, the result is
    sqrt(sum((s - mean(s))^2) / (m - correction)), where correction is an integer below m. It is always 0-d: keepdim
    concerns the sums, which nobody sees, and changes nothing. dim=None, a sum over everything, would leave one number
    without a spread and does not occur; nor does an empty input.

    dtype is None (the default: fp32), torch.float32 or torch.float64: what the elements are converted to before they
    are added, in which all else is computed, and the result's dtype. Means far from zero must not spoil the spread (two
    passes over the sums, or Welford). The result is 0-d. out: None (the default: a new tensor), or a tensor of the
    result's shape and dtype with any strides and any contents, which is filled and returned. The input may have any
    strides and is not changed.
    """
    y = torch.std(torch.sum(input, dim, keepdim, dtype=dtype), correction=correction)
    return y if out is None else out.copy_(y)
