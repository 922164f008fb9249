"""fusion/fused_add_gelu."""

import torch
import torch.nn.functional as F
from kbx_env.tasks._cases import stream
from kbx_env.tasks._varied import both_ways

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Choice, Cost, Literal, Normal, Outlier, Paper, T, task

SCALED = {"alpha": 0.5, "approximate": "tanh"}
HALF = {"input": "f16", "other": "f16"}


@task(
    difficulty=2,
    takes={"input": T("*a"), "other": T("*b")},
    truth=Close(ulps=8),
    cost=Cost(flops="10 * a", least="a"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="Broadcasting, out= and fp16 (which was timed only) are judged; as published out was ignored.",
    cases=(
        Case({"*a": (3,), "*b": (3,)}, draw=Literal(1, 2, 3)),
        Case({"*a": (129, 257), "*b": (129, 257)}),
        Case({"*a": (128, 512), "*b": (128, 512)}, SCALED, draw=Outlier()),
        Case({"*a": (128, 512), "*b": (128, 512)}, {"alpha": -2.25}, draw=Outlier()),
        Case({"*a": (64, 130)}, {"other": 0.5, "alpha": 3}),
        Case({"*a": (41,)}, {"other": -1.75, "approximate": "tanh"}),
        Case({"*a": (64, 130), "*b": (130,)}, {"alpha": 2}),
        Case({"*a": (7, 1, 33), "*b": (5, 1)}, SCALED),
        Case({"*a": (40, 51), "*b": (40, 51)}, SCALED, layouts={"input": "transposed"}),
        Case({"*a": (9, 34), "*b": (9, 34)}, layouts={"input": "strided", "other": "transposed"}),
        Case({"*a": (129, 257), "*b": (129, 257)}, dtypes=HALF),
        Case({"*a": (77, 130), "*b": (77, 130)}, {"alpha": 0.3, "approximate": "tanh"}, dtypes=HALF, draw=Outlier()),
        Case({"*a": (3, 50), "*b": (3, 50)}, draw=Choice(-30.0, -6.0, -0.0, 0.0, 1e-20, 5.5, 40.0)),
        Case({"*a": (6, 77), "*b": (77,)}, {"alpha": 1.5}, out=True),
        Case({"*a": (), "*b": ()}),
        Case({"*a": (0, 3), "*b": (3,)}),
        Case({"*a": (3, 5, 211), "*b": (5, 1)}, {"alpha": -0.7, "approximate": "tanh"}, held=True),
        Case({"*a": (5, 333), "*b": (5, 333)}, {"alpha": 1.2}, dtypes=HALF, held=True),
    ),
    varied=(
        both_ways(
            args=lambda p: {"alpha": p.among(p.whole(-3, 3), p.real(-2, 2)), "approximate": p.among("none", "tanh")},
            out=True,
            tensors=("other",),
        ),
        # alpha * other nearly cancels input: what is rounded to fp16 in between shows.
        both_ways(
            args=lambda p: {"alpha": 0.3, "approximate": p.among("none", "tanh")},
            out=True,
            tensors=("other",),
            low=2,
            dtypes={"input": "f16", "other": "f16"},
            draws={"input": Normal(mean=12), "other": Normal(mean=-40)},
        ),
    ),
    timed=stream("*a", "*b", powers=(24, 26, 28), dtypes=HALF),
)
def fused_add_gelu(input, other, alpha=1, approximate="none", out=None):
    """gelu(input + alpha * other), elementwise.

    approximate="none": gelu(z) = z / 2 * (1 + erf(z / sqrt 2)); "tanh": z / 2 * (1 + tanh(sqrt(2 / pi) * (z + 0.044715
    z^3))). other is a Python number, or a tensor of input's dtype that broadcasts with it (the result has the broadcast
    shape); alpha is an int or a float.

    Example: fused_add_gelu([1, -2], [0.5, 1], alpha=2) = [1.954500, 0]
    Example: fused_add_gelu([1, -2], 0.5, approximate="tanh") = [1.399572, -0.100429]

    fp32 or fp16; compute in fp32 and round once. The result has the inputs' dtype. out: None (the default: a new
    tensor), or a contiguous tensor of the result's shape and dtype with any contents, which is filled and returned. The
    inputs are not changed; they may have any strides, be 0-d or empty. Infinities and NaN are not tested.
    """
    y = F.gelu(torch.add(input, other, alpha=alpha), approximate=approximate)
    return y if out is None else out.copy_(y)
