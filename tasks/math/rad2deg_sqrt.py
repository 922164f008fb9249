"""math/rad2deg_sqrt."""

import torch
from kbx_env.tasks._cases import pointwise, stream
from kbx_env.tasks._varied import elementwise

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Choice, Cost, HalfNormal, Paper, T, Uniform, task

EDGES = Choice(0.0, -0.0, 3.1415927, -3.1415927, -0.785, 1e-20, 1e20, -1e-20, 1e6)


@task(
    difficulty=2,
    takes={"input": T("*")},
    truth=Close(scale="element"),
    cost=Cost(flops="5 * n", least="n"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    cases=pointwise("input", HalfNormal(0.0), special=EDGES),
    varied=(elementwise(),),
    timed=stream(draw=Uniform(0, 1)),
    differs="Results are judged relative to themselves.",
)
def rad2deg_sqrt(input):
    """Degrees and square root of every element x of input: the tuple (x * 180 / pi, sqrt(x)).

    Example: rad2deg_sqrt([0, 1.5, 9, -2]) = ([0, 85.9437, 515.662, -114.592], [0, 1.22474, 3, nan])

    input is an fp32 tensor of any shape; both results are new fp32 tensors of that shape. Negative x give NaN in the
    second (-0 gives zero). Both are judged relative to their own size (4 fp32 steps). Infinities and NaN are not
    tested. The input may be non-contiguous, 0-d or empty and is not changed.
    """
    return torch.rad2deg(input), torch.sqrt(input)
