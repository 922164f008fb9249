"""math/signbit_bitwise_and."""

import torch
from kbx_env.tasks._cases import stream
from kbx_env.tasks._varied import elementwise

from kbx_env.spec.criteria import Exact
from kbx_env.spec.task import Bernoulli, Case, Choice, Cost, Ints, Normal, Outlier, T, Uniform, task

BOOL = {
    "dtypes": {"other": "bool"},
    "draws": {"input": Choice(0.0, -0.0, 0.4, -0.7, 1.0, -5.0), "other": Bernoulli(0.6)},
}
SMALL = {"draws": {"input": Choice(0.0, -0.0, 0.9, -0.9, 1.5, -1.2, 127.7, -128.9), "other": Ints(-128, 128)}}


@task(
    difficulty=1,
    takes={"input": T("*"), "other": T("*", "i8", Ints(-128, 128))},
    truth=Exact(),
    # Where input becomes 0 nobody asks for other.
    cost=Cost(flops="2 * n", reads={"other": "nonzero(result[1])"}, least="0"),
    cases=(
        Case({"*": (4,)}, draws={"input": Normal(scale=2.0), "other": Ints(0, 2)}),
        Case({"*": (129, 257)}, draw=Uniform(-128, 127)),
        Case({"*": (128, 512)}, draw=Outlier(clamp=120.0)),
        Case({"*": (3, 50)}, **SMALL),
        Case({"*": (33, 65)}, draw=Uniform(-128, 127), layouts={"input": "transposed"}),
        Case({"*": (33, 65)}, draw=Uniform(-128, 127), layouts={"other": "transposed"}),
        Case({"*": (7, 31)}, draw=Normal(scale=20.0), layouts={"input": "strided", "other": "strided"}),
        Case({"*": ()}, draw=Uniform(-128, 127)),
        Case({"*": (0, 3)}),
        Case({"*": (1021,)}, **BOOL),
        Case({"*": (31, 17)}, layouts={"input": "strided", "other": "transposed"}, **BOOL),
        Case({"*": (3, 5, 211)}, draw=Uniform(-128, 127), held=True),
        Case({"*": (3, 421)}, held=True, **BOOL),
    ),
    varied=(elementwise(),),
    timed=stream(draws={"input": Uniform(0, 1), "other": Ints(0, 2)}),
    differs="The second result has the dtype of other, as the text says; the published reference always gave int8.",
)  # fmt: skip
def signbit_bitwise_and(input, other):
    """Sign bits of input, and input as an integer AND other: the tuple (bool tensor, tensor of the dtype of other).

    Example: signbit_bitwise_and([-1.2, 3.9, -0.0, 6.5], [7, 2, 1, 12]) =
        ([True, False, True, False], [7, 2, 0, 4])

    input is an fp32 tensor of any shape, other an int8 or bool tensor of the same shape; both results are new tensors
    of that shape. The first is True where the sign bit is set, also for -0. For int8 the second is trunc(x) & other,
    bit by bit in two's complement (x rounded towards zero; trunc(x) lies in [-128, 127] in all tests). For bool the
    second is bool: True where x is not zero (0.4 counts) and other is True. Infinities and NaN are not tested. Either
    tensor may be non-contiguous, 0-d or empty, and neither is changed.
    """
    return torch.signbit(input), torch.bitwise_and(input.to(other.dtype), other)
