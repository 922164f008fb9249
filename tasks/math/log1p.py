"""math/log1p."""

import torch
from kbx_env.tasks._cases import pointwise, stream
from kbx_env.tasks._varied import elementwise

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Choice, Cost, Normal, Paper, T, Uniform, task


@task(
    difficulty=2,
    takes={"input": T("*")},
    truth=Close(scale="element", ulps=8),
    cost=Cost(flops="20 * n", least="n"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    cases=(
        *pointwise("input", Uniform(-0.95, 10), out=True,
                   special=Choice(0.0, -0.0, 1e-10, -1e-10, 3e-5, -2e-4, -1.0, -2.0, -0.9999, 1e10, 0.5)),
        Case({"*": (64, 130)}, draw=Normal(scale=1e-3)),
        Case({"*": (40, 51)}, draw=Normal(scale=1e-8)),
    ),
    varied=(elementwise(out=True),),
    timed=stream(draw=Uniform(0, 1)),
    differs="Results are judged relative to themselves; as published, an absolute 1e-5 hid log(1 + x) of small x.",
)  # fmt: skip
def log1p(input, out=None):
    """log(1 + x) for every element x of input, an fp32 tensor of any shape.

    Example: log1p([1, -0.5, 1e-10, -1, -2]) = [0.693147, -0.693147, 1e-10, -inf, nan]

    Results are judged relative to their own size (8 fp32 steps), also where x is tiny: there log1p(x) is about
    x - x^2 / 2, while 1 + x has lost the digits of x. -1 gives -inf, smaller numbers NaN; infinities and NaN in the
    input are not tested. The result has the shape of input and dtype fp32. out: None (the default: a new tensor), or a
    tensor of the result's shape and dtype with any strides and any contents, which is filled and returned. The input
    may be non-contiguous, 0-d or empty and is not changed.
    """
    return torch.log1p(input, out=out)
