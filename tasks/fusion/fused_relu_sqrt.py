"""fusion/fused_relu_sqrt."""

import torch
from kbx_env.tasks._cases import pointwise, stream
from kbx_env.tasks._varied import ENDS, GAPS, elementwise, plain

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Choice, Cost, Ints, Literal, Normal, Paper, T, task

HERE = {"inplace": True}
LONG = {"input": "i64"}


@task(
    difficulty=2,
    takes={"input": T("*")},
    writes={"input": "inplace"},
    truth=Close(),
    cost=Cost(flops="2 * n", least="n"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="Timed on numbers of both signs; as published the negative branch was never taken.",
    cases=(
        *pointwise("input", Normal(scale=3), special=Choice(0.0, -0.0, 1e-38, 4.0, -4.0, 3e38, -3e38), out=True),
        Case({"*": (4,)}, HERE, draw=Literal(-1, 0, 4, 9)),
        Case({"*": (65, 130)}, HERE),
        Case({"*": (4, 9)}, HERE, layouts={"input": GAPS}),
        Case({"*": (5, 1030)}, HERE, layouts={"input": "transposed"}),
        Case({"*": (6, 21)}, HERE, layouts={"input": "strided"}),
        Case({"*": (4,)}, draw=Literal(-1, 0, 4, 9), dtypes=LONG),
        Case({"*": (120, 130)}, draw=Ints(-10, 10), dtypes=LONG),
        Case({"*": (7, 65)}, draw=Ints(-(2**40), 2**40), dtypes=LONG, out=True),
        Case({"*": (3, 211)}, HERE, held=True),
    ),
    varied=(
        elementwise(),
        # Many axes, none of them of length 1.
        lambda p: p.like({"*": tuple(p.whole(2, 3) for _ in range(6))}, {"inplace": False}, where=plain, out=True),
        elementwise(lambda p: {"inplace": False}, out=True, low=2, dtypes={"input": "i64"}, draw=ENDS),
    ),
    timed=stream(),
)  # fmt: skip
def fused_relu_sqrt(input, inplace=False, out=None):
    """sqrt(max(input, 0)) of every element of input, an fp32 or int64 tensor of any shape.

    Example: fused_relu_sqrt([-1, 0, 4, 9, 2]) = [0, 0, 2, 3, 1.414214]

    int64 elements are converted to fp32; the result is always fp32 and has the shape of input. inplace=True, for fp32:
    the results overwrite input, and input itself is returned. Otherwise input is not changed. out: None (the default: a
    new tensor), or a tensor of the result's shape and dtype with any strides and any contents, which is filled and
    returned. out never comes together with inplace=True. The input may be non-contiguous (also with inplace), 0-d or
    empty. Infinities and NaN are not tested.
    """
    y = torch.sqrt(torch.relu(input))
    return input.copy_(y) if inplace else y if out is None else out.copy_(y)
