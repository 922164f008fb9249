"""math/div."""

import torch
from kbx_env.tasks._cases import broadcast, stream
from kbx_env.tasks._varied import both_ways

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Choice, Cost, Ints, Outlier, Paper, T, Uniform, task

FLOOR, TRUNC = {"rounding_mode": "floor"}, {"rounding_mode": "trunc"}
GRID = {"input": Ints(-700, 701), "other": Choice(-7.0, -3.0, -2.0, -0.25, 0.5, 3.0, 5.0, 6.0, 49.0)}
EDGES = Choice(0.0, -0.0, 1.0, -3.0, 1e-3, 1e10, float("inf"), float("-inf"), float("nan"))


@task(
    difficulty=3,
    takes={"input": T("*a"), "other": T("*b")},
    truth=Close(scale="element"),
    # Beside a NaN nobody has to know the other operand.
    cost=Cost(
        flops="max(numel(input), numel(other))",
        reads={
            "input": "max(0, numel(input) - numel(other) + numbers(other))",
            "other": "max(0, numel(other) - numel(input) + numbers(input))",
        },
        least="0",
    ),
    paper=Paper(rtol=1e-5, atol=1e-5),
    cases=(
        *broadcast("input", "other", out=True, special=EDGES),
        Case({"*a": (128, 512), "*b": (128, 512)}, draw=Outlier()),
        Case({"*a": (64, 129)}, {"other": 3.0}),
        *(Case({"*a": (128, 200), "*b": (128, 200)}, m, draws=GRID) for m in (FLOOR, TRUNC)),
        Case({"*a": (40, 1, 7), "*b": (23, 1)}, FLOOR, draws=GRID, layouts={"input": "transposed"}),
        Case({"*a": (9, 34), "*b": (9, 34)}, TRUNC, draws=GRID, layouts={"other": "strided"}),
        Case({"*a": (30, 31)}, FLOOR | {"other": -7}, draws=GRID),
        Case({"*a": (30, 31)}, TRUNC | {"other": 0.75}, draws=GRID, out=True),
        Case({"*a": (3, 5, 211), "*b": (211,)}, FLOOR, draws=GRID, held=True),
        Case({"*a": (5, 211), "*b": (5, 1)}, TRUNC, draws=GRID, held=True),
    ),
    varied=(both_ways(out=True, tensors=("other",)),),
    timed=stream("*a", "*b", draws={"other": Uniform(0.01, 1)}),
    differs="rounding_mode, division by zero and out= are exercised; as published they never were.",
)
def div(input, other, rounding_mode=None, out=None):
    """Quotient input / other, elementwise with broadcasting, optionally rounded to an integer.

    Example: div([7, -7, 6], [2, 2, 3]) = [3.5, -3.5, 2]
    Example: div([7, -7, 6], [2, 2, 3], rounding_mode="floor") = [3, -4, 2]
    Example: div([7, -7, 6], [2, 2, 3], rounding_mode="trunc") = [3, -3, 2]

    input is an fp32 tensor, other an fp32 tensor or a Python number. rounding_mode=None: the quotient, judged relative
    to its own size (4 fp32 steps), with IEEE results for zeros, infinities and NaN. "floor" and "trunc": the largest
    integer not above the exact quotient, and the quotient rounded towards zero, as fp32. With rounding the tested
    operands are integers and simple fractions: exact quotients like 693 / 7 do occur (an inaccurate division would land
    below them), all others are at least 0.01 away from an integer; other is not zero and nothing is infinite or NaN.

    The shapes broadcast by torch's rules; either tensor may be non-contiguous, 0-d or empty, and neither is changed.
    The result has the broadcast shape and dtype fp32. out: None (the default: a new tensor), or a tensor of the
    result's shape and dtype with any strides and any contents, which is filled and returned.
    """
    return torch.div(input, other, rounding_mode=rounding_mode, out=out)
