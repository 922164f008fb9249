"""activation/selu."""

import torch.nn.functional as F
from kbx_env.tasks._cases import pointwise, stream
from kbx_env.tasks._varied import elementwise

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Choice, Cost, Normal, Paper, T, task


@task(
    difficulty=1,
    takes={"input": T("*")},
    writes={"input": "inplace"},
    truth=Close(),
    cost=Cost(flops="7 * n", least="n"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="The true SELU of the published text; the published reference doubled positive inputs and applied no "
    "exponential to strongly negative ones. inplace=True acts; as published it was ignored.",
    cases=pointwise(
        "input", Normal(scale=3), special=Choice(-float("inf"), -1e4, -100.0, -1.0, -1e-6, -0.0, 0.0, 1e-6, 1.0, 90.0),
        args=({"inplace": False}, {"inplace": True}),
    ),
    varied=(elementwise(),),
    timed=stream(),
)  # fmt: skip
def selu(input, inplace=False):
    """Scaled exponential linear unit of every element x of input, an fp32 tensor of any shape.

    y = scale * (max(0, x) + min(0, alpha * (exp(x) - 1))), scale = 1.0507009873554805, alpha = 1.6732632423543772.

    Example: selu([1, 0, -1, -100]) = [1.0507, 0, -1.11133, -1.7581]

    inplace=False (the default): a new fp32 tensor of the same shape, input is not changed. inplace=True: the result is
    written into input, whatever its strides, and input itself is returned. input may be non-contiguous, 0-d or empty.
    Compute in fp32. x > 0 must not go wrong where exp(x) overflows; -inf gives -scale * alpha; NaN is not tested.
    """
    return F.selu(input, inplace)
