"""loss/smooth_l1_loss."""

import torch.nn.functional as F
from kbx_env.tasks._cases import stream
from kbx_env.tasks._varied import TINY, elementwise, sizes

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Choice, Cost, Normal, Outlier, Paper, T, task

NONE, SUM, MEAN = ({"reduction": r} for r in ("none", "sum", "mean"))


@task(
    difficulty=2,
    takes={"input": T("*"), "target": T("*")},
    truth=Close(ulps=8),
    cost=Cost(flops="6 * n", least="3 * n"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="beta = 0, the plain absolute error, is part of the contract.",
    cases=(
        Case({"*": (32,)}),
        Case({"*": (32,)}, {"beta": 0.5}),
        Case({"*": (4, 8)}, NONE),
        Case({"*": (64, 257)}, MEAN, draw=Outlier()),
        Case({"*": (129, 257)}, SUM | {"beta": 0.5}, draw=Outlier()),
        Case({"*": (129, 257)}, NONE | {"beta": 0.1}, draw=Outlier()),
        Case({"*": (128, 1024)}, SUM | {"beta": 3.0}),
        Case({"*": (8193,)}, MEAN | {"beta": 2.5}, draw=Normal(scale=3)),
        # Where input and target are equal, d < 0 and d <= 0 differ: a division by zero.
        Case({"*": (31, 65)}, NONE | {"beta": 0}, draw=Choice(-1.0, -0.5, 0.0, 0.5, 1.0, 1e6)),
        Case({"*": (9, 65)}, MEAN | {"beta": 0.0}),
        Case({"*": (5, 60)}, NONE | {"beta": 0.5}, draw=Choice(-1.0, -0.5, 0.0, 0.5, 1.0, 1e6, -1e20)),
        Case({"*": (33, 65)}, SUM, layouts={"input": "transposed"}),
        Case({"*": (70, 131)}, MEAN, layouts={"target": "transposed"}),
        Case({"*": ()}, NONE),
        Case({"*": (0, 3)}, SUM),
        Case({"*": (3, 5, 911)}, MEAN | {"beta": 0.7}, held=True),
        Case({"*": (3, 5, 211)}, NONE | {"beta": 1.5}, held=True),
    ),
    varied=(
        elementwise(lambda p: {"beta": p.among(0, p.real(0, 4), p.real(0, 4), p.real(0, 4)),
                               "reduction": p.among("none", "sum", "mean")}),
        sizes(lambda p: {"*": p.shape(3, 3, 60)}, lambda p, s: {"beta": p.among(0, p.real(0.5, 4)), "reduction": "none"},
              draw=TINY),
        sizes(lambda p: {"*": p.among((0,), (0, 3), (4, 0, 2))}, lambda p, s: {"reduction": p.among("none", "sum")}),
    ),
    timed=stream(),
)  # fmt: skip
def smooth_l1_loss(input, target, beta=1.0, reduction="mean"):
    """Smooth absolute error of two fp32 tensors of one and the same shape, elementwise, then reduced.

    With d = |input - target|: l = 0.5 * d^2 / beta where d < beta, else d - 0.5 * beta. beta >= 0 is a number; for
    beta = 0 that is l = d. reduction="none": l, a tensor of that shape. "sum": the sum of l. "mean" (the default): the
    sum divided by the number of elements; 0-d for both. A mean over no element is not tested, an empty sum is 0.

    Example: smooth_l1_loss([1, 2], [4, 2.5]) = 1.3125
    Example: smooth_l1_loss([1, 2], [4, 2.5], beta=0.25, reduction="sum") = 3.25
    Example: smooth_l1_loss([1, 2], [4, 2.5], beta=0, reduction="none") = [3, 0.5]

    Compute in fp32. The result is a new fp32 tensor; input and target may each have any strides, be 0-d or empty, and
    are not changed. They do not broadcast.
    """
    return F.smooth_l1_loss(input, target, reduction=reduction, beta=beta)
