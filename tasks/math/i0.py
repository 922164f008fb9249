"""math/i0."""

import torch
from kbx_env.tasks._cases import pointwise, stream
from kbx_env.tasks._varied import elementwise

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Choice, Cost, Linspace, Paper, T, Uniform, task


@task(
    difficulty=2,
    takes={"input_tensor": T("*")},
    truth=Close(scale="element", ulps=16),
    cost=Cost(flops="30 * n", least="n"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    cases=(
        *pointwise("input_tensor", Uniform(-10, 10), out=True,
                   special=Choice(0.0, -0.0, 1e-3, -1.0, 3.75, 8.0, -30.0, 60.0, 85.0)),
        Case({"*": (513,)}, draw=Linspace(-4, 4)),
    ),
    varied=(elementwise(out=True),),
    timed=stream(draw=Uniform(0, 1)),
    differs="Arguments up to 85 and out= are exercised; as published they never were.",
)  # fmt: skip
def i0(input_tensor, out=None):
    """Modified Bessel function of the first kind of order 0, I_0(x), of every element of input_tensor.

    Example: i0([0, 1, -3, 4]) = [1, 1.26607, 4.88079, 11.3019]

    input_tensor is an fp32 tensor of any shape. I_0(x) = sum over k >= 0 of (x/2)^(2k) / (k!)^2 is even, at least 1, it
    grows like exp(|x|) / sqrt(2 pi |x|). Tested for |x| <= 85 (no overflow); infinities and NaN are not. Results are
    judged relative to their own size (16 fp32 steps, more where rounding x itself brings more). The result has the
    shape of input_tensor and dtype fp32. out: None (the default: a new tensor), or a tensor of the result's shape and
    dtype with any strides and any contents, which is filled and returned. The input may be non-contiguous, 0-d or empty
    and is not changed.
    """
    return torch.special.i0(input_tensor, out=out)
