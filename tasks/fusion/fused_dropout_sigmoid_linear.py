"""fusion/fused_dropout_sigmoid_linear."""

import torch
import torch.nn.functional as F
from kbx_env.tasks._linear import FLOPS, TAKES, linear_cases, linear_timed
from kbx_env.tasks._seams import dropout
from kbx_env.tasks._varied import linear

from kbx_env.spec.criteria import Close, Dropout
from kbx_env.spec.task import Case, Constant, Cost, Normal, Paper, task


@task(
    difficulty=3,
    takes=TAKES,
    truth=Dropout(rate="p", active="training", close=Close(ulps=16)),
    cost=Cost(flops=FLOPS, least="2 * B * K * O * (1 - training * p)"),
    paper=Paper(),
    differs="Any random stream is right: each element must be the kept or the dropped value and the mask must look random; as "
    "published, torch's own CUDA stream was demanded bit for bit.",
    cases=(
        *linear_cases({"training": False}, {}, {"p": 0.1}, {"p": 0.8, "inplace": True}, {"p": 0.0}),
        # Equal values: a mask made of them shows, and so many elements tell chance from a regular pattern.
        Case({"B": 300, "K": 5, "O": 128}, draw=Constant(0.5)),
        # Two rows with dropout: the rows have masks of their own.
        Case({"B": 2, "K": 1030, "O": 201}, draw=Normal(scale=0.1)),
        Case({"B": 200, "K": 3, "O": 201}, {"p": 0.3}, draw=Constant(0.25), held=True),
    ),
    varied=linear(lambda p: {"p": p.real(0.05, 0.9)}),
    timed=linear_timed(),
)  # fmt: skip
def fused_dropout_sigmoid_linear(input, weight, bias=None, p=0.5, training=True, inplace=False):
    """dropout(sigmoid(input @ weight^T + bias), p).

    Example: fused_dropout_sigmoid_linear([[1, 2]], [[0.5, 0], [0, -1]], training=False) = [[0.622459, 0.119203]]

    input (B, K), weight (O, K), bias (O,) or None: z = input @ weight^T + bias. Products and sums in IEEE fp32: TF32 is
    too coarse and fails. sigmoid(z) = 1 / (1 + exp(-z)).

    Dropout, only if training: each element is independently zeroed with probability p (0 <= p < 1) and otherwise
    multiplied by 1 / (1 - p). Any random stream will do; it must be fresh on every call, independent between elements,
    and the keep rate must be 1 - p. inplace concerns only the intermediate result. A new tensor (B, O) is returned;
    inputs may have any strides, B may be 0.
    """
    return dropout(torch.sigmoid(F.linear(input, weight, bias)), p, training)
