"""loss/cross_entropy."""

import torch.nn.functional as F
from kbx_env.tasks._varied import almost_certain, class_weights, longs, near_zero, sizes

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Cost, Ints, Normal, Outlier, Paper, T, Uniform, task

ROWS = {"B": 32, "C": 10, "*": ()}
IMAGE = {"B": 2, "C": 10, "*": (8, 8)}
IGNORED = {"target": Ints(0, "C", special=-100, p=0.3)}


@task(
    difficulty=2,
    takes={
        "input": T("B C *"),
        "target": T("B *", "i64", Ints(0, "C")),
        "weight": T("C", draw=Uniform(0.1, 2), optional=True),
    },
    truth=Close(ulps=8),
    cost=Cost(
        flops="4 * numel(input)",
        # The loss of a single class is 0.
        reads={
            "input": "C * differing(target, ignore_index) * min(1, C - 1)",
            "target": "numel(target) * min(1, C - 1)",
            "weight": "distinct(target, ignore_index)",
        },
        least="numel(input)",
    ),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="weight, ignore_index and reduction are exercised; as published they never were.",
    cases=(
        Case({"B": 4, "C": 3, "*": ()}),
        Case(ROWS, draws=IGNORED),
        Case(ROWS, {"ignore_index": 3}, given=("weight",)),
        Case({"B": 2, "C": 3, "*": (4, 4)}),
        Case(IMAGE, draw=Outlier()),
        Case(IMAGE, {"reduction": "none"}, given=("weight",), draws=IGNORED),
        Case(IMAGE, {"reduction": "sum"}, given=("weight",)),
        Case({"B": 33, "C": 1001, "*": ()}, {"reduction": "none"}),
        Case({"B": 64, "C": 130, "*": ()}, draw=Normal(scale=1e4)),
        Case({"B": 5, "C": 1, "*": (3,)}, {"reduction": "sum"}),
        Case({"B": 20, "C": 36, "*": ()}, layouts={"input": "transposed"}),
        Case({"B": 2, "C": 5, "*": (6, 9)}, layouts={"input": "channels_last", "target": "transposed"}),
        # The axes of a picture cannot be joined without a copy.
        Case({"B": 3, "C": 4, "*": (5, 6)}, {"reduction": "none"}, layouts={"input": "transposed", "target": "transposed"}),
        Case({"B": 3, "C": 7, "*": (2, 3, 5)}, {"reduction": "mean"}, given=("weight",), draws=IGNORED),
        Case({"B": 0, "C": 7, "*": ()}, {"reduction": "none"}),
        Case({"B": 6, "C": 57, "*": (11,)}, given=("weight",), held=True),
    ),
    varied=(
        # 2**19 logits and more, of more classes than a block has.
        sizes(lambda p: {"B": p.whole(1010, 1020), "C": p.whole(521, 530), "*": ()},
              lambda p, s: {"reduction": p.among("none", "sum", "mean")},
              where=lambda c: "ignore_index" not in c.args and "target" not in c.draws),
        sizes(longs({"B": (2, 20), "C": (2, 20)}, {"B": 1100, "C": 1100}, lambda p, s: {"*": p.among((2, 3), (2, 1, 2))}),
              lambda p, s: {"reduction": p.among("none", "sum", "mean"),
                    "ignore_index": p.among(-100, 0, 1)},
              where=lambda c: "ignore_index" not in c.args and "target" not in c.draws, full=True),
        almost_certain(**{"*": ()}),
        near_zero(**{"*": ()}),
        class_weights(**{"*": ()}),
        sizes(lambda p: {"B": 0, "C": p.whole(2, 9), "*": p.among((), (3,))}, lambda p, s: {"reduction": p.among("none", "sum")}),
    ),
    timed=tuple(Case({"B": b, "C": 1000, "*": ()}) for b in (8192, 32768, 131072)),
)  # fmt: skip
def cross_entropy(input, target, weight=None, ignore_index=-100, reduction="mean"):
    """Cross entropy of fp32 logits with int64 class ids; the class axis is axis 1.

    Example: cross_entropy([[1, 2, 0], [0, 3, 1]], [1, 0], reduction="sum") = 3.577452

    input (B, C) or (B, C, *), target (B,) or (B, *) with ids in [0, C) or ignore_index, weight (C,) or None. Per
    element l = -w[t] * (x[t] - log(sum over c of exp(x[c]))), w = 1 without weight, and l = 0 where t == ignore_index.

    reduction="none": l, shaped like target (which may be empty). "sum": the sum. "mean": sum of l / sum of w[t] over
    the elements that are not ignored; a mean over none of them is not tested. ignore_index may be a valid class id.
    The sum over classes must not overflow for logits of +-1e5. Compute in fp32; the result is a new fp32 tensor, 0-d
    for "sum" and "mean". Inputs may have any strides. Label smoothing and class probabilities do not exist here.
    """
    return F.cross_entropy(input, target, weight, ignore_index=ignore_index, reduction=reduction)
