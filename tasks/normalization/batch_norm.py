"""normalization/batch_norm."""

import torch.nn.functional as F
from kbx_env.tasks._varied import longs, moments, plain, sizes, statistics

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Constant, Cost, HalfNormal, Normal, Outlier, Paper, T, task

SMALL = {"N": 2, "C": 3, "*": (4, 4)}
MIDDLE = {"N": 4, "C": 8, "*": (16, 16)}
FRESH = {"running_mean": Constant(0), "running_var": Constant(1)}
AFFINE = ("weight", "bias")


@task(
    difficulty=4,
    takes={
        "input": T("N C *"), "running_mean": T("C", draw=Normal()), "running_var": T("C", draw=HalfNormal()),
        "weight": T("C", draw=Normal(), optional=True), "bias": T("C", draw=Normal(), optional=True),
    },
    writes={"running_mean": "training", "running_var": "training"},
    truth=Close(ulps=16),
    cost=Cost(flops="4 * numel(input)", least="2 * numel(input)"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="The in-place update of the running statistics is judged; as published a kernel that skipped it passed.",
    cases=(
        Case(SMALL, draws=FRESH),
        Case(SMALL, {"training": True}, draws=FRESH),
        Case(SMALL, given=AFFINE),
        Case(SMALL, {"momentum": 0.2, "eps": 1e-3}),
        Case(MIDDLE, {"training": True}, given=AFFINE),
        Case(MIDDLE, {"training": True, "momentum": 0.3, "eps": 1e-2}, given=AFFINE, draw=Outlier(scale=20)),
        Case({"N": 33, "C": 5, "*": ()}, {"training": True}),
        Case({"N": 3, "C": 7, "*": (19,)}, {"training": True}, given=("weight",)),
        Case(MIDDLE, {"training": True}, draw=Normal(mean=100), given=("bias",)),
        Case({"N": 3, "C": 6, "*": (5, 9)}, {"training": True}, layouts={"input": "channels_last"}),
        Case({"N": 3, "C": 6, "*": (5, 9)}, layouts={"input": "transposed"}, given=AFFINE),
        Case(MIDDLE, given=AFFINE, dtypes={"input": "f16"}),
        Case({"N": 6, "C": 5, "*": (9, 7)}, {"training": True}, given=AFFINE, dtypes={"input": "f16"}),
        Case({"N": 5, "C": 11, "*": (7, 13)}, {"training": True}, given=AFFINE, held=True),
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
    timed=tuple(
        Case({"N": 32, "C": 32, "*": (h, 128)}, given=AFFINE, dtypes={"input": "f16"}) for h in (640, 1024, 1536)
    ),
)  # fmt: skip
def batch_norm(input, running_mean, running_var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5):
    """Batch normalisation of (N, C, *), per channel c: y = (x - mean[c]) / sqrt(var[c] + eps) * weight[c] + bias[c].

    Example: batch_norm([[1, 2], [3, 4]], [1, 0], [4, 1], bias=[0, 1]) = [[0, 3], [1, 5]]

    weight and bias (C,) are 1 and 0 when None. training=False: mean and var are running_mean and running_var, which
    stay unchanged. training=True: mean and biased variance (divide by count) of the batch over all axes but C; then, in
    place, running_mean = (1 - momentum) * running_mean + momentum * mean, and running_var likewise with the unbiased
    variance (divide by count - 1; count > 1). momentum is a float.

    input fp32, or fp16 with fp32 statistics and parameters: compute in fp32, result in the input's dtype. Means far
    from zero must not spoil the variance (two passes or Welford). The result is a new tensor; all tensors may have any
    strides.
    """
    return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
