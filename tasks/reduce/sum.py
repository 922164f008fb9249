"""reduce/sum."""

import torch
from kbx_env.tasks._varied import long_axis, plain, reduced

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Cost, DtypeArg, Ints, Literal, Normal, Outlier, Paper, T, Uniform, task

LONG = {"dtypes": {"input": "i64"}, "draw": Ints(-(2**40), 2**40)}
F64 = {"dtype": DtypeArg("f64")}


def _converted(p):
    shape = p.shape(2, 4, 400)
    source, to = p.among(("i32", "f64"), ("i32", "f32"), ("i64", "f64"), ("f32", "i64"), ("i32", "i64"), ("i64", "f32"),
                         ("i32", None))  # fmt: skip
    draw = Normal(scale=50) if source == "f32" else Ints(-1000, 1000)
    dtype = None if to is None else DtypeArg(to)
    return p.like({"*": shape}, {"dim": p.axes(len(shape)), "keepdim": p.chance(), "dtype": dtype}, dtypes={"input": source},
                  draw=draw)  # fmt: skip


@task(
    difficulty=2,
    takes={"input": T("*")},
    truth=Close(ulps=16),
    cost=Cost(flops="numel(input)"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="Judged by the error of any fp32 order; as published, sums near zero failed by chance. Timed over either "
    "axis and everything.",
    cases=(
        Case({"*": (2, 3)}, {"dim": 0}, draw=Literal(1, 2, 3, 4, 5, 6), dtypes={"input": "i64"}),
        Case({"*": (2, 2)}, {"dim": 1} | F64, draw=Uniform()),
        Case({"*": (16, 64, 128)}, {"dim": (1, 2)}),
        Case({"*": (16, 64, 128)}, {"dim": (0, -1), "keepdim": True}, draw=Outlier()),
        # 2**17 elements: kernels share each column between two programs.
        Case({"*": (256, 515)}, {"dim": 0}, draw=Normal(mean=3)),
        Case({"*": (128, 300)}, {"dim": 1, "keepdim": True}, draw=Outlier(scale=1000)),
        Case({"*": (3, 40001)}, {"dim": -1}, draw=Normal(mean=1)),
        # Columns of so many parts that a block holds the states of few of them.
        Case({"*": (16401, 17)}, {"dim": 0}, draw=Normal(mean=1)),
        # Two runs of axes, the outer one of length 2.
        Case({"*": (2, 5, 9)}, {"dim": (0, 2)}),
        Case({"*": (5, 37, 6)}, {"dim": 1}, **LONG),
        Case({"*": (70, 33)}, {"dim": 0, "dtype": DtypeArg("f32")}, draw=Ints(-99, 99), dtypes={"input": "i64"}),
        Case({"*": (70, 330)}, {"dim": 1} | F64, draw=Outlier()),
        Case({"*": (70, 33)}, {"dim": 1, "dtype": DtypeArg("i64")}, draw=Ints(-99, 99), dtypes={"input": "i32"}),
        # Sums that int32 does not hold.
        Case({"*": (7, 33)}, {"dim": 1}, draw=Ints(1 << 28, 1 << 30), dtypes={"input": "i32"}),
        Case({"*": (33, 65)}, {"dim": 0}, layouts={"input": "transposed"}),
        Case({"*": (5, 4, 6, 7)}, {"dim": 0}, layouts={"input": "transposed"}),
        Case({"*": (3, 4, 9, 7)}, {"dim": (1, 3)}, layouts={"input": "channels_last"}),
        Case({"*": (2049,)}, {"dim": 0}, layouts={"input": "strided"}),
        Case({"*": (0, 4)}, {"dim": 0}),
        Case({"*": (1, 0)}, {"dim": 0}),
        Case({"*": (6, 5, 173)}, {"dim": (-2, -1), "keepdim": True}, held=True),
        Case({"*": (7, 211, 3)}, {"dim": (0, 1)}, **LONG, held=True),
    ),
    varied=(
        reduced(lambda p: {"keepdim": p.chance()}, tuples=True, least=0, where=plain),
        long_axis(tuples=True, where=plain),
        # Sums beyond 2^53, where fp64 loses the last bits.
        reduced(
            lambda p: {"dtype": p.among(None, DtypeArg("i64"))}, dtypes={"input": "i64"}, draw=Ints(-(2**58), 2**58)
        ),
        _converted,
    ),
    timed=(
        *(Case({"*": (1 << k,)}, {"dim": 0}) for k in (25, 27)),
        Case({"*": (16384, 4096)}, {"dim": 1}),
        Case({"*": (16384, 4096)}, {"dim": 0}),
    ),
)
def sum(input, dim, keepdim=False, dtype=None):
    """Sum over one or several axes of input, an fp32, int32 or int64 tensor of any rank >= 1.

    Example: sum([[1, 2.5], [3, -4]], dim=0) = [4, -1.5]
    Example: sum([[1, 2.5], [3, -4]], dim=(0, 1), keepdim=True) = [[2.5]]

    dim is an axis or a tuple of distinct axes, each may be negative. With keepdim the reduced axes stay with length 1.
    dtype is None (the default), torch.float32, torch.float64 or torch.int64: what the elements are converted to before
    they are added, and the result's dtype. With None fp32 is added in fp32, integers in int64, which is then the
    result's dtype; no integer sum overflows. fp32 sums may be added in any order: the error is judged against the size
    of the results, and against what a tree of additions makes. A sum over nothing is 0. The result is a new tensor;
    input may have any strides; any axis may be empty.
    """
    return torch.sum(input, dim, keepdim, dtype=dtype)
