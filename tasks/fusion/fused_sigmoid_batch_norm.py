"""fusion/fused_sigmoid_batch_norm."""

import torch
import torch.nn.functional as F
from kbx_env.tasks._varied import longs, moments, plain, sizes, statistics

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Constant, Cost, HalfNormal, Normal, Outlier, Paper, T, task

AFFINE = ("weight", "bias")
FRESH = {"running_mean": Constant(0), "running_var": Constant(1)}
TRAIN = {"training": True}


def _case(n, c, rest, args=None, **more):
    return Case({"N": n, "C": c, "*": rest}, args or {}, **more)


@task(
    difficulty=2,
    takes={
        "input": T("N C *"), "running_mean": T("C", draw=Normal()), "running_var": T("C", draw=HalfNormal(0.05)),
        "weight": T("C", draw=Normal(), optional=True), "bias": T("C", draw=Normal(), optional=True),
    },
    writes={"running_mean": "training", "running_var": "training"},
    truth=Close(ulps=16),
    cost=Cost(flops="10 * numel(input)", least="numel(input)"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="The in-place update of the running statistics is judged, and training mode and images are timed too.",
    cases=(
        _case(2, 3, (), draws=FRESH),
        _case(4, 3, (), {"training": True, "momentum": 0.2, "eps": 1e-3}, draws=FRESH),
        _case(64, 128, (), given=AFFINE),
        _case(64, 128, (), TRAIN, given=AFFINE, draw=Outlier(scale=20)),
        _case(300, 5, (), TRAIN | {"momentum": 0.7}),
        _case(4, 8, (16, 16), TRAIN, given=AFFINE),
        _case(4, 8, (16, 16), {"eps": 0.3}, given=("weight",)),
        _case(3, 7, (19,), TRAIN | {"eps": 0.1}, given=("bias",)),
        _case(5, 4, (30, 33), TRAIN, draw=Normal(mean=100)),
        _case(2, 3, (70, 80), TRAIN, given=AFFINE),
        _case(3, 6, (5, 9), TRAIN, layouts={"input": "channels_last"}),
        _case(3, 6, (5, 9), given=AFFINE, layouts={"input": "transposed"}),
        _case(50, 33, (), TRAIN, given=AFFINE, layouts={"input": "strided"}),
        _case(2, 4, (3, 5, 6), given=AFFINE, draw=Outlier(0.05)),
        _case(0, 4, (6,), given=AFFINE),
        # One channel.
        _case(9, 1, (7,), TRAIN),
        # More channels than run at a time.
        _case(8, 4001, (), TRAIN),
        _case(5, 11, (7, 13), TRAIN | {"momentum": 0.3}, given=AFFINE, held=True),
        _case(37, 45, (), {"eps": 1e-2}, given=AFFINE, held=True),
    ),
    varied=(
        sizes(lambda p: {"N": p.whole(2, 5), "C": p.whole(2, 6), "*": p.shape(2, 4, 60)},
              lambda p, s: {"training": p.chance(), "momentum": p.real(0, 1), "eps": p.real(0.001, 0.5)}),
        sizes(longs({"N": (2, 6), "C": (2, 6)}, {"N": 1100, "C": 530}, lambda p, s: {"*": p.among((), (3,))}),
              lambda p, s: {"training": p.chance(0.7)}, where=plain, full=True),
        # More than 2**19 elements: kernels take another path.
        sizes(lambda p: {"N": p.whole(62, 70), "C": p.whole(2, 3), "*": (p.whole(4300, 4500),)}, lambda p, s: {"training": True},
              where=plain, full=True),
        statistics(),
        moments(),
    ),
    timed=(
        *(_case(32, c, (), given=AFFINE) for c in (1 << 18, 1 << 20, 1 << 22)),
        _case(64, 256, (32, 32), given=AFFINE),
        _case(64, 256, (32, 32), TRAIN, given=AFFINE),
    ),
)  # fmt: skip
def fused_sigmoid_batch_norm(
    input, running_mean, running_var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5
):  # fmt: skip
    """sigmoid(batch_norm(input)) of (N, C) or (N, C, *) in fp32, with 1 / (1 + exp(-z)) as sigmoid(z).

    Example: fused_sigmoid_batch_norm([[1, 2], [3, -4]], [0, 1], [1, 4], bias=[0, 0.5]) = [[0.731057, 0.731058],
    [0.952574, 0.119203]]

    Per channel c: z = (x - mean[c]) / sqrt(var[c] + eps) * weight[c] + bias[c]; weight and bias (C,) are 1 and 0 when
    None. training=False: mean and var are running_mean and running_var (C,), which stay unchanged. training=True: mean
    and biased variance (divide by count) of the batch over all axes but C; then, in place, running_mean =
    (1 - momentum) * running_mean + momentum * mean, and running_var likewise with the unbiased variance (divide by
    count - 1; count > 1). momentum is a float.

    Means far from zero must not spoil the variance (two passes, Welford, or squares around a nearby number). The result
    is a new tensor shaped like input; the input may have any strides and is not changed; N may be 0 outside training.
    """
    return torch.sigmoid(F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps))
