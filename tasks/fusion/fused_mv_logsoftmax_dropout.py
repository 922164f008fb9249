"""fusion/fused_mv_logsoftmax_dropout."""

import torch
import torch.nn.functional as F
from kbx_env.tasks._seams import dropout
from kbx_env.tasks._varied import DEEP_SUM, LARGE, SHARE, half, longs, plain, sizes

from kbx_env.spec.criteria import Close, Dropout
from kbx_env.spec.task import Case, Constant, Cost, Normal, Outlier, Paper, T, task

HALF = {"input": "f16", "vec": "f16"}


def _case(n, m, args=None, **more):
    draws = {"input": Normal(scale=m**-0.25), "vec": Normal(scale=m**-0.25)}
    return Case({"N": n, "M": m}, args or {}, **({"draws": draws} | more))


@task(
    difficulty=2,
    takes={"input": T("N M"), "vec": T("M")},
    truth=Dropout(rate="p", active="training", close=Close(ulps=16)),
    cost=Cost(flops="2 * N * M"),
    paper=Paper(),
    differs="Any random stream is right: each element must be the kept or the dropped value and the mask must look random; as "
    "published, torch's own CUDA stream was demanded bit for bit. dim and out= are exercised; fp16, which the published "
    "timings use, is tested as well.",
    cases=(
        _case(3, 4, {"training": False}),
        _case(3, 4, {"p": 0.2}),
        _case(500, 60, {"p": 0.3}),
        _case(700, 130, draw=Outlier(scale=3)),
        _case(400, 33, {"p": 0.1, "dim": -1}, out=True),
        _case(129, 1030, {"training": False, "inplace": True}),
        _case(300, 64, {"inplace": True}, layouts={"input": "transposed", "vec": "strided"}),
        _case(5000, 7, {"p": 0.6}, layouts={"input": "strided"}),
        _case(200, 90, {"training": False}, dtypes=HALF),
        _case(600, 90, dtypes=HALF),
        _case(1, 5, {"p": 0.0}),
        # Equal values: a mask made of them shows.
        _case(40000, 3, draws={}, draw=Constant(0.5)),
        _case(811, 77, {"p": 0.25}, held=True),
    ),
    varied=(
        sizes(longs({"N": (20, 60), "M": (2, 40)}, {"N": 1100, "M": 1100}),
              lambda p, s: {"dim": p.axis(1), "training": False, "p": p.real(0, 1)}, where=plain, out=True),
        sizes(lambda p: {"N": p.whole(2, 20), "M": DEEP_SUM + p.whole(0, 200)}, lambda p, s: {"dim": 0, "training": False},
              where=half, draw=Normal(), out=True),
        # Beyond the range of exp.
        sizes(lambda p: {"N": p.whole(30, 60), "M": p.whole(2, 9)}, lambda p, s: {"dim": 0, "training": False}, where=plain,
              draws={"input": Normal(scale=9), "vec": Normal(scale=9)}, out=True),
        *(
            sizes(lambda p: {"N": p.whole(9, 20), "M": p.whole(5, 9)}, lambda p, s: {"dim": 0, "training": False},
                  where=plain, draws=draws)
            for draws in ({"input": LARGE, "vec": SHARE}, {"input": SHARE, "vec": LARGE})
        ),
    ),
    timed=(_case(4096, 4096), _case(8192, 16384), _case(16384, 16384, dtypes=HALF)),
)  # fmt: skip
def fused_mv_logsoftmax_dropout(input, vec, p=0.5, training=True, inplace=False, dim=0, *, out=None):
    """dropout(log_softmax(input @ vec, dim), p), fp32 or fp16.

    Example: fused_mv_logsoftmax_dropout([[1, 2], [0, 1]], [1, 0], training=False) = [-0.313262, -1.313262]

    input (N, M), vec (M,), N > 0; z = input @ vec has one axis, so that dim is 0 or -1. log_softmax: z - log(sum of exp(z)),
    without overflow. fp16 (both): compute in fp32, round once at the end. Dropout, only if training: each element is
    independently zeroed with probability p (0 <= p < 1) and otherwise multiplied by 1 / (1 - p). Any random stream will
    do; it must be fresh on every call, independent between elements, and the keep rate must be 1 - p. inplace concerns
    only the intermediate result. out: None (the default: a new tensor), or a tensor of the result's shape and dtype
    with any strides and any contents, which is filled and returned. Inputs may have any strides.
    """
    y = dropout(F.log_softmax(torch.mv(input, vec), dim=dim), p, training)
    return y if out is None else out.copy_(y)
