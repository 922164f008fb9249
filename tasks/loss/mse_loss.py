"""loss/mse_loss."""

import torch.nn.functional as F
from kbx_env.tasks._cases import stream
from kbx_env.tasks._varied import LARGE, TINY, elementwise, sizes

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Cost, Normal, Outlier, Paper, T, task

NONE, SUM, MEAN = ({"reduction": r} for r in ("none", "sum", "mean"))


@task(
    difficulty=1,
    takes={"input": T("*"), "target": T("*")},
    truth=Close(ulps=8),
    cost=Cost(flops="3 * n"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    cases=(
        Case({"*": (10,)}),
        Case({"*": (3, 3)}, NONE),
        Case({"*": (2, 3, 8, 8)}),
        Case({"*": (129, 257)}, MEAN, draw=Outlier()),
        Case({"*": (129, 257)}, SUM, draw=Outlier()),
        Case({"*": (129, 257)}, NONE, draw=Outlier()),
        Case({"*": (128, 1024)}, SUM),
        Case({"*": (8193,)}, MEAN, draw=Normal(mean=1e4)),
        Case({"*": (4, 1025)}, NONE, draw=Normal(mean=300, scale=1e-3)),
        Case({"*": (33, 65)}, SUM, layouts={"input": "transposed"}),
        Case({"*": (70, 131)}, MEAN, layouts={"target": "transposed"}),
        Case({"*": (7, 31)}, NONE, layouts={"input": "strided", "target": "transposed"}),
        Case({"*": ()}, NONE),
        Case({"*": (0, 3)}, NONE),
        Case({"*": (0, 3)}, SUM),
        Case({"*": (3, 5, 911)}, MEAN, held=True),
        Case({"*": (3, 5, 211)}, NONE, held=True),
    ),
    varied=(
        elementwise(lambda p: {"reduction": p.among("none", "sum", "mean")}),
        *(
            sizes(lambda p: {"*": p.shape(3, 3, 60)}, lambda p, s: {"reduction": "none"}, draws=draws)
            for draws in ({"input": TINY, "target": TINY}, {"input": LARGE, "target": LARGE})
        ),
        sizes(lambda p: {"*": p.among((0,), (0, 3), (4, 0, 2))}, lambda p, s: {"reduction": p.among("none", "sum")}),
    ),
    timed=stream(),
)  # fmt: skip
def mse_loss(input, target, reduction="mean"):
    """Squared error l = (input - target)^2 of two fp32 tensors of one and the same shape, elementwise, then reduced.

    reduction="none": l, a tensor of that shape. "sum": the sum of l. "mean" (the default): the sum divided by the
    number of elements; 0-d for both. A mean over no element is not tested, an empty sum is 0.

    Example: mse_loss([1, 2], [3, 2.5]) = 2.125
    Example: mse_loss([1, 2], [3, 2.5], reduction="sum") = 4.25
    Example: mse_loss([1, 2], [3, 2.5], reduction="none") = [4, 0.25]

    Compute in fp32 (subtract before squaring). The result is a new fp32 tensor; input and target may each have any
    strides, be 0-d or empty, and are not changed. They do not broadcast.
    """
    return F.mse_loss(input, target, reduction=reduction)
