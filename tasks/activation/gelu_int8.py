"""activation/gelu_int8."""

import torch
import torch.nn.functional as F
from kbx_env.tasks._cases import pointwise, stream
from kbx_env.tasks._varied import elementwise

from kbx_env.spec.criteria import Exact
from kbx_env.spec.task import Case, Choice, Cost, Ints, Linspace, Paper, T, task

KINDS = ({"approximate": "none"}, {"approximate": "tanh"})


def _eager(input, approximate="none"):
    return F.gelu(input.float(), approximate=approximate).add_(2**-10).to(torch.int8)


@task(
    difficulty=1,
    takes={"input": T("*", "i8")},
    truth=Exact(),
    cost=Cost(flops="8 * n", least="n"),
    paper=Paper(),
    eager=_eager,
    differs="2^-10 is added before the truncation: as published, integers from 5 or 6 on hung on the last bit of erf "
    "or tanh, and an infinitely accurate GELU failed.",
    cases=(
        *(Case({"*": (256,)}, kind, draw=Linspace(-128, 127)) for kind in KINDS),
        *pointwise("input", Ints(-20, 20), special=Choice(-128, -1, 0, 1, 2, 3, 4, 5, 127), args=KINDS, tail=False),
    ),
    varied=(elementwise(),),
    timed=stream(powers=(25, 26, 27), draw=Ints(-10, 10)),
)  # fmt: skip
def gelu_int8(input, approximate="none"):
    """Gaussian error linear unit of an int8 tensor of any shape, truncated to integers: y = int8(trunc(g(x) + 2^-10)).

    x is the integer as it stands (there is no quantisation scale), trunc rounds towards zero, and

    approximate="none" (the default):  g(x) = 0.5 * x * (1 + erf(x / sqrt(2)))
    approximate="tanh":                g(x) = 0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))

    Example: gelu_int8([-3, 0, 1, 2, 3, 4, 100]) = [0, 0, 0, 1, 2, 4, 100]
    Example: gelu_int8([-1, 5, 6], "tanh") = [0, 5, 6]

    The small addend keeps every sum 8e-4 away from an integer: any evaluation in fp32 gives the same result, which is
    compared exactly. All 256 values of x occur. The result is a new int8 tensor of the same shape; input is not
    changed, may have any strides, be 0-d or empty.
    """
    return (F.gelu(input.to(torch.float64), approximate=approximate) + 2**-10).to(torch.int8)
