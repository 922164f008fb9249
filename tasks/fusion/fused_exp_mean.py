"""fusion/fused_exp_mean."""

import torch
from kbx_env.tasks._cases import stream
from kbx_env.tasks._varied import SMALL_POSITIVE, long_axis, reduced, sizes

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Cost, DtypeArg, Linspace, Literal, Normal, Outlier, Paper, T, Uniform, task

F32, F64 = ({"dtype": DtypeArg(d)} for d in ("f32", "f64"))


@task(
    difficulty=3,
    takes={"input": T("*")},
    truth=Close(ulps=16),
    cost=Cost(flops="5 * n", least="n"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="dtype and out are exercised; as published both were ignored. Timed along an axis too.",
    cases=(
        Case({"*": (3,)}, draw=Literal(1, 2, 3)),
        Case({"*": (2, 2)}, {"dim": 1, "keepdim": True}, draw=Literal(1, 2, 3, 4)),
        Case({"*": (128, 300)}, {"keepdim": True}),
        # 2**17 elements: kernels share each column between two programs.
        Case({"*": (256, 515)}, {"dim": 0}, draw=Outlier()),
        Case({"*": (128, 300)}, {"dim": 1, "keepdim": True}, draw=Outlier()),
        Case({"*": (40, 9, 50)}, draw=Uniform(-3, 2)),
        Case({"*": (5, 301, 6)}, {"dim": -2}, draw=Normal(mean=-4)),
        Case({"*": (3, 40001)}, {"dim": 1}, draw=Uniform(-80, 1)),
        # Columns of so many parts that a block holds the states of few of them.
        Case({"*": (16401, 17)}, {"dim": 0}),
        Case({"*": (18, 33)}, {"dim": 1}, draw=Linspace(-87, 87)),
        Case({"*": (60, 133)}, {"dim": 1} | F64),
        Case({"*": (97,)}, F64, draw=Normal(scale=3), out=True),
        Case({"*": (41, 6)}, {"dim": 0} | F32, out=True),
        Case({"*": (33, 65)}, {"dim": 0}, layouts={"input": "transposed"}),
        Case({"*": (33, 65)}, layouts={"input": "transposed"}),
        Case({"*": (5, 4, 6, 7)}, {"dim": 0}, layouts={"input": "transposed"}),
        Case({"*": (31, 17)}, {"dim": 1}, layouts={"input": "strided"}),
        Case({"*": ()}),
        Case({"*": (3, 0, 4)}, {"dim": 0}),
        # Two runs of axes, the outer one of length 2.
        Case({"*": (2, 9)}, layouts={"input": "transposed"}),
        Case({"*": (6, 5, 173)}, {"dim": -1, "keepdim": True}, draw=Outlier(), held=True),
        Case({"*": (7, 11, 213)}, {"dim": 0}, draw=Normal(scale=2), out=True, held=True),
    ),
    varied=(
        reduced(lambda p: {"keepdim": p.chance()}, none=True, out=True, where=lambda c: "dim" in c.args),
        long_axis(out=True, where=lambda c: "dim" in c.args),
        sizes(lambda p: {"*": p.shape(2, 3, 60)}, lambda p, s: {"dim": p.axis(len(s["*"]))}, where=lambda c: "dim" in c.args,
              draw=SMALL_POSITIVE, draws={}),
    ),
    timed=(
        *stream(powers=(25, 28), draw=Uniform()),
        *(Case({"*": (16384, 4096)}, {"dim": d}, draw=Uniform()) for d in (0, 1)),
    ),
)
def fused_exp_mean(input, dim=None, keepdim=False, dtype=None, out=None):
    """Mean of exp(input) over one axis (dim, may be negative) or over all elements (dim None, a 0-d result).

    Example: fused_exp_mean([[0, 1], [-1, 2]], dim=0) = [0.683940, 5.053669]
    Example: fused_exp_mean([0, -2], keepdim=True) = [0.567668]

    input is fp32 of any rank; keepdim leaves reduced axes in the result with length 1. The exponentials are computed in
    fp32 and added up in fp32, in any order; arguments lie within +-87, where neither exp nor the sum overflows. dtype
    is None, torch.float32 or torch.float64: the input is converted to it first, everything is computed in it, and it is
    the dtype of the result. out: None (the default: a new tensor), or a contiguous tensor of the result's shape and
    dtype with any contents, which is filled and returned. input may have any strides; kept axes may be empty, a mean
    over nothing is not tested.
    """
    y = torch.exp(input if dtype is None else input.to(dtype)).mean(dim, keepdim)
    return y if out is None else out.copy_(y)
