"""activation/gelu."""

import torch.nn.functional as F
from kbx_env.tasks._cases import pointwise, stream
from kbx_env.tasks._varied import elementwise

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Choice, Cost, Normal, Paper, T, task


@task(
    difficulty=4,
    takes={"input": T("*")},
    truth=Close(),
    cost=Cost(flops="8 * n", least="n"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    cases=pointwise(
        "input", Normal(scale=2), special=Choice(-1e30, -11.0, -1e-6, -0.0, 0.0, 1e-6, 11.0, 1e30),
        args=({"approximate": "none"}, {"approximate": "tanh"}),
    ),
    varied=(elementwise(),),
    timed=stream(),
)  # fmt: skip
def gelu(input, approximate="none"):
    """Gaussian error linear unit of every element x of input, an fp32 tensor of any shape.

    approximate="none" (the default):  y = 0.5 * x * (1 + erf(x / sqrt(2)))
    approximate="tanh":                y = 0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))

    Example: gelu([1, -2, 0]) = [0.841345, -0.0455003, 0]
    Example: gelu([1, -2, 0], "tanh") = [0.841192, -0.0454023, 0]

    The result is a new fp32 tensor of the same shape; input is not changed, may have any strides, be 0-d or empty.
    Compute in fp32. Values up to +-1e30 (where x^3 overflows) must give x or 0; infinities and NaN are not tested.
    """
    return F.gelu(input, approximate=approximate)
