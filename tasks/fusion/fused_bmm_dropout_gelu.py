"""fusion/fused_bmm_dropout_gelu."""

import torch
import torch.nn.functional as F
from kbx_env.tasks._seams import dropout
from kbx_env.tasks._varied import DEEP_SUM, LARGE, SHARE, half, large_bmm, longs, plain, sizes, vector_bmm

from kbx_env.spec.criteria import Close, Dropout
from kbx_env.spec.task import Case, Constant, Cost, Eye, Normal, Outlier, Paper, T, Uniform, task

SMALL = {"B": 2, "N": 3, "M": 4, "P": 5}
MIDDLE = {"B": 2, "N": 32, "M": 64, "P": 48}
HALF = {"input1": "f16", "input2": "f16"}


@task(
    difficulty=3,
    takes={"input1": T("B N M"), "input2": T("B M P")},
    truth=Dropout(rate="p", active="training", close=Close(ulps=16)),
    cost=Cost(
        flops="2 * B * N * M * P",
        reads={n: f"numel({n}) * max(1 - training, nonzero(1 - p))" for n in ("input1", "input2")},
        least="2 * B * N * M * P * (1 - training * p)",
    ),
    differs="Any random stream is right: each element must be the kept or the dropped value and the mask must look "
    "random; as published, torch's own CUDA stream was demanded bit for bit. Identity operands make the mask visible.",
    cases=(
        # One result.
        Case({"B": 1, "N": 1, "M": 3, "P": 1}, {"training": False}),
        Case(SMALL),
        Case(SMALL, {"p": 0.3, "training": False}),
        Case(SMALL, {"inplace": True}),
        Case(SMALL, {"approximate": "tanh"}),
        Case(MIDDLE, {"p": 0.1, "approximate": "tanh"}, dtypes=HALF),
        Case(MIDDLE, {"p": 0.1, "approximate": "tanh"}, dtypes=HALF, draw=Outlier()),
        Case(MIDDLE, {"p": 0.5}, draw=Uniform(0.5, 1.5)),
        Case({"B": 3, "N": 37, "M": 48, "P": 48}, {"p": 0.3}, draws={"input1": Uniform(0.5, 2), "input2": Eye()}),
        # Many rows: kernels walk the tiles in groups of rows, of which the last group is not full. Results of one product.
        Case({"B": 1, "N": 1100, "M": 1, "P": 130}, {"p": 0.0}),
        Case({"B": 2, "N": 8, "M": 8, "P": 8}, {"p": 1.0}),
        Case(MIDDLE, {"p": 0.25}, draw=Uniform(0.1, 1), out=True),
        Case(MIDDLE, {"training": False}, layouts={"input1": "transposed", "input2": "strided"}),
        Case(
            {"B": 1, "N": 2, "M": 1100, "P": 201},
            layouts={"input2": "transposed"},
            draw=Uniform(0.1, 1),
        ),
        Case({"B": 0, "N": 4, "M": 4, "P": 4}, {"training": False}),
        # Equal values: a mask made of them shows.
        Case({"B": 2, "N": 160, "M": 5, "P": 130}, draw=Constant(0.5)),
        Case({"B": 3, "N": 45, "M": 33, "P": 70}, {"p": 0.2}, draw=Uniform(0.2, 1), held=True),
    ),
    paper=Paper(),
    varied=(
        sizes(
            longs(
                {"B": (2, 4), "N": (2, 16), "M": (2, 30), "P": (2, 16)},
                {"B": 20, "N": 140, "M": 560, "P": 140},
                most=40_000_000,
            ),
            lambda p, s: {"training": False, "p": p.real(0, 1), "approximate": p.among("none", "tanh")},
            where=plain,
            out=True,
            draw=lambda p, s: Normal(scale=6) if s["M"] < 100 else Normal(scale=0.3),
        ),
        vector_bmm(
            "input2",
            lambda p, s: {"training": False, "p": p.real(0, 1), "approximate": p.among("none", "tanh")},
            where=plain,
            draw=Normal(scale=0.3),
        ),
        *large_bmm(
            lambda p, s: {"training": False, "approximate": p.among("none", "tanh")}, where=plain, draw=Normal(scale=0.3)
        ),
        *(
            sizes(lambda p: {n: p.whole(2, 9) for n in "BNMP"}, lambda p, s: {"training": False}, where=plain, draws=draws)
            for draws in ({"input1": LARGE, "input2": SHARE}, {"input1": SHARE, "input2": LARGE})
        ),
        sizes(
            lambda p: {"B": 2, "N": p.whole(2, 9), "M": DEEP_SUM, "P": p.whole(2, 9)},
            lambda p, s: {"training": False},
            where=half,
            draw=Normal(scale=0.12),
        ),
    ),
    timed=tuple(Case({"B": 32, "N": n, "M": n, "P": n}) for n in (256, 768, 1536)),
)
def fused_bmm_dropout_gelu(input1, input2, p=0.5, training=True, inplace=False, approximate="none", *, out=None):
    """gelu(dropout(input1 @ input2)) for a batch: (B, N, M) @ (B, M, P) -> (B, N, P), fp32 or fp16.

    Example: fused_bmm_dropout_gelu([[[1, 2]]], [[[1, 0], [0, -1]]], training=False) = [[[0.841345, -0.0455003]]]

    Dropout (only if training): each element of the product is independently zeroed with probability p and otherwise
    multiplied by 1 / (1 - p); p = 1 gives zeros. Any random stream will do; it must be fresh on every call,
    independent between elements, and the keep rate must be 1 - p. gelu as torch: approximate="none" is x / 2 * (1 + erf(x /
    sqrt 2)), "tanh" x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3))); gelu(0) = 0.

    fp32 products in IEEE fp32 (no TF32); fp16 inputs accumulate in fp32 and round once. inplace concerns only the
    intermediate: the inputs are never changed; they may have any strides, and B may be 0. out: None (the default: a new
    tensor), or a tensor of the result's shape and dtype with any strides and any contents, which is filled and
    returned.
    """
    y = F.gelu(dropout(torch.bmm(input1, input2), p, training), approximate=approximate)
    return y if out is None else out.copy_(y)
