"""activation/gelu_fp16."""

import torch.nn.functional as F
from kbx_env.tasks._cases import stream
from kbx_env.tasks._varied import elementwise

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Choice, Cost, Linspace, Literal, Normal, Outlier, Paper, T, Uniform, task

KINDS = ({"approximate": "none"}, {"approximate": "tanh"})


@task(
    difficulty=1,
    takes={"input": T("*", "f16")},
    truth=Close(),
    cost=Cost(flops="8 * numel(input)", least="numel(input)"),
    paper=Paper(rtol=5e-3, atol=5e-3),
    cases=(
        Case({"*": (5,)}, draw=Literal(-2, -1, 0, 1, 2)),
        Case({"*": (257,)}, draw=Linspace(-12, 12)),
        *(Case({"*": (129, 257)}, kind) for kind in KINDS),
        *(Case({"*": (128, 512)}, kind, draw=Outlier()) for kind in KINDS),
        Case({"*": (33, 65)}, KINDS[1], layouts={"input": "transposed"}),
        Case({"*": (7, 31)}, layouts={"input": "strided"}),
        Case({"*": (64, 65)}, KINDS[1], draw=Uniform(-5, -2.5)),
        Case({"*": (64, 65)}, KINDS[0], draw=Uniform(-5, -2.5)),
        Case({"*": ()}),
        Case({"*": (0, 3)}),
        Case({"*": (3, 50)}, KINDS[1], draw=Choice(-65504, -11, -6e-8, -0.0, 0.0, 6e-8, 11, 65504)),
        *(Case({"*": (3, 5, 211)}, kind, draw=Outlier(0.01, 30), held=True) for kind in KINDS),
    ),
    varied=(elementwise(), elementwise(draw=Normal(scale=2.0**-10))),
    timed=stream(powers=(24, 26, 27)),
)
def gelu_fp16(input, approximate="none"):
    """Gaussian error linear unit of a float16 tensor of any shape, elementwise.

    Example: gelu_fp16([0, 1, -2]) = [0, 0.841309, -0.045502]

    approximate="none":  y = 0.5 * x * (1 + erf(x / sqrt(2)))
    approximate="tanh":  y = 0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))

    The result is a new float16 tensor of the same shape; the input is not changed. Compute in float32 and round
    once to float16: the error is judged against the exact value. The input may be non-contiguous, 0-d or empty.
    Values up to +-65504 must not overflow; infinities and NaN are not tested.
    """
    return F.gelu(input, approximate=approximate)
