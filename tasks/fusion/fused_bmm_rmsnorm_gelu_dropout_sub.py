"""fusion/fused_bmm_rmsnorm_gelu_dropout_sub."""

import torch
import torch.nn.functional as F
from kbx_env.tasks._seams import dropout
from kbx_env.tasks._varied import LARGE, bmm_rms_norm

from kbx_env.spec.criteria import Close, Dropout
from kbx_env.spec.task import Case, Constant, Cost, Eye, Normal, Outlier, Paper, T, Uniform, task


def _case(b, n, m, p, args=None, shape=None, **more):
    args = {"normalized_shape": p if shape is None else shape} | (args or {})
    return Case({"B": b, "N": n, "M": m, "P": p}, args, **more)


@task(
    difficulty=4,
    takes={"input1": T("B N M"), "input2": T("B M P"), "other": T("B N P")},
    truth=Dropout(rate="dropout_p", active="training", close=Close(ulps=32)),
    cost=Cost(flops="2 * B * N * M * P"),
    paper=Paper(),
    differs="Any random stream is right: each element must be the kept or the dropped value and the mask must look random; as "
    "published, torch's own CUDA stream was demanded bit for bit. eps and out= are exercised. other is subtracted, as "
    "documented; as published the reference forgot it.",
    cases=(
        # One result.
        _case(1, 1, 3, 1, {"eps": 1.0, "training": False}),
        _case(2, 3, 4, 5, {"training": False}),
        _case(2, 3, 4, 5, {"dropout_p": 0.2}),
        _case(2, 32, 64, 48, {"training": False, "approximate": "tanh"}, (48,)),
        _case(2, 32, 64, 48, {"dropout_p": 0.3, "approximate": "tanh"}, draw=Outlier()),
        _case(3, 37, 48, 48, {"dropout_p": 0.5}, draws={"input1": Uniform(0.5, 2), "input2": Eye()}),
        # Many rows: kernels walk the tiles in groups of rows, of which the last group is not full.
        _case(1, 1100, 3, 130, {"dropout_p": 0.0, "eps": 0.1}, [130]),
        _case(2, 40, 33, 70, {"dropout_p": 0.25}, out=True),
        _case(2, 9, 30, 41, {"training": False}, layouts={"input1": "transposed", "input2": "strided"}, out=True),
        _case(2, 8, 16, 16, {"eps": 10.0, "training": False}, draw=Normal(scale=0.1)),
        _case(0, 4, 4, 4, {"training": False}),
        # Equal values: a mask made of them shows.
        _case(2, 160, 5, 130, {"dropout_p": 0.5}, draw=Constant(0.5)),
        _case(3, 45, 33, 90, {"dropout_p": 0.4}, held=True),
    ),
    varied=bmm_rms_norm(other=LARGE),
    timed=tuple(_case(32, n, n, n) for n in (256, 768, 1536)),
)
def fused_bmm_rmsnorm_gelu_dropout_sub(
    input1, input2, other, normalized_shape, dropout_p=0.5, training=True, approximate="none", eps=1e-5, *, out=None
):
    """dropout(gelu(rms_norm(input1 @ input2)), dropout_p) - other for a batch of fp32 matrices.

    Example: fused_bmm_rmsnorm_gelu_dropout_sub([[[1, 2]]], [[[1, 0], [1, -1]]], [[[1, 1]]], 2, training=False) =
        [[[0.035894, -1.16975]]]

    input1 (B, N, M), input2 (B, M, P), other (B, N, P); z = input1 @ input2 for every matrix of the batch.
    normalized_shape is P, (P,) or [P]. rms_norm over the last axis: z / sqrt(mean(z^2) + eps), no gain. gelu as torch:
    approximate="none" is x / 2 * (1 + erf(x / sqrt 2)), "tanh" x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3))).
    Dropout, only if training: each element is independently zeroed with probability dropout_p (0 <= dropout_p < 1) and
    otherwise multiplied by 1 / (1 - dropout_p). Any random stream will do; it must be fresh on every call, independent
    between elements, and the keep rate must be 1 - dropout_p. other is subtracted after the dropout.

    Products and sums in IEEE fp32: TF32 is too coarse and fails. out: None (the default: a new tensor), or a tensor of
    the result's shape and dtype with any strides and any contents, which is filled and returned. Inputs may have any
    strides; B may be 0.
    """
    z = torch.bmm(input1, input2)
    z = z / torch.sqrt(z.square().mean(-1, keepdim=True) + eps)
    y = dropout(F.gelu(z, approximate=approximate), dropout_p, training) - other
    return y if out is None else out.copy_(y)
