"""math/bitwise_and."""

import torch
from kbx_env.tasks._cases import broadcast, stream
from kbx_env.tasks._varied import both_ways

from kbx_env.spec.criteria import Exact
from kbx_env.spec.task import Bernoulli, Case, Cost, Ints, T, task

WORD = Ints(-(2**31), 2**31)
BOOL = {"dtypes": {"input": "bool", "other": "bool"}, "draws": {"input": Bernoulli(0.6), "other": Bernoulli(0.6)}}


@task(
    difficulty=2,
    takes={"input": T("*a", "i32", WORD), "other": T("*b", "i32", WORD)},
    truth=Exact(),
    cost=Cost(
        flops="max(numel(input), numel(other))",
        reads={"input": "under(input, other)", "other": "under(other, input)"},
        least="0",
    ),
    cases=(
        *broadcast("input", "other", out=True),
        Case({"*a": (2, 2), "*b": (2,)}, draws={"input": Ints(0, 8), "other": Ints(0, 8)}),
        Case({"*a": (1021,), "*b": (1021,)}, **BOOL),
        Case({"*a": (30, 1, 9), "*b": (7, 1)}, **BOOL),
        Case({"*a": (31, 17), "*b": (31, 17)}, layouts={"input": "transposed", "other": "strided"}, **BOOL),
        Case({"*a": (5, 40), "*b": (40,)}, out=True, **BOOL),
        Case({"*a": (3, 5, 211), "*b": ()}, held=True, **BOOL),
    ),
    varied=(both_ways(out=True),),
    timed=stream("*a", "*b"),
    differs="Integers of either sign over all 32 bits and out= are exercised; as published only small ones were.",
)
def bitwise_and(input, other, out=None):
    """Bitwise AND of two int32 tensors, logical AND of two bool tensors, elementwise with broadcasting.

    Example: bitwise_and([12, -1, 7], [10, 5, -8]) = [8, 5, 0]

    input and other have the same dtype, int32 (two's complement, any of its values) or bool; their shapes broadcast by
    torch's rules. Either may be non-contiguous, 0-d or empty, and neither is changed. The result has that dtype and the
    broadcast shape. out: None (the default: a new tensor), or a tensor of the result's shape and dtype with any strides
    and any contents, which is filled and returned.
    """
    return torch.bitwise_and(input, other, out=out)
