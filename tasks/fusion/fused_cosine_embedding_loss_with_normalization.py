"""fusion/fused_cosine_embedding_loss_with_normalization."""

import torch
import torch.nn.functional as F
from kbx_env.tasks._varied import TINY, longs, sizes

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Choice, Constant, Cost, Outlier, Paper, T, Uniform, task

BIG = {"N": 128, "D": 256}
NONE, SUM = {"reduction": "none"}, {"reduction": "sum"}
ALIKE = {"draw": Uniform(-0.3, 1)}


@task(
    difficulty=3,
    takes={"input1": T("N D"), "input2": T("N D"), "target": T("N", "i64", Choice(-1.0, 1.0))},
    truth=Close(ulps=16),
    cost=Cost(flops="6 * numel(input1)"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="The documented loss; the published reference computed max(0, 1 - target * cos), with the margin added for "
    "every row, whatever the target.",
    cases=(
        Case({"N": 3, "D": 5}),
        Case({"N": 3, "D": 5}, {"margin": 0.5} | SUM, **ALIKE),
        Case({"N": 7, "D": 5}, {"margin": -0.5} | NONE),
        Case(BIG, {"margin": 0.5}, **ALIKE),
        Case(BIG, {"margin": 0.5}, draw=Outlier()),
        Case(BIG, {"margin": 0.25} | NONE, **ALIKE),
        Case(BIG, {"margin": -1.0} | SUM, draw=Outlier(scale=1000), dtypes={"target": "f32"}),
        Case({"N": 513, "D": 33}, NONE, dtypes={"target": "f32"}),
        Case({"N": 3001, "D": 6}),
        Case({"N": 5, "D": 3001}, {"margin": 0.1} | NONE, **ALIKE),
        Case(
            {"N": 20, "D": 9}, {"margin": -0.4} | NONE, draws={"input1": Choice(0.0, 3.0, -4.0), "input2": Constant(0)}
        ),
        # Rows shorter than 1e-12, of one input at a time.
        Case({"N": 20, "D": 9}, {"margin": -0.4} | NONE, draws={"input1": Choice(0.0, 2e-13, -3e-13)}),
        Case({"N": 20, "D": 9}, {"margin": -0.4} | NONE, draws={"input2": Choice(0.0, 2e-13, -3e-13)}),
        # More than 2**19 elements, in rows longer than a block: kernels take another path.
        Case({"N": 129, "D": 4111}, {"margin": 0.2} | NONE, **ALIKE),
        Case({"N": 60, "D": 2}, {"margin": 0.3} | NONE, draw=Choice(0.0, 0.25, -2.0, 700.0)),
        Case({"N": 33, "D": 65}, {"margin": 0.2}, layouts={"input1": "transposed"}, **ALIKE),
        Case({"N": 40, "D": 31}, NONE, layouts={"input1": "strided", "input2": "transposed", "target": "strided"}),
        Case({"N": 0, "D": 4}, NONE),
        Case({"N": 211, "D": 77}, {"margin": 0.4}, held=True, **ALIKE),
        Case({"N": 101, "D": 13}, {"margin": -0.2} | NONE, dtypes={"target": "f32"}, held=True),
    ),
    varied=(
        sizes(
            longs({"N": (2, 20), "D": (2, 20)}, {"N": 1100, "D": 4300}),
            lambda p, s: {"reduction": p.among("none", "sum", "mean"), "margin": p.real(-0.9, 0.9)},
            draws={},
            draw=Uniform(-0.3, 1),
        ),
        sizes(lambda p: {"N": p.whole(20, 30), "D": p.whole(5, 9)}, lambda p, s: {"reduction": "none", "margin": p.real(-0.9, 0)},
              draws={}, draw=TINY),
    ),
    timed=tuple(Case({"N": n, "D": 256}) for n in (32768, 131072, 524288)),
)
def fused_cosine_embedding_loss_with_normalization(input1, input2, target, margin=0, reduction="mean"):
    """Cosine embedding loss of the rows of input1 and input2, both fp32 (N, D), normalised to length 1 first.

    Per row, c = (a . b) / (max(|a|, 1e-12) * max(|b|, 1e-12)) with a and b the rows of the inputs, so that a zero row
    gives c = 0. The loss of the row is 1 - c where target is 1, and max(0, c - margin) where target is -1. target (N,)
    is int64 or fp32 and holds only 1 and -1; margin is a number in [-1, 1].

    reduction="none": the losses, (N,). "sum": their sum; "mean": the sum divided by N; both 0-d.

    Example: fused_cosine_embedding_loss_with_normalization([[3, 4], [1, 1]], [[4, 3], [2, 0]], [1, -1], margin=0.5,
    reduction="none") = [0.04, 0.207107]
    Example: fused_cosine_embedding_loss_with_normalization([[3, 4], [1, 1]], [[4, 3], [2, 0]], [1, -1]) = 0.373553

    Compute in fp32; the squares of the tested values neither overflow nor underflow. The result is a new fp32 tensor;
    the inputs may have any strides; N may be 0 with "none" only.
    """
    c = (F.normalize(input1, dim=1) * F.normalize(input2, dim=1)).sum(1)
    loss = torch.where(target == 1, 1 - c, (c - margin).clamp(min=0))
    return loss if reduction == "none" else loss.sum() if reduction == "sum" else loss.mean()
