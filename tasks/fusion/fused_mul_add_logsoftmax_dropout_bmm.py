"""fusion/fused_mul_add_logsoftmax_dropout_bmm."""

import torch
import torch.nn.functional as F
from kbx_env.tasks._seams import dropout
from kbx_env.tasks._varied import LARGE, SHARE, SMALL_BIAS, adjacent, few_rows, large_factor, longs, sized

from kbx_env.spec.criteria import Close, Dropout
from kbx_env.spec.task import Case, Constant, Cost, Normal, Orthogonal, Outlier, Paper, T, task

SEEN = {"mat2": Orthogonal()}
"""The judge divides by it, to see which elements were dropped; a matrix that is no secret would not have to be looked at."""


def _case(b, n, m, p, args=None, *, lead=None, **more):
    return Case({"B": b, "N": n, "M": m, "P": p, "*o": (b, n, m) if lead is None else lead}, args or {}, **more)


def _evaluated(p, s, dim=None, **more):
    # Declared sums are small enough for exp. The log_softmax of a single number is 0.
    dim = dim or (p.axis(3) if s["B"] > 1 else p.among(1, 2, -1, -2))
    return p.like(s | {"*o": p.broadcast((s["B"], s["N"], s["M"]), 3)}, {"training": False, "p": p.real(0, 1), "dim": dim},
                  **({"draw": Normal(), "draws": {"other": Normal(scale=200)}, "out": True} | more))  # fmt: skip


def _short_columns(p):
    # Of a large matrix: kernels hold them in one block.
    return _evaluated(p, {"B": 2, "N": p.whole(60, 64), "M": p.whole(1100, 1150), "P": p.whole(2, 12)}, p.among(1, -2))


def _scaled(p, s, draws):
    return p.like(s | {"*o": (s["B"], s["N"], s["M"])}, {"training": False, "dim": p.axis(3)}, draw=Normal(), draws=draws)


def _large_right_factor(p):
    return _evaluated(p, {"B": 1} | large_factor(p, "N", "M", "P"))


def _vector(p, batch=1):
    return _evaluated(p, {"B": batch} | few_rows(p, "N", "M", "P"), layouts=adjacent(p, 1, "mat2", rank=3))


@task(
    difficulty=3,
    takes={"input1": T("B N M"), "input2": T("B N M"), "other": T("*o"), "mat2": T("B M P")},
    truth=Dropout(rate="p", active="training", close=Close(ulps=32), behind="mat2"),
    cost=Cost(flops="2 * B * N * M * P"),
    paper=Paper(),
    differs="Any random stream is right. The product follows the dropout, so that its mask shows only where mat2 can be "
    "divided by: there it must look random, and the whole result must be what it makes; every other mat2 comes with "
    "training=False or p=0. As published, torch's own CUDA stream was demanded bit for bit.",
    cases=(
        # One result.
        _case(1, 1, 3, 1, {"training": False}, lead=()),
        _case(2, 3, 4, 5, {"training": False}),
        _case(2, 3, 4, 4, {"p": 0.2}, draws=SEEN),
        _case(2, 132, 64, 48, {"training": False, "dim": 1}),
        _case(2, 40, 64, 64, {"p": 0.3}, draws=SEEN, draw=Outlier()),
        # Many rows: kernels walk the tiles in groups of rows, of which the last one is not full. Results of one product.
        _case(1, 270, 1, 520, {"training": False, "dim": 1}),
        _case(3, 37, 48, 48, draws=SEEN),
        _case(3, 20, 33, 33, {"dim": 0, "inplace": True}, draws=SEEN),
        _case(2, 33, 130, 41, {"training": False, "inplace": True}, draw=Outlier(), lead=(33, 1)),
        _case(1, 17, 19, 70, {"p": 0.0, "dim": -2}, out=True),
        _case(2, 40, 33, 33, {"p": 0.25, "dim": 2}, draws=SEEN, out=True),
        _case(
            2, 9, 30, 41, {"training": False}, layouts={"input1": "transposed", "mat2": "strided", "other": "strided"},
            draws={"other": Normal(scale=200)},  # beyond the range of exp
        ),
        _case(2, 8, 16, 16, {"training": False}, layouts={"input2": "transposed", "mat2": "transposed"}, lead=()),
        _case(0, 4, 4, 4, {"training": False, "dim": 0}),
        _case(0, 4, 4, 4, {"training": False}),
        # Equal values: a mask made of them shows.
        _case(4, 160, 64, 64, draws=SEEN, draw=Constant(0.5)),
        _case(3, 45, 52, 52, {"p": 0.4}, draws=SEEN, held=True),
        _case(2, 21, 70, 33, {"training": False}, held=True),
    ),
    varied=(
        sized(
            _evaluated,
            longs({"B": (2, 4), "N": (2, 12), "M": (2, 20), "P": (2, 12)}, {"N": 140, "M": 560, "P": 140}, most=3_000_000),
        ),
        _vector,
        lambda p: _vector(p, 2),
        _large_right_factor,
        _short_columns,
        *(
            sized(lambda p, s, draws=draws: _scaled(p, s, draws), (lambda p: {n: p.whole(2, 9) for n in "BNMP"},))
            for draws in ({"input1": LARGE, "input2": SHARE, "mat2": LARGE},
                          {"input1": SHARE, "input2": LARGE, "other": SMALL_BIAS})
        ),
    ),
    timed=tuple(_case(32, n, n, n, {"training": False}) for n in (256, 768, 1536)),
)
def fused_mul_add_logsoftmax_dropout_bmm(
    input1, input2, other, mat2, p=0.5, training=True, inplace=False, dim=-1, *, out=None
):
    """dropout(log_softmax(input1 * input2 + other, dim), p) @ mat2 for a batch of fp32 matrices.

    Example: fused_mul_add_logsoftmax_dropout_bmm([[[1, 2]]], [[[1, 0]]], [[[0, 3]]], [[[1], [10]]], training=False) =
        [[[-3.39621]]]

    input1 and input2 (B, N, M), other broadcasts (0-d too) to (B, N, M), mat2 (B, M, P). z = input1 * input2 + other;
    log_softmax is z - log(sum of exp(z) along dim) without overflow, dim any axis of z (it may be negative). Dropout,
    only if training: each element is independently zeroed with probability p (0 <= p < 1) and otherwise multiplied by 1
    / (1 - p). Any random stream will do; it must be fresh on every call, independent between elements, and the keep
    rate must be 1 - p. inplace concerns only the intermediate result. Then the product with mat2. Products and sums in
    IEEE fp32: TF32 is too coarse and fails. out: None (the default: a new tensor), or a tensor of the result's shape
    and dtype with any strides and any contents, which is filled and returned. Inputs may have any strides; B may be 0.
    """
    y = torch.bmm(dropout(F.log_softmax(input1 * input2 + other, dim=dim), p, training), mat2)
    return y if out is None else out.copy_(y)
