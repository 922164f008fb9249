"""fusion/fused_log_tanh."""

import torch
from kbx_env.tasks._cases import pointwise, stream
from kbx_env.tasks._varied import elementwise

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Choice, Cost, HalfNormal, Paper, T, Uniform, task

EDGES = Choice(1e-38, 1e-20, 1e-5, 0.999999, 1.0, 1.000001, 1e5, 1e20, 3e38)


@task(
    difficulty=1,
    takes={"input": T("*")},
    truth=Close(ulps=8),
    cost=Cost(flops="10 * n", least="n"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="Elements <= 0 never occur, so that nothing has to be read back; as published they raised a ValueError "
    "whose text was compared, and the check was part of the timed call.",
    cases=(
        *pointwise("input", HalfNormal(0.1), special=EDGES, out=True, tail=False),
        Case({"*": (4096,)}, draw=Uniform(1e-6, 1)),
        Case({"*": (64, 130)}, draw=HalfNormal(1e-3, 10)),
        Case({"*": (2049,)}, draw=Uniform(0.99, 1.01), layouts={"input": "offset"}, out=True),
    ),
    varied=(elementwise(out=True),),
    timed=stream(draw=Uniform(1e-6, 3)),
)  # fmt: skip
def fused_log_tanh(input, out=None):
    """tanh(log(input)) of every element of input, a strictly positive fp32 tensor of any shape.

    Example: fused_log_tanh([1, 2, 0.5, 10]) = [0, 0.6, -0.6, 0.980198]

    The result is an fp32 tensor of the shape of input. out: None (the default: a new tensor), or a tensor of the
    result's shape and dtype with any strides and any contents, which is filled and returned. The input may be
    non-contiguous, 0-d or empty and is not changed. All positive normal numbers must work, up to 3e38. Zero, negative
    numbers, infinities and NaN do not occur: nothing has to be checked and no error raised. Any formula is fine that is
    as accurate as log followed by tanh: the error is judged against the size of the results.
    """
    return torch.tanh(torch.log(input), out=out)
