"""activation/leaky_relu."""

import torch.nn.functional as F
from kbx_env.tasks._cases import pointwise, stream
from kbx_env.tasks._varied import elementwise

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Choice, Cost, Normal, Paper, T, task

INF, NAN = float("inf"), float("nan")


@task(
    difficulty=2,
    takes={"input": T("*")},
    writes={"input": "inplace"},
    truth=Close(scale="element"),
    cost=Cost(flops="n"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="inplace=True must change input itself and return it; slopes below 0 and above 1 and NaN are tested.",
    cases=pointwise(
        "input", Normal(), special=Choice(-INF, -1e38, -1.0, -1e-30, -0.0, 0.0, 1e-30, 2.0, 3e38, INF, NAN),
        args=({}, {"negative_slope": 0.2, "inplace": True}, {"negative_slope": -0.5}, {"negative_slope": 1.75}),
    ),
    varied=(elementwise(lambda p: {"negative_slope": p.real(-3, 3), "inplace": p.chance()}),),
    timed=stream(),
)  # fmt: skip
def leaky_relu(input, negative_slope=0.01, inplace=False):
    """Leaky rectified linear unit of every element x of input, an fp32 tensor of any shape.

    y = x where x > 0, else negative_slope * x; negative_slope is any float (also negative or above 1). NaN gives NaN,
    infinities by the formula.

    Example: leaky_relu([-2, 0, 3]) = [-0.02, 0, 3]
    Example: leaky_relu([-2, 0, 3], negative_slope=1.5) = [-3, 0, 3]

    inplace=False (the default): a new fp32 tensor of the same shape, input is not changed. inplace=True: the result is
    written into input, whatever its strides, and input itself is returned. input may be non-contiguous, 0-d or empty.
    """
    return F.leaky_relu(input, negative_slope, inplace)
