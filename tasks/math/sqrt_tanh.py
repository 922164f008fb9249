"""math/sqrt_tanh."""

import torch
from kbx_env.tasks._cases import pointwise, stream
from kbx_env.tasks._varied import elementwise

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Choice, Cost, HalfNormal, Paper, T, Uniform, task

EDGES = Choice(0.0, -0.0, 4.0, 16.0, 1e-10, 0.3, -9.0, -1e-3, 1e4)


@task(
    difficulty=3,
    takes={"input": T("*")},
    truth=Close(ulps=8),
    cost=Cost(flops="10 * n", least="n"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    cases=(
        *pointwise("input", HalfNormal(0.0), special=EDGES, out=True),
        Case({"*": (64, 130)}, draw=Uniform(0, 12)),
        Case({"*": (40, 51)}, draw=Uniform(0, 0.01)),
    ),
    varied=(elementwise(out=True),),
    timed=stream(draw=Uniform(0, 1)),
    differs="out is filled and returned; the published reference ignored it.",
)  # fmt: skip
def sqrt_tanh(input, out=None):
    """Hyperbolic tangent of the square root, tanh(sqrt(x)), of every element of input, an fp32 tensor of any shape.

    Example: sqrt_tanh([0, 0.25, 4, -1]) = [0, 0.462117, 0.964028, nan]

    Negative x give NaN (-0 gives zero), large x give 1: an exponential must not overflow into NaN (tested up to 1e4).
    Errors are judged against the typical size of the results of a call, so that single small results need no relative
    accuracy. Infinities and NaN are not tested. The result has the shape of input and dtype fp32. out: None (the
    default: a new tensor), or a tensor of the result's shape and dtype with any strides and any contents, which is
    filled and returned. The input may be non-contiguous, 0-d or empty and is not changed.
    """
    return torch.tanh(torch.sqrt(input), out=out)
