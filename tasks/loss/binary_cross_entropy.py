"""loss/binary_cross_entropy."""

import torch.nn.functional as F
from kbx_env.tasks._cases import stream
from kbx_env.tasks._varied import SMALL_POSITIVE, elementwise, sizes

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Bernoulli, Case, Choice, Cost, Paper, T, Uniform, task

NONE, SUM, MEAN = ({"reduction": r} for r in ("none", "sum", "mean"))
HARD = {"target": Bernoulli(0.5)}
EDGES = {"input": Choice(0.0, 1.0, 0.5, 1e-30, 1e-7, 0.9999999, 1e-3), "target": Choice(0.0, 1.0, 0.25)}
WEIGHTED = {"given": ("weight",)}


def _eager(input, target, weight=None, reduction="mean"):
    return F.binary_cross_entropy(input, target, weight, reduction=reduction)


@task(
    difficulty=2,
    takes={"input": T("*", draw=Uniform(0, 1)), "target": T("*", draw=Uniform(0, 1)),
           "weight": T("*", draw=Uniform(0, 2), optional=True)},
    truth=Close(ulps=8),
    cost=Cost(flops="22 * n", least="n"),
    eager=_eager,
    paper=Paper(rtol=1e-5, atol=1e-5),
    cases=(
        Case({"*": (8,)}, draws=HARD),
        Case({"*": (8,)}, draws=HARD, **WEIGHTED),
        Case({"*": (4, 4)}, NONE, draws=HARD),
        Case({"*": (129, 257)}, MEAN),
        Case({"*": (129, 257)}, SUM, **WEIGHTED),
        Case({"*": (129, 257)}, NONE, **WEIGHTED),
        Case({"*": (64, 128)}, NONE, draws=EDGES),
        Case({"*": (64, 140)}, MEAN, draws=EDGES, **WEIGHTED),
        Case({"*": (64, 128)}, NONE, draws={"input": Uniform(0, 1e-4), "target": Uniform(0, 1e-3)}),
        Case({"*": (8193,)}, MEAN, draws=HARD),
        Case({"*": (33, 65)}, SUM, layouts={"input": "transposed"}),
        Case({"*": (70, 131)}, MEAN, layouts={"target": "transposed"}),
        Case({"*": (7, 31)}, NONE, layouts={"input": "strided", "weight": "transposed"}, **WEIGHTED),
        Case({"*": ()}, NONE),
        Case({"*": (0, 3)}, SUM),
        Case({"*": (3, 5, 911)}, MEAN, **WEIGHTED, held=True),
        Case({"*": (3, 5, 211)}, NONE, held=True),
    ),
    varied=(
        elementwise(lambda p: {"reduction": p.among("none", "sum", "mean")}, full=True,
                    draws={"weight": Uniform(0, 60)}),
        sizes(lambda p: {"*": p.shape(2, 3, 60)}, lambda p, s: {"reduction": "none"}, full=True, draws={"weight": SMALL_POSITIVE}),
        sizes(lambda p: {"*": p.among((0,), (0, 3), (4, 0, 2))}, lambda p, s: {"reduction": p.among("none", "sum")}),
    ),
    timed=stream(draws=HARD),
)  # fmt: skip
def binary_cross_entropy(input, target, weight=None, reduction="mean"):
    """Cross entropy between probabilities and targets, two fp32 tensors of one and the same shape, elementwise.

    l = -w * (t * max(log(p), -100) + (1 - t) * max(log(1 - p), -100)) with p = input in [0, 1], t = target in [0, 1]
    and w = weight, an fp32 tensor of the same shape, or 1 if weight is None. The clamp makes l finite for p = 0 and 1.
    reduction="none": l, a tensor of that shape. "sum": the sum of l. "mean" (the default): the sum divided by the
    number of elements (not by the weights); 0-d for both. A mean over no element is not tested, an empty sum is 0.

    Example: binary_cross_entropy([0.5, 0.9], [1, 0]) = 1.49787
    Example: binary_cross_entropy([0, 1, 0.2], [1, 0.75, 0], reduction="none") = [100, 25, 0.223144]
    Example: binary_cross_entropy([0.5, 0.9], [1, 0], [2, 0.5], "sum") = 2.53759

    Compute in fp32, log(1 - p) as log1p(-p) where p may be small. The result is a new fp32 tensor; the inputs may each
    have any strides, be 0-d or empty, and are not changed. They do not broadcast.
    """
    # The clamps change nothing in [0, 1]; the judge also asks for the neighbourhood, where torch raises an error.
    return F.binary_cross_entropy(input.clamp(0, 1), target.clamp(0, 1), weight, reduction=reduction)
