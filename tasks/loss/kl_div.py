"""loss/kl_div."""

import torch.nn.functional as F
from kbx_env.tasks._varied import sizes

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Choice, Cost, Outlier, Paper, T, Uniform, task

NONE, SUM, MEAN, BATCH = ({"reduction": r} for r in ("none", "sum", "mean", "batchmean"))
LOGS = {"log_target": True}
LOG = {"target": Uniform(-8, 0)}


@task(
    difficulty=3,
    takes={"input": T("B *", draw=Uniform(-8, 0)), "target": T("B *", draw=Uniform(0, 1))},
    truth=Close(ulps=8),
    cost=Cost(flops="6 * numel(input)", least="numel(input)"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="Zero targets are tested; as published neither they nor \"sum\" and \"mean\" were.",
    cases=(
        Case({"B": 4, "*": (8,)}),
        Case({"B": 2, "*": (5,)}, LOGS, draws=LOG),
        Case({"B": 2, "*": (3,)}, NONE),
        Case({"B": 129, "*": (257,)}, BATCH),
        Case({"B": 129, "*": (257,)}, NONE),
        Case({"B": 64, "*": (257,)}, NONE | LOGS, draws=LOG),
        Case({"B": 33, "*": (1001,)}, MEAN | LOGS, draws=LOG),
        Case({"B": 40, "*": (300,)}, SUM, draws={"target": Choice(0.0, 1.0, 0.3, 1e-30)}),
        Case({"B": 16, "*": (32,)}, NONE, draws={"target": Choice(0.0, 1.0, 0.3, 1e-30), "input": Outlier()}),
        Case({"B": 8193, "*": ()}, BATCH),
        Case({"B": 33, "*": (65,)}, layouts={"input": "transposed"}),
        Case({"B": 70, "*": (131,)}, MEAN, layouts={"target": "transposed"}),
        Case({"B": 7, "*": (31,)}, NONE | LOGS, draws=LOG, layouts={"input": "strided"}),
        Case({"B": 3, "*": (4, 9)}, BATCH | LOGS, draws=LOG),
        Case({"B": 3, "*": (0,)}, NONE),
        Case({"B": 6, "*": (5, 411)}, BATCH | LOGS, draws=LOG, held=True),
        Case({"B": 5, "*": (211,)}, held=True),
    ),
    varied=(
        sizes(lambda p: {"B": p.whole(2, 9), "*": p.shape(3, 4, 300)},
              lambda p, s: {"reduction": p.among("none", "sum", "mean", "batchmean")}),
        # Log-probabilities of what is nearly certain, and of what hardly occurs.
        sizes(lambda p: {"B": p.whole(2, 9), "*": p.shape(2, 2, 20)}, lambda p, s: {"reduction": "none", "log_target": False},
              draws={"input": Uniform(-9e-5, 0), "target": Uniform(0, 1)}),
        *(
            sizes(lambda p: {"B": p.whole(2, 9), "*": p.shape(2, 2, 20)},
                  lambda p, s, logs=logs: {"reduction": "none", "log_target": logs},
                  draws={"input": Uniform(-100, 0), "target": Uniform(-40, -20) if logs else Uniform(0, 1)})
            for logs in (False, True)
        ),
        sizes(lambda p: p.among({"B": 0, "*": (3,)}, {"B": 3, "*": (0, 2)}), lambda p, s: {"reduction": p.among("none", "sum")}),
    ),
    timed=tuple(Case({"B": b, "*": (1024,)}) for b in (8192, 32768, 131072)),
)  # fmt: skip
def kl_div(input, target, reduction="batchmean", log_target=False):
    """Pointwise Kullback-Leibler divergence of two fp32 tensors of one shape (B, *), then reduced.

    input holds log-probabilities x (but need not be normalised). log_target=False (the default): target holds
    probabilities t >= 0 and l = t * (log(t) - x), 0 where t = 0. log_target=True: target holds log-probabilities and
    l = exp(target) * (target - x). reduction="none": l. "sum": the sum of l. "mean": the sum divided by the number of
    elements. "batchmean" (the default): the sum divided by B, the size of axis 0. All but "none" give a 0-d tensor.

    Example: kl_div([[-1, -2], [-0.5, -3]], [[0.4, 0], [1, 0.5]]) = 0.843454
    Example: kl_div([[-1, -2]], [[-0.5, -2.5]], "none", True) = [[0.303265, -0.0410425]]

    Infinities are not tested, nor are the means over no element. Compute in fp32. The result is a new fp32 tensor;
    input and target may each have any strides or be empty and are not changed. They do not broadcast.
    """
    return F.kl_div(input, target, reduction=reduction, log_target=log_target)
