"""fusion/fused_cross_entropy_log_softmax."""

import torch.nn.functional as F
from kbx_env.tasks._varied import almost_certain, class_weights, longs, near_zero, sizes

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Cost, Ints, Literal, Normal, Outlier, Paper, T, Uniform, task

ROWS = {"B": 64, "C": 100}
IGNORED = {"target": Ints(0, "C", special=-100, p=0.3)}
SMOOTH = {"label_smoothing": 0.1}
NONE, SUM = {"reduction": "none"}, {"reduction": "sum"}
WEIGHT = ("weight",)


@task(
    difficulty=4,
    takes={
        "input": T("B C"),
        "target": T("B", "i64", Ints(0, "C")),
        "weight": T("C", draw=Uniform(0.1, 2), optional=True),
    },
    truth=Close(ulps=16),
    cost=Cost(
        flops="5 * numel(input)",
        reads={
            "input": "max(C * differing(target, ignore_index), numel(input) * (1 - nonzero(dim)))",
            "weight": "distinct(target, ignore_index) + numel(weight) * nonzero(label_smoothing)",
        },
        least="numel(input)",
    ),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="dim=0, where the second normalisation is not redundant, ignore_index and weights beside smoothing are "
    "judged.",
    cases=(
        Case({"B": 2, "C": 3}, draws={"input": Literal(1, 2, 3), "target": Literal(1, 2)}),
        Case({"B": 4, "C": 3}, SMOOTH, draw=Normal(scale=3)),
        Case(ROWS, given=WEIGHT),
        Case(ROWS, {"dim": -1} | SMOOTH, draw=Outlier()),
        Case(ROWS, {"label_smoothing": 0.3} | NONE, given=WEIGHT, draws=IGNORED),
        Case(ROWS, {"ignore_index": 7} | SUM | SMOOTH, given=WEIGHT, draw=Normal(scale=3)),
        Case({"B": 70, "C": 7}, {"ignore_index": 1}, draw=Normal(scale=2)),
        Case({"B": 33, "C": 1001}, {"label_smoothing": 1.0} | NONE, draw=Normal(scale=3)),
        Case({"B": 64, "C": 130}, NONE, draw=Normal(scale=1e4)),
        Case({"B": 1, "C": 9001}, {"label_smoothing": 0.2}, given=WEIGHT),
        # More than 2**19 elements, in rows longer than a block: kernels take another path.
        Case({"B": 59, "C": 9001}, {"label_smoothing": 0.2}, given=WEIGHT),
        Case({"B": 40, "C": 50}, {"dim": 0} | NONE, draw=Outlier(0.01, 20)),
        Case({"B": 90, "C": 33}, {"dim": 0, "label_smoothing": 0.2}, given=WEIGHT, draws=IGNORED),
        Case({"B": 1200, "C": 5}, {"dim": 0} | SUM, draw=Normal(scale=300)),
        Case({"B": 20, "C": 36}, SMOOTH, layouts={"input": "transposed"}),
        Case({"B": 31, "C": 17}, NONE, layouts={"input": "strided", "target": "strided", "weight": "strided"},
             given=WEIGHT),
        Case({"B": 0, "C": 7}, NONE),
        Case({"B": 57, "C": 211}, {"label_smoothing": 0.05}, given=WEIGHT, draws=IGNORED, held=True),
        Case({"B": 203, "C": 19}, {"dim": 0} | NONE | SMOOTH, draw=Normal(scale=2), held=True),
    ),
    varied=(
        sizes(longs({"B": (2, 20), "C": (2, 20)}, {"B": 1100, "C": 4300}),
              lambda p, s: {"reduction": p.among("none", "sum", "mean"), "label_smoothing": p.real(0, 1),
                    "dim": p.among(0, 1, -1), "ignore_index": p.among(-100, 0, 1, 2)},
              where=lambda c: "ignore_index" not in c.args and "target" not in c.draws),
        almost_certain(lambda p: {"label_smoothing": 0.0, "dim": p.among(1, -1)}),
        near_zero(lambda p, s: {"label_smoothing": p.real(0, 0.2), "dim": p.among(0, 1, -1)}),
        class_weights(lambda p, s: {"label_smoothing": p.real(0, 0.2), "dim": p.among(1, -1)}),
    ),
    timed=(
        *(Case({"B": b, "C": 128}) for b in (262144, 1048576)),
        Case({"B": 65536, "C": 1000}),
    ),
)  # fmt: skip
def fused_cross_entropy_log_softmax(
    input, target, dim=1, weight=None, ignore_index=-100, reduction="mean", label_smoothing=0.0
):
    """Cross entropy of log_softmax(input, dim), for fp32 input (B, C) and int64 target (B,) with class ids.

    First y = input - log(sum(exp(input))), the sum over axis dim (0, 1 or -1). Then, as cross entropy always takes the
    log-softmax over the classes, p[b, c] = y[b, c] - log(sum over c of exp(y[b, c])): for dim=1 a no-op, for dim=0 not.

    With class weights w (weight, fp32 (C,), or None, the default, for 1), s = label_smoothing in [0, 1] and t =
    target[b], row b costs (1 - s) * w[t] * -p[b, t] + s / C * sum over c of w[c] * -p[b, c], and 0 where t ==
    ignore_index (which may be a valid class id). reduction="none": the costs, (B,). "sum": their sum. "mean": the sum
    divided by the sum of w[t] over the rows that are not ignored; all rows ignored is not tested.

    Example: fused_cross_entropy_log_softmax([[1, 2, 3], [3, 1, 0]], [1, 0], reduction="none") = [1.407606, 0.169846]
    Example: fused_cross_entropy_log_softmax([[1, 2, 3], [3, 1, 0]], [1, 0], 0, None, 1, label_smoothing=0.5) = 0.991549

    Compute in fp32; logits of +-1e5 must not overflow. The result is a new fp32 tensor, 0-d for "sum" and "mean".
    input, target and weight may have any strides; B may be 0 with "none" only.
    """
    return F.cross_entropy(F.log_softmax(input, dim), target, weight, ignore_index=ignore_index, reduction=reduction,
                           label_smoothing=label_smoothing)  # fmt: skip
