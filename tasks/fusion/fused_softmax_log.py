"""fusion/fused_softmax_log."""

import torch
import torch.nn.functional as F
from kbx_env.tasks._seams import TRUTH
from kbx_env.tasks._varied import long_axis, reduced, sizes

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Choice, Cost, DtypeArg, HalfNormal, Literal, Paper, T, Uniform, task

SOME = HalfNormal(0.1)
F64 = {"dtype": DtypeArg("f64")}


@task(
    difficulty=4,
    takes={"input": T("*")},
    truth=Close(scale="element", ulps=16),
    cost=Cost(flops="2 * numel(input)", least="numel(input)"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="Small results are judged relative to themselves; as published, an absolute 1e-5 hid them.",
    cases=(
        Case({"*": (2, 2)}, draw=Literal(1, 2, 3, 4)),
        Case({"*": (2, 2)}, {"dim": 0}, draw=Literal(1, 2, 3, 4)),
        Case({"*": (2, 2)}, F64, draw=Literal(1, 2, 3, 4)),
        Case({"*": (128, 256)}, {"dim": 1}, draw=SOME),
        Case({"*": (128, 257)}, {"dim": 0}, draw=HalfNormal(0.01, 30)),
        Case({"*": (5, 37, 6)}, {"dim": 1}, draw=SOME),
        Case({"*": (5, 37, 6)}, {"dim": -3} | F64, draw=SOME),
        Case({"*": (33, 130)}, {"dim": 1, "dtype": DtypeArg("f32")}, draw=Uniform(0.001, 1)),
        Case({"*": (2, 40001)}, draw=SOME),
        Case({"*": (9000, 5)}, {"dim": 0}, draw=SOME),
        Case({"*": (40, 77)}, draw=Choice(1e-30, 1e-6, 1.0, 7.0, 1e6)),
        Case({"*": (6, 50)}, draw=Choice(0.0, 0.5, 1.0, 3.0)),
        Case({"*": (9, 31)}, draw=Uniform(1e35, 3e36)),
        Case({"*": (31, 17)}, {"dim": 0}, draw=SOME, layouts={"input": "transposed"}),
        Case({"*": (7, 65)}, {"dim": 1}, draw=SOME, layouts={"input": "strided"}),
        Case({"*": (7,)}, draw=SOME),
        Case({"*": (0, 4)}),
        # One element more than a block has, and one in all.
        Case({"*": (7, 513)}, draw=SOME),
        Case({"*": (65, 6)}, {"dim": 0}, draw=SOME),
        Case({"*": (1,)}, draw=SOME),
        Case({"*": (3, 5, 211)}, {"dim": -1}, draw=SOME, held=True),
        Case({"*": (29, 6, 7)}, {"dim": 0}, draw=SOME, held=True),
    ),
    varied=(
        reduced(lambda p: {"dtype": p.among(None, DtypeArg("f32"), DtypeArg("f64"))}),
        long_axis(where=lambda c: c.draw != Uniform(1e35, 3e36)),
        # A large tensor of short columns, which kernels hold in one block.
        sizes(lambda p: {"*": (2, p.whole(450, 500), p.whole(600, 650))}, lambda p, s: {"dim": p.among(1, -2), "dtype": None},
              draw=SOME),
    ),
    timed=(
        *(Case({"*": s}, draw=Uniform(1e-6, 1)) for s in ((1024, 16384), (65536, 1024), (1024, 131072))),
        Case({"*": (8192, 8192)}, {"dim": 0}, draw=Uniform(1e-6, 1)),
    ),
)  # fmt: skip
def fused_softmax_log(input, dim=-1, dtype=None):
    """softmax(log(input)) along the axis dim, for an fp32 tensor of positive numbers of any rank >= 1.

    Example: fused_softmax_log([[1, 3], [2, 2]]) = [[0.25, 0.75], [0.5, 0.5]]
    Example: fused_softmax_log([[1, 3], [2, 2]], dim=0) = [[0.333333, 0.6], [0.666667, 0.4]]

    dim may be negative. dtype is None (the default: all is fp32), torch.float32 or torch.float64: the input is
    converted to it first, everything is computed in it, and the result has it. Elements of 0 give 0, as long as their
    slice holds a positive one; negative elements, infinities and NaN are not tested. The sum over a slice stays below
    1e38. Any formula is right that is as accurate: each result is judged relative to its own size. The result is a new
    tensor of input's shape; the input may have any strides or be empty and is not changed.
    """
    x = input if dtype is None else input.to(dtype)
    if TRUTH.get():  # without the logarithm and the exponential, whose errors grow with |log x|
        return x / x.sum(dim, keepdim=True)
    return F.softmax(torch.log(x), dim)
