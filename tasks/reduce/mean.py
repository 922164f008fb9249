"""reduce/mean."""

import torch
from kbx_env.tasks._varied import long_axis, reduced

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Cost, DtypeArg, Ints, Literal, Normal, Outlier, Paper, T, Uniform, task
from kbx_env.spec.varied import layout

INT = {"dtypes": {"input_tensor": "i32"}, "draw": Ints(-1000, 5000)}
F32, F64 = ({"dtype": DtypeArg(d)} for d in ("f32", "f64"))


@task(
    difficulty=1,
    takes={"input_tensor": T("*")},
    truth=Close(ulps=16),
    cost=Cost(flops="numel(input_tensor)"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="out, dtype=float64 and separated axes are exercised. Timed over either axis and everything; "
    "as published over 1-D tensors only.",
    cases=(
        Case({"*": (2, 3)}, {"dim": 0}, draw=Literal(1, 2, 3, 4, 5, 6.5)),
        Case({"*": (2, 2)}, {"dim": 0} | F32, **INT),
        # 2**17 elements: kernels share each column between two programs.
        Case({"*": (256, 515)}, {"dim": 0}, draw=Normal(mean=3)),
        Case({"*": (128, 300)}, {"dim": 1, "keepdim": True}, draw=Outlier(scale=1000)),
        Case({"*": (8, 16, 300)}, {"dim": (0, 2)}, draw=Uniform(-1, 4)),
        Case({"*": (8, 16, 300)}, {"dim": (0, 1), "keepdim": True}),
        Case({"*": (3, 40001)}, {"dim": -1}, draw=Normal(mean=1)),
        # Columns of so many parts that a block holds the states of few of them.
        Case({"*": (16401, 17)}, {"dim": 0}, draw=Normal(mean=1)),
        Case({"*": (5, 37, 6)}, {"dim": 1} | F64),
        Case({"*": (70, 133)}, {"dim": 1} | F64, **INT),
        Case({"*": (70, 133)}, {"dim": (1, 0)} | F32, **INT),
        Case({"*": (33, 65)}, {"dim": 0}, layouts={"input_tensor": "transposed"}, out=True),
        Case({"*": (5, 4, 6, 7)}, {"dim": 0}, layouts={"input_tensor": "transposed"}),
        Case({"*": (3, 4, 9, 7)}, {"dim": (1, 3)}, layouts={"input_tensor": "channels_last"}),
        Case({"*": (9, 70)}, {"dim": 1, "keepdim": True} | F64, draw=Normal(mean=-2), out=True),
        Case({"*": (2049,)}, {"dim": 0}, layouts={"input_tensor": "strided"}, draw=Uniform()),
        Case({"*": (3, 0, 4)}, {"dim": 0}),
        # Two runs of axes, the outer one of length 2.
        Case({"*": (2, 5, 9)}, {"dim": (0, 2)}),
        # Contiguous, but the axis of length 1 has a stride of its own.
        Case({"*": (5, 1, 37)}, {"dim": (0, 1, 2)}, layouts={"input_tensor": layout((1, 0, 2), (1, 1, 1))}),
        Case({"*": (6, 5, 173)}, {"dim": (-2, -1), "keepdim": True}, draw=Outlier(), held=True),
        Case({"*": (7, 211, 3)}, {"dim": -2} | F32, **INT, held=True),
    ),
    varied=(
        reduced(lambda p: {"keepdim": p.chance()}, tuples=True, least=0, out=True),
        long_axis(tuples=True, out=True, tensors=("input_tensor",)),
        reduced(
            lambda p: {"dtype": DtypeArg(p.among("f32", "f64"))},
            tuples=True,
            dtypes={"input_tensor": "i32"},
            draw=Ints(-1000, 5000),
        ),
    ),
    timed=(
        *(Case({"*": (1 << k,)}, {"dim": 0}, draw=Uniform()) for k in (25, 27)),
        Case({"*": (16384, 4096)}, {"dim": 1}, draw=Uniform()),
        Case({"*": (16384, 4096)}, {"dim": 0}, draw=Uniform()),
    ),
)
def mean(input_tensor, dim, keepdim=False, dtype=None, out=None):
    """Arithmetic mean of input_tensor (fp32, or int32 with dtype given; any rank >= 1) over one or several axes.

    Example: mean([[1, 2.5], [3, -4]], dim=0) = [2, -0.75]
    Example: mean([[1, 2.5], [3, -4]], dim=(0, 1), keepdim=True) = [[0.625]]

    dim is an axis or a tuple of distinct axes, each may be negative. With keepdim the reduced axes stay with length 1.
    dtype is None (the default: fp32), torch.float32 or torch.float64: what the elements are converted to first, and the
    result's dtype. With float64 everything is computed in fp64, otherwise in fp32, in any order of addition. out: None
    (the default: a new tensor), or a tensor of the result's shape and dtype with any strides and any contents, which is
    filled and returned. input_tensor may have any strides and is not changed; kept axes may be empty, a mean over
    nothing is not tested.
    """
    return torch.mean(input_tensor, dim, keepdim, dtype=dtype, out=out)
