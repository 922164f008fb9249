"""fusion/fused_embedding_add_tanh."""

import torch
import torch.nn.functional as F

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Choice, Cost, Ints, Literal, Normal, Outlier, Paper, T, Uniform, task
from kbx_env.spec.varied import layout


def _case(ids, table, other, args=None, **more):
    V, D = table
    return Case({"*i": ids, "V": V, "D": D, "*o": other}, args or {}, **more)


def _any_table(p):
    index = p.shape(4, 5, 20)
    s = {"V": p.whole(130, 140), "D": p.whole(1030, 1100)}
    args = {
        "max_norm": p.among(None, p.real(0.5, 8), p.real(0.5, 8)),
        "norm_type": p.among(1.0, 2.0, p.real(1, 4), p.real(1, 4)),
        "padding_idx": p.among(None, p.whole(0, s["V"] - 1), p.whole(0, s["V"] - 1)),
    }
    return p.like(s | {"*i": index, "*o": p.broadcast((*index, s["D"]), 4)}, args, draw=Normal(), out=True)


def _cancelled(p):
    """Large numbers whose sums are of order ten: tanh hides the size of larger ones."""
    s = {"V": p.whole(9, 20), "D": p.whole(9, 20), "*i": (p.whole(9, 20),), "*o": ()}
    return p.like(s | {"*o": (s["D"],)}, {"max_norm": None}, draws={"weight": Uniform(-30, -20), "other": Uniform(20, 30)})


@task(
    difficulty=3,
    takes={"input_indices": T("*i", "i64", Ints(0, "V")), "weight": T("V D"), "other": T("*o")},
    writes={"weight": "always"},
    truth=Close(ulps=8),
    cost=Cost(flops="8 * i * D", reads={"weight": "D * distinct(input_indices)"}, least="i * D"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="The rescaled table is judged too, with repeated indices; out is filled and returned.",
    cases=(
        _case((3,), (5, 3), (3, 3), draws={"input_indices": Literal(1, 2, 3)}),
        _case((3,), (5, 3), (3, 3), {"padding_idx": 0}, draws={"input_indices": Literal(0, 1, 2)}),
        _case((3,), (5, 3), (3, 3), {"max_norm": 1.0}, draws={"input_indices": Literal(1, 2, 3)}),
        _case((4, 16), (128, 64), (4, 16, 64), {"padding_idx": 0}),
        _case((4, 16), (128, 64), (64,), {"padding_idx": -1}, draw=Outlier()),
        _case((40, 30), (20, 33), (30, 1), draw=Normal(scale=0.3)),
        _case((4, 16), (128, 64), (16, 64), {"max_norm": 7.5}),
        _case((50,), (9, 130), (50, 130), {"max_norm": 2.0, "norm_type": 1.0}),
        _case((7, 11), (30, 17), (1, 1), {"max_norm": 3.0, "norm_type": 3.0}, draw=Outlier()),
        _case((300,), (4, 2), (300, 2), {"max_norm": 0.5}),
        # Norms so small that the 1e-7 beside them counts.
        _case((9,), (20, 3), (9, 3), {"max_norm": 5e-7}, draws={"weight": Uniform(1e-6, 4e-6)}),
        _case((5,), (6, 5000), (5, 5000), {"max_norm": 60.0}),
        _case((), (10, 70), (70,), {"max_norm": 4.0, "padding_idx": 2}),
        _case((6, 5), (40, 31), (6, 5, 31), {"max_norm": 5.0, "scale_grad_by_freq": True, "sparse": True},
              layouts={"input_indices": "transposed", "weight": "transposed", "other": "strided"}),
        _case((0,), (10, 4), (4,), {"max_norm": 1.0}),
        # A gap of one element behind each line of another order of axes.
        _case((2, 3), (5, 4), (2, 3, 4), layouts={"other": layout((2, 0, 1), (1, 1, 1), pad=1)}),
        _case((9,), (50, 21), (9, 21), out=True),
        # Norms equal to the limit, which do not exceed it.
        _case((9,), (20, 1), (9, 1), {"max_norm": 2.0**-20}, draws={"weight": Choice(2.0**-20, -(2.0**-20), 2.0**-19, 2.0**-22)}),
        _case((3, 70), (200, 37), (3, 1, 37), {"max_norm": 6.0, "norm_type": 2.5}, held=True),
    ),
    varied=(_any_table, _cancelled),
    timed=tuple(_case((m, n), (1024, d), (m, n, d)) for m, n, d in ((256, 256, 256), (256, 512, 512), (512, 512, 512))),
)  # fmt: skip
def fused_embedding_add_tanh(
    input_indices, weight, other, *, padding_idx=None, max_norm=None, norm_type=2.0, scale_grad_by_freq=False,
    sparse=False, out=None,
):  # fmt: skip
    """tanh(weight[input_indices] + other), an fp32 embedding lookup with a sum and a tanh.

    Example: fused_embedding_add_tanh([2, 0], [[1, 2], [3, 4], [0.5, 0]], [[0, 1], [-1, -2]]) = [[0.462117, 0.761594],
    [0, 0]]
    Example: fused_embedding_add_tanh([0], [[3, 4]], [[0, 0]], max_norm=1.0) = [[0.53705, 0.664037]]

    input_indices is an int64 tensor of any shape (0-d or empty too) with values in [0, V), repetitions allowed; weight
    (V, D); other broadcasts to input_indices.shape + (D,), the shape of the result, and does not enlarge it.

    max_norm is None (the default: no rescaling) or a number > 0. With a number, the rows that input_indices names are
    first rescaled in weight itself, each row once, however often it is named: a row whose norm (sum of
    |w|^norm_type)^(1 / norm_type) exceeds max_norm is multiplied by max_norm / (norm + 1e-7). The lookup then sees the
    rescaled table; all other rows stay as they are, and without max_norm all of weight. norm_type is a number in [1,
    4]. padding_idx (None or an int), scale_grad_by_freq and sparse concern gradients and change nothing here: the row
    padding_idx is looked up and rescaled like any other.

    The result is fp32. out: None (the default: a new tensor), or a tensor of the result's shape and dtype with any
    strides and any contents, which is filled and returned. Inputs may have any strides; weight is rescaled where it
    lies. Compute in fp32.
    """
    y = torch.tanh(F.embedding(input_indices, weight, padding_idx, max_norm, norm_type) + other)
    return y if out is None else out.copy_(y)
