"""activation/relu."""

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
    differs="inplace=True must change input itself and return it; NaN stays NaN.",
    cases=pointwise(
        "input", Normal(), special=Choice(-INF, -3e38, -1.0, -1e-30, -0.0, 0.0, 1e-30, 2.0, 3e38, INF, NAN),
        args=({"inplace": False}, {"inplace": True}),
    ),
    varied=(elementwise(),),
    timed=stream(),
)  # fmt: skip
def relu(input, inplace=False):
    """Rectified linear unit of every element x of input, an fp32 tensor of any shape: y = x where x > 0, else 0.

    Example: relu([-1.5, 0, 2, inf, nan]) = [0, 0, 2, inf, nan]

    NaN gives NaN, -inf zero; the sign of a zero does not matter. inplace=False (the default): a new fp32 tensor of the
    same shape, input is not changed. inplace=True: the result is written into input, whatever its strides, and input
    itself is returned. input may be non-contiguous, 0-d or empty.
    """
    return F.relu(input, inplace=inplace)
