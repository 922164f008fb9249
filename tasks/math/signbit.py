"""math/signbit."""

import torch
from kbx_env.tasks._cases import pointwise, stream
from kbx_env.tasks._varied import elementwise

from kbx_env.spec.criteria import Exact
from kbx_env.spec.task import Choice, Cost, Normal, T, task

EDGES = Choice(0.0, -0.0, 1e10, -1e10, 1e-30, -1e-30, 6e-39, -6e-39, float("inf"), float("-inf"))


@task(
    difficulty=2,
    takes={"input": T("*")},
    truth=Exact(),
    cost=Cost(flops="n", least="0"),
    cases=pointwise("input", Normal(), special=EDGES, out=True),
    varied=(elementwise(out=True),),
    timed=stream(),
    differs="-0, subnormal numbers, infinities and out= are exercised; as published they never were.",
)
def signbit(input, out=None):
    """Whether the sign bit is set, for every element of input, an fp32 tensor of any shape: a bool tensor.

    Example: signbit([-2.5, 3, 0, -0.0]) = [True, False, False, True]

    True for all negative numbers, also subnormal ones (-6e-39), for -inf and for -0; False for +0, +inf and all others.
    NaN is not tested. The result has the shape of input and dtype bool. out: None (the default: a new tensor), or a tensor
    of the result's shape and dtype with any strides and any contents, which is filled and returned. The input may be
    non-contiguous, 0-d or empty and is not changed.
    """
    return torch.signbit(input, out=out)
