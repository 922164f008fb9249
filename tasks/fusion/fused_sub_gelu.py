"""fusion/fused_sub_gelu."""

import torch.nn.functional as F
from kbx_env.tasks._cases import broadcast
from kbx_env.tasks._varied import GAPS, both_ways

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Choice, Cost, Linspace, Literal, Outlier, Paper, T, task

KINDS = (
    {}, {"alpha": 0.5, "approximate": "tanh"}, {"alpha": -2}, {"alpha": 1.5, "approximate": "none"},
    {"approximate": "tanh"},
)  # fmt: skip
EDGES = Choice(-1e4, -11.0, -1.0, -1e-30, 0.0, 1e-30, 1.0, 11.0, 1e4)


def _one(shape, args, **more):
    return Case({"*a": shape, "*b": ()}, args, **more)


@task(
    difficulty=3,
    takes={"input": T("*a"), "other": T("*b")},
    truth=Close(ulps=8),
    cost=Cost(flops="12 * max(numel(input), numel(other))", least="max(numel(input), numel(other))"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="GELU is what its name says, as the text always did; the published reference lacked the x / 2 of "
    "approximate='none'. Timed on numbers of both signs.",
    cases=(
        *broadcast("input", "other", args=KINDS, out=True, special=EDGES),
        Case({"*a": (3,), "*b": (3,)}, draw=Literal(1, 2, 3, 0.5, 1.0, 1.5)),
        Case({"*a": (128, 300), "*b": (128, 300)}, KINDS[1], draw=Outlier()),
        _one((1025,), {"other": 0.5}, draw=Linspace(-12, 12)),
        _one((65, 33), {"other": -2, "alpha": 0.25, "approximate": "tanh"}),
        _one((6, 50), {"other": 1.5, "alpha": -1}, out=True, layouts={"input": GAPS, "out": GAPS}),
        # Several blocks along both axes.
        Case({"*a": (7, 2100), "*b": (2100,)}),
        _one((5, 7, 31), {"other": 0.75, "alpha": 3}, held=True),
    ),
    varied=(
        both_ways(args=lambda p: {"alpha": p.among(p.whole(-3, 3), p.real(-2, 2), p.real(-2, 2)),
                                   "approximate": p.among("none", "tanh")},
                  out=True, tensors=("other",)),
    ),
    timed=tuple(Case({"*a": (1 << k,), "*b": (1 << k,)}, a) for k, a in ((22, {}), (25, {}), (27, {}), (25, KINDS[1]))),
)  # fmt: skip
def fused_sub_gelu(input, other, alpha=1, approximate="none", out=None):
    """gelu(input - alpha * other), elementwise, in fp32.

    Example: fused_sub_gelu([1, 2, 3], [0.5, 1, 4]) = [0.345731, 0.841345, -0.158655]
    Example: fused_sub_gelu([1, 2, 3], [0.5, 1, 4], alpha=0.5, approximate="tanh") = [0.579961, 1.399573, 0.841192]

    gelu(x) for approximate="none": x / 2 * (1 + erf(x / sqrt(2))), with the summand x / 2; for "tanh":
    x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3))).

    input is an fp32 tensor; other is an fp32 tensor, and the two broadcast against each other as torch broadcasts, or a
    number. alpha is a number of either sign. The result is an fp32 tensor of the common shape. out: None (the default:
    a new tensor), or a tensor of the result's shape and dtype with any strides and any contents, which is filled and
    returned. Inputs may have any strides, be 0-d or empty, and are not changed. |x| up to 1e4 must not overflow;
    infinities and NaN are not tested. Errors are judged against the size of the results as a whole.
    """
    y = F.gelu(input - alpha * other, approximate=approximate)
    return y if out is None else out.copy_(y)
