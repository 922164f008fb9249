"""activation/tanh."""

import torch
from kbx_env.tasks._cases import pointwise, stream
from kbx_env.tasks._varied import elementwise

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Choice, Constant, Cost, Linspace, Normal, Paper, T, task

INF, NAN = float("inf"), float("nan")
GIVEN = {"given": ("out_tensor",), "draw": Normal(scale=2)}


@task(
    difficulty=1,
    takes={"input_tensor": T("*"), "out_tensor": T("*", draw=Constant(NAN), optional=True)},
    writes={"out_tensor": "always"},
    truth=Close(),
    cost=Cost(flops="10 * n", reads={"out_tensor": "0"}, least="n"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    cases=(
        Case({"*": (11, 23)}, draw=Linspace(-10, 10)),
        Case({"*": (40, 51)}, **GIVEN),
        Case({"*": (6, 77)}, **GIVEN, layouts={"input_tensor": "transposed", "out_tensor": "strided"}),
        Case({"*": ()}, **GIVEN),
        *pointwise(
            "input_tensor", Normal(scale=2),
            special=Choice(-INF, -1e4, -89.0, -1.0, -0.0, 1e-6, 2.0, 45.0, 1e30, INF, NAN),
        ),
        Case({"*": (7, 131)}, **GIVEN, layouts={"out_tensor": "transposed"}, held=True),
    ),
    varied=(elementwise(full=True),),
    timed=stream(),
)  # fmt: skip
def tanh(input_tensor, out_tensor=None):
    """Hyperbolic tangent of every element x of input_tensor, an fp32 tensor of any shape.

    Example: tanh([0, 1, -2, 100]) = [0, 0.761594, -0.964028, 1]

    -inf gives -1, inf gives 1, NaN gives NaN, and nothing overflows in between. The result is an fp32 tensor of the
    shape of input_tensor. out_tensor: None (the default: a new tensor), or a tensor of the result's shape and dtype
    with any strides and any contents, which is filled and returned. input_tensor is not changed, may have any strides,
    be 0-d or empty. Compute in fp32.
    """
    return torch.tanh(input_tensor, out=out_tensor)
