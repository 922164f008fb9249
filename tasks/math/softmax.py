"""math/softmax."""

import torch.nn.functional as F
from kbx_env.tasks._varied import long_axis, reduced

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Choice, Cost, DtypeArg, Literal, Normal, Outlier, Paper, T, task


@task(
    difficulty=4,
    takes={"input": T("*")},
    truth=Close(scale="element", ulps=64),
    cost=Cost(flops="5 * numel(input)", least="numel(input)"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="Small probabilities are judged relative to themselves; as published, an absolute 1e-5 hid them.",
    cases=(
        Case({"*": (2, 3)}, {"dim": 1}, draw=Literal(1, 2, 3)),
        Case({"*": (2, 3)}, {"dim": 0}, draw=Literal(1, 2, 3, 1, 2, 3.5)),
        Case({"*": (2, 3)}, {"dim": 1, "dtype": DtypeArg("f64")}),
        Case({"*": (100, 100)}, {"dim": 1}),
        Case({"*": (64, 128)}, {"dim": 0}, draw=Outlier()),
        Case({"*": (64, 128)}, {"dim": -1}, draw=Outlier()),
        Case({"*": (5, 37, 6)}, {"dim": 1}),
        Case({"*": (3, 2053)}, {"dim": -1}, draw=Normal(mean=3e4, scale=10)),
        Case({"*": (31, 17)}, {"dim": 0}, layouts={"input": "transposed"}),
        Case({"*": (8, 40)}, {"dim": 1}, draw=Choice(float("-inf"), -3.0, 0.0, 2.5, 80.0)),
        Case({"*": (16, 65)}, {"dim": 1, "dtype": DtypeArg("f32")}, dtypes={"input": "f16"}),
        Case({"*": (9, 130)}, {"dim": 0}, dtypes={"input": "f16"}),
        Case({"*": (2, 10007)}, {"dim": 1}, draw=Outlier(scale=60)),
        Case({"*": (12, 33)}, {"dim": 1}, draw=Normal(scale=200)),
        Case({"*": (7,)}, {"dim": 0}),
        Case({"*": (0, 4)}, {"dim": 0}),
        Case({"*": (2, 2100, 3)}, {"dim": 1}),
        Case({"*": (4, 3, 2, 515)}, {"dim": -1}, held=True),
        Case({"*": (29, 6, 7)}, {"dim": -3}, held=True),
    ),
    varied=(
        reduced(
            lambda p: {"dtype": p.among(None, DtypeArg("f32"), DtypeArg("f64"))},
            where=lambda c: "f16" not in c.dtypes.values(),
        ),
        long_axis(),
        reduced(
            lambda p: {"dtype": p.among(None, DtypeArg("f32"), DtypeArg("f64"))},
            dtypes={"input": "f16"},
            draw=Normal(scale=3),
        ),
    ),
    timed=tuple(Case({"*": (16384, n)}, {"dim": 1}) for n in (512, 2048, 8192)),
)
def softmax(input, dim, dtype=None):
    """Softmax along one axis: y = exp(x - max(x)) / sum(exp(x - max(x))), for an fp32 or fp16 tensor of any rank >= 1.

    Example: softmax([[0, 1]], 1) = [[0.268941, 0.731059]]

    dim may be negative. dtype is None (the default: the result has the input's dtype), torch.float32 or torch.float64:
    the input is converted to it first, and the result has it. float64 is computed in float64, all else in float32,
    rounded once. Entries of -inf give 0; a slice of nothing but -inf, +inf and NaN are not tested. Large logits must
    not overflow. Each probability is judged relative to its own size; the accuracy of tl.exp is enough. The result is a
    new tensor; the input may have any strides or be empty.
    """
    return F.softmax(input, dim, dtype=dtype)
