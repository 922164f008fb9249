"""activation/sigmoid."""

import torch
from kbx_env.tasks._cases import pointwise, stream
from kbx_env.tasks._varied import elementwise, sizes

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Choice, Cost, Linspace, Normal, Paper, T, task

INF, NAN = float("inf"), float("nan")


@task(
    difficulty=2,
    takes={"input": T("*")},
    truth=Close(),
    cost=Cost(flops="4 * n", least="n"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    cases=(
        Case({"*": (11, 23)}, draw=Linspace(-30, 30)),
        *pointwise(
            "input", Normal(scale=3), out=True,
            special=Choice(-INF, -3e38, -1e4, -90.0, -0.0, 0.0, 1e-6, 1.0, 90.0, 1e4, 3e38, INF, NAN),
        ),
    ),
    varied=(
        elementwise(out=True),
        # Results around 1e-10, which a bound of the input would make larger.
        sizes(lambda p: {"*": p.shape(2, 4, 200)}, draw=Normal(mean=-23, scale=2), draws={}),
    ),
    timed=stream(),
)  # fmt: skip
def sigmoid(input, out=None):
    """Logistic function of every element x of input, an fp32 tensor of any shape: y = 1 / (1 + exp(-x)).

    Example: sigmoid([0, 2, -1, -200]) = [0.5, 0.880797, 0.268941, 0]

    -inf gives 0, inf gives 1, NaN gives NaN, and nothing overflows in between. The result is an fp32 tensor of the
    shape of input. out: None (the default: a new tensor), or a tensor of the result's shape and dtype with any strides
    and any contents, which is filled and returned. input is not changed, may have any strides, be 0-d or empty. Compute
    in fp32.
    """
    return torch.sigmoid(input, out=out)
