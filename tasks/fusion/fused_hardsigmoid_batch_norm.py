"""fusion/fused_hardsigmoid_batch_norm."""

import torch.nn.functional as F
from kbx_env.tasks._varied import longs, moments, plain, sizes, statistics

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Constant, Cost, HalfNormal, Normal, Outlier, Paper, T, task

SMALL = {"N": 10, "C": 3, "*": (8, 8)}
MIDDLE = {"N": 16, "C": 32, "*": (16, 16)}
FRESH = {"running_mean": Constant(0), "running_var": Constant(1)}
AFFINE = ("weight", "bias")
TRAIN = {"training": True}


@task(
    difficulty=2,
    takes={
        "x": T("N C *"), "running_mean": T("C", draw=Normal()), "running_var": T("C", draw=HalfNormal(0.1)),
        "weight": T("C", draw=Normal(), optional=True), "bias": T("C", draw=Normal(), optional=True),
    },
    writes={"running_mean": "training", "running_var": "training"},
    truth=Close(ulps=16),
    cost=Cost(
        flops="6 * numel(x)",
        reads={
            "running_mean": "C * max(1 - training, nonzero(1 - momentum))",
            "running_var": "C * max(1 - training, nonzero(1 - momentum))",
        },
        least="numel(x)",
    ),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="The in-place update of the running statistics is judged (as published only a later case felt it), and "
    "training is timed too.",
    cases=(
        Case(SMALL, draws=FRESH),
        Case(SMALL, draws=FRESH, given=AFFINE),
        Case(SMALL, TRAIN, draws=FRESH),
        Case(SMALL, {"inplace": True}, given=("weight",)),
        Case(MIDDLE, TRAIN | {"inplace": True}, given=AFFINE),
        Case(MIDDLE, {"eps": 0.5}, given=AFFINE, draw=Outlier()),
        Case(MIDDLE, TRAIN | {"momentum": 0.3, "eps": 1e-2}, given=AFFINE, draw=Outlier(scale=20)),
        Case({"N": 33, "C": 5, "*": ()}, TRAIN, draw=Normal(scale=4)),
        Case({"N": 3, "C": 7, "*": (19,)}, TRAIN | {"momentum": 1.0}, given=("bias",)),
        Case({"N": 2, "C": 3, "*": (200, 90)}, TRAIN | {"momentum": 0.0}, draw=Normal(mean=100, scale=3)),
        Case({"N": 3, "C": 6, "*": (5, 9)}, TRAIN, layouts={"x": "channels_last"}, given=("weight",)),
        Case({"N": 3, "C": 6, "*": (5, 9)}, layouts={"x": "transposed"}, given=AFFINE),
        Case({"N": 6, "C": 4, "*": (31,)}, TRAIN, layouts={"x": "strided", "running_var": "strided"}),
        Case({"N": 0, "C": 4, "*": (3,)}),
        Case({"N": 5, "C": 11, "*": (7, 13)}, TRAIN | {"momentum": 0.25}, given=AFFINE, held=True),
        Case({"N": 2, "C": 4, "*": (3, 5, 6)}, {"eps": 1e-4}, given=AFFINE, held=True),
    ),
    varied=(
        sizes(lambda p: {"N": p.whole(2, 5), "C": p.whole(2, 6), "*": p.shape(2, 4, 60)},
              lambda p, s: {"training": p.chance(), "momentum": p.real(0, 1), "eps": p.real(0.001, 0.5)}),
        sizes(longs({"N": (2, 6), "C": (2, 6)}, {"N": 1100, "C": 530}, lambda p, s: {"*": p.among((), (3,))}),
              lambda p, s: {"training": p.chance(0.7)}, where=plain, full=True),
        sizes(lambda p: {"N": p.whole(2, 3), "C": p.whole(2, 3), "*": (p.whole(4300, 4500),)}, lambda p, s: {"training": True},
              where=plain, full=True),
        statistics(),
        moments(),
    ),
    timed=(
        *(Case({"N": 1, "C": 64, "*": (s, s)}, given=AFFINE) for s in (512, 1024, 2048)),
        *(Case({"N": 32, "C": 64, "*": (s, s)}, TRAIN, given=AFFINE) for s in (64, 256)),
    ),
)  # fmt: skip
def fused_hardsigmoid_batch_norm(
    x, running_mean, running_var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5, inplace=False
):
    """hardsigmoid of a batch normalisation of x, fp32 of shape (N, C, *).

    Per channel c: z = (x - mean[c]) / sqrt(var[c] + eps) * weight[c] + bias[c], and y = min(max(z / 6 + 1 / 2, 0), 1).
    weight and bias (C,) are 1 and 0 when None.

    training=False: mean and var are running_mean and running_var (C,), which stay unchanged. training=True: mean and
    biased variance (divide by count) of the batch over all axes but C; then, in place, running_mean = (1 - momentum) *
    running_mean + momentum * mean, and running_var likewise with the unbiased variance (divide by count - 1; count >
    1). momentum is a float.

    Example: fused_hardsigmoid_batch_norm([[1, 2], [-5, 3]], [0, 1], [1, 4], [3, 3], [0, 0.5]) = [[0.999998, 0.833333],
    [0, 1]]

    fp32 throughout. Means far from zero must not spoil the variance (two passes or Welford). The result is always a new
    tensor: inplace concerns only the intermediate z, x is never changed. All tensors may have any strides; N may be 0
    unless training.
    """
    z = F.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)
    return F.hardsigmoid(z, inplace)
