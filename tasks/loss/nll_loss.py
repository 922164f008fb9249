"""loss/nll_loss."""

import torch.nn.functional as F
from kbx_env.tasks._varied import longs, sizes

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Cost, Ints, Outlier, Paper, T, Uniform, task

NONE, SUM, MEAN = ({"reduction": r} for r in ("none", "sum", "mean"))
IGNORED = {"target": Ints(0, "C", special=-100, p=0.3)}
WEIGHTED = {"given": ("weight",)}


@task(
    difficulty=2,
    takes={
        "input": T("B C", draw=Uniform(-8, 0)),
        "target": T("B", "i64", Ints(0, "C")),
        "weight": T("C", draw=Uniform(0.1, 2), optional=True),
    },
    truth=Close(ulps=8),
    cost=Cost(
        flops="numel(target)",
        reads={"input": "differing(target, ignore_index)", "weight": "distinct(target, ignore_index)"},
    ),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="ignore_index and reduction are exercised. Timed with many rows: the published (32768, 1000) reads 0.4 MB, "
    "which is no time at all.",
    cases=(
        Case({"B": 4, "C": 3}),
        Case({"B": 4, "C": 3}, **WEIGHTED),
        Case({"B": 32, "C": 10}, draws=IGNORED),
        Case({"B": 32, "C": 10}, {"ignore_index": 3}, **WEIGHTED),
        Case({"B": 40, "C": 10}, NONE | {"ignore_index": 3}, draws={"target": Ints(0, 10, special=3, p=0.3)}),
        Case({"B": 999, "C": 130}, MEAN, **WEIGHTED, draw=Outlier(), draws=IGNORED),
        Case({"B": 999, "C": 130}, SUM, **WEIGHTED, draws=IGNORED | {"input": Outlier()}),
        Case({"B": 1500, "C": 100}, NONE, **WEIGHTED),
        Case({"B": 9001, "C": 7}, MEAN),
        Case({"B": 12345, "C": 5}, MEAN, **WEIGHTED, draws=IGNORED),
        Case({"B": 20000, "C": 3}, SUM),
        Case({"B": 33, "C": 20}, layouts={"input": "transposed"}),
        Case({"B": 70, "C": 31}, NONE, layouts={"input": "strided", "target": "strided"}, draws=IGNORED),
        Case({"B": 70, "C": 31}, SUM, **WEIGHTED, layouts={"input": "transposed", "weight": "strided"}),
        Case({"B": 0, "C": 7}, NONE),
        Case({"B": 57, "C": 11}, **WEIGHTED, draws=IGNORED, held=True),
        Case({"B": 8411, "C": 13}, {"ignore_index": 7}, held=True),
    ),
    varied=(
        sizes(
            longs({"B": (2, 20), "C": (2, 20)}, {"B": 1100, "C": 4300}),
            lambda p, s: {"reduction": p.among("none", "sum", "mean"), "ignore_index": p.among(-100, 0, 1)},
            where=lambda c: "ignore_index" not in c.args and "target" not in c.draws,
            full=True,
            draws={"input": Uniform(-100, 0), "weight": Uniform(20, 60)},
        ),
        sizes(
            lambda p: {"B": p.whole(50, 70), "C": p.whole(2, 3)},
            lambda p, s: {"reduction": "none", "ignore_index": 0},
            where=lambda c: "ignore_index" not in c.args and "target" not in c.draws,
            draws=lambda p, s: {"input": Uniform(-p.among(1e-3, 1e-4, 1e-5), 0), "weight": Uniform(1e-5, 9e-5)},
            full=True,
        ),
        sizes(lambda p: {"B": 0, "C": p.whole(2, 9)}, lambda p, s: {"reduction": p.among("none", "sum")}),
    ),
    timed=tuple(Case({"B": b, "C": c}) for b, c in ((1 << 21, 100), (1 << 22, 50), (1 << 24, 10))),
)
def nll_loss(input, target, weight=None, ignore_index=-100, reduction="mean"):
    """Negative log-likelihood: picks -input[b, target[b]] from fp32 log-probabilities, weighs and reduces it.

    input (B, C) fp32, target (B,) int64 with ids in [0, C) or ignore_index, weight (C,) fp32 or None. Per row
    l = -w[t] * input[b, t] with t = target[b], w = 1 without weight, and l = 0 where t == ignore_index (default -100;
    it may also be a valid class id).

    reduction="none": l, of shape (B,), which may be empty. "sum": the sum of l. "mean" (the default): the sum of l
    divided by the sum of w[t] over the rows that are not ignored; 0-d for both. A mean over no row is not tested.

    Example: nll_loss([[-1, -2], [-3, -0.5]], [1, 0]) = 2.5
    Example: nll_loss([[-1, -2], [-3, -0.5], [-9, -9]], [1, 0, -100], [0.5, 2]) = 2.2
    Example: nll_loss([[-1, -2], [-3, -0.5]], [1, 0], ignore_index=0, reduction="none") = [2, 0]

    Compute in fp32. The result is a new fp32 tensor; the inputs may have any strides and are not changed.
    """
    return F.nll_loss(input, target, weight, ignore_index=ignore_index, reduction=reduction)
