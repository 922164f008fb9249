"""fusion/fused_add_mul_groupnorm."""

from functools import partial

import torch
import torch.nn.functional as F
from kbx_env.tasks._varied import LARGE_POSITIVE, SMALL_POSITIVE

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Cost, Normal, Outlier, Paper, T, Uniform, task

AFFINE = ("weight", "bias")
NONE = {"weight": None, "bias": None}


def _sizes(n, c, *spatial, other=None):
    shape = (n, c, *spatial)
    return {"N": n, "C": c, "*": spatial, "*b": shape if other is None else other}


def _any_groups(p):
    return _grouped(p, p.shape(2, 4, 40))


def _long_groups(p):
    return _grouped(p, p.among((4300,), (2, 2200)))


def _grouped(p, rest):
    g = p.among(1, 3, 6, 7, 9)
    n, c = p.whole(2, 4), g * p.whole(1, 3)
    shape = (n, c, *rest)
    return p.like({"N": n, "C": c, "*": rest, "*b": p.broadcast(shape, least=3)}, {"num_groups": g, "eps": p.real(0.001, 0.5)},
          draw=Normal(), full=True,
                  draws={"input2": Uniform(0.5, 3)}, out=True)  # fmt: skip


def _weighted(p, law):
    g = p.among(1, 3)
    shape = (2, 3 * p.whole(1, 3), p.whole(9, 20))
    return p.like({"N": 2, "C": shape[1], "*": shape[2:], "*b": shape}, {"num_groups": g}, draw=Normal(), full=True,
                  draws={"input2": Uniform(0.5, 3), "weight": law, "bias": law},
                  where=lambda c: not set(AFFINE) & set(c.args))  # fmt: skip


@task(
    difficulty=2,
    takes={"input1": T("N C *"), "input2": T("*b"), "weight": T("C"), "bias": T("C")},
    truth=Close(ulps=32),
    cost=Cost(flops="10 * numel(input1)", least="2 * numel(input1)"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="eps, out=, spatial and full broadcasting of input2 and sums far from zero are judged.",
    cases=(
        Case(_sizes(2, 4, 4, 4), {"num_groups": 2}),
        Case(_sizes(2, 4, 4, 4, other=(1, 4, 1, 1)), {"num_groups": 2}),
        Case(_sizes(2, 4, 4, 4), {"num_groups": 1} | NONE),
        # More than 2**19 elements, and rows longer than a block: kernels take another path.
        Case(_sizes(2, 30, 70, 131), {"num_groups": 2, "eps": 1e-5}),
        Case(_sizes(4, 16, 32, 32), {"num_groups": 4, "eps": 0.5}, draw=Outlier()),
        Case(_sizes(2, 6, 60, 130), {"num_groups": 2}, draw=Uniform(-1, 1)),
        Case(_sizes(3, 12, 37, 41), {"num_groups": 12, "bias": None}, draws={"input1": Normal(mean=50)}),
        Case(_sizes(3, 12, 9, 11), {"num_groups": 3, "weight": None}, draws={"input2": Normal(mean=30)}),
        Case(_sizes(3, 6, 5, 7, other=(5, 7)), {"num_groups": 3}),
        Case(_sizes(3, 6, 5, 7, other=(3, 1, 5, 1)), {"num_groups": 2}),
        Case(_sizes(3, 6, 5, 7, other=()), {"num_groups": 2}, draws={"input2": Uniform(0.5, 3)}),
        Case(_sizes(33, 24), {"num_groups": 4}),
        Case(_sizes(4, 6, 77), {"num_groups": 3, "eps": 1e-3}, out=True),
        Case(_sizes(2, 6, 12, 9), {"num_groups": 2}, layouts={"input1": "channels_last", "input2": "transposed"}),
        Case(_sizes(2, 6, 12, 9), {"num_groups": 3}, layouts={"input1": "transposed", "input2": "strided"}),
        Case(_sizes(0, 6, 4), {"num_groups": 3}),
        # One spatial axis, of length 2.
        Case(_sizes(3, 6, 2), {"num_groups": 2}),
        Case(_sizes(3, 10, 7, 23), {"num_groups": 5, "eps": 1e-2}, draw=Outlier(0.01, 30), held=True),
        Case(_sizes(5, 9, 3, 4, 7, other=(9, 1, 1, 1)), {"num_groups": 3}, held=True),
    ),
    varied=(_any_groups, _long_groups, partial(_weighted, law=LARGE_POSITIVE), partial(_weighted, law=SMALL_POSITIVE)),
    timed=tuple(Case(_sizes(16, 64, 128, w), {"num_groups": 8}) for w in (64, 256, 1024)),
)  # fmt: skip
def fused_add_mul_groupnorm(input1, input2, weight, bias, num_groups, eps=1e-5, *, out=None):
    """Group normalisation of z = (input1 + input2) * input2, with input1 of shape (N, C, *).

    input2 broadcasts (0-d too) to the shape of input1, which is the shape of the result. The C channels form num_groups
    groups of C / num_groups neighbours (num_groups divides C); for each sample and group, with mean and biased variance
    of z over the group's channels and all further axes: y = (z - mean) / sqrt(var + eps) * weight[c] + bias[c]. weight
    and bias, both (C,), are 1 and 0 where None.

    Example: fused_add_mul_groupnorm([[1, 2, 3, 4]], [[1, 1, 2, 0]], [1, 1, 2, 1], [0, 0, 0, 5], 2) = [[-0.99998,
    0.99998, 2, 4.000000]]

    fp32 throughout. A mean far from zero must not spoil the variance (two passes or a running mean, not the mean of
    squares). out: None (the default: a new tensor), or a contiguous tensor of the result's shape and dtype with any
    contents, which is filled and returned. Inputs may have any strides and are not changed. Groups of one element are
    not tested; N may be 0.
    """
    y = F.group_norm(torch.mul(torch.add(input1, input2), input2), num_groups, weight, bias, eps)
    return y if out is None else out.copy_(y)
