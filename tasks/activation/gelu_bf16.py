"""activation/gelu_bf16."""

import torch.nn.functional as F
from kbx_env.tasks._cases import pointwise, stream
from kbx_env.tasks._varied import elementwise

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Choice, Cost, Linspace, Normal, Paper, T, Uniform, task

KINDS = ({"approximate": "none"}, {"approximate": "tanh"})


@task(
    difficulty=1,
    takes={"input": T("*", "bf16")},
    truth=Close(),
    cost=Cost(flops="8 * n", least="n"),
    paper=Paper(rtol=5e-3, atol=5e-3),
    cases=(
        Case({"*": (257,)}, KINDS[1], draw=Linspace(-12, 12)),
        # The two formulas differ by 5e-4, less than a bfloat16 step of 1: only where all results are small it shows.
        # Results of one size: an error of the largest hides no other.
        Case({"*": (65, 130)}, KINDS[0], draw=Uniform(-0.2, -0.1)),
        *(Case({"*": (65, 130)}, kind, draw=Uniform(-5, -2.5)) for kind in KINDS),
        *pointwise(
            "input", Normal(scale=2), special=Choice(-1e30, -11.0, -1e-6, -0.0, 0.0, 1e-6, 11.0, 1e30), args=KINDS
        ),
    ),
    varied=(elementwise(), elementwise(draw=Normal(scale=2.0**-10))),
    timed=stream(powers=(24, 25, 27)),
)
def gelu_bf16(input, approximate="none"):
    """Gaussian error linear unit of every element x of input, a bfloat16 tensor of any shape.

    approximate="none" (the default):  y = 0.5 * x * (1 + erf(x / sqrt(2)))
    approximate="tanh":                y = 0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))

    Example: gelu_bf16([1, -2, 0]) = [0.839844, -0.0454102, 0]
    Example: gelu_bf16([1, -1], "tanh") = [0.839844, -0.15918]

    The result is a new bfloat16 tensor of the same shape; input is not changed, may have any strides, be 0-d or empty.
    Compute in fp32 and round once to bfloat16: the error is judged against the exact value. Values up to +-1e30 must
    give x or 0; infinities and NaN are not tested.
    """
    return F.gelu(input, approximate=approximate)
