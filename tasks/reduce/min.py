"""reduce/min."""

import torch
from kbx_env.tasks._varied import HIGHEST, TINY, UNIT_AXIS, long_axis, reduced, sizes

from kbx_env.spec.criteria import Exact
from kbx_env.spec.task import Case, Choice, Constant, Cost, Distinct, Ints, Normal, Outlier, Paper, T, Uniform, task

LONG = {"input_tensor": "i64"}
INF, NAN = float("inf"), float("nan")


def _eager(input_tensor, dim, keepdim=False):
    return torch.min(input_tensor, dim, keepdim)


@task(
    difficulty=2,
    takes={"input_tensor": T("*")},
    truth=Exact(),
    # Behind the first NaN of a line nothing matters.
    cost=Cost(flops="numel(input_tensor)", reads={"input_tensor": "to_nan(input_tensor, dim)"}),
    paper=Paper(rtol=1e-5, atol=1e-5),
    eager=_eager,
    differs="Ties are decided: the first index wins, and NaN counts as the minimum; as published ties were untested. "
    "Timed over both axes.",
    cases=(
        Case({"*": (2, 3)}, {"dim": 0}, draw=Distinct(), dtypes=LONG),
        Case({"*": (2, 3)}, {"dim": 1}, draw=Ints(-5, 5), dtypes=LONG),
        Case({"*": (2, 2, 3)}, {"dim": 2, "keepdim": True}, draw=Ints(-(2**62), 2**62), dtypes=LONG),
        # 2**17 elements: kernels share each column between two programs.
        Case({"*": (128, 1030)}, {"dim": 0}),
        Case({"*": (128, 256)}, {"dim": 1}, draw=Outlier()),
        Case({"*": (8, 16, 32)}, {"dim": 1, "keepdim": True}),
        Case({"*": (8, 16, 32)}, {"dim": -1}, draw=Ints(0, 4)),
        Case({"*": (5, 3001)}, {"dim": 1}, draw=Ints(-40, 0)),
        Case({"*": (3, 40001)}, {"dim": 1}, draw=Ints(0, 9000)),
        # Columns of so many parts that a block holds the states of few of them.
        Case({"*": (8201, 17)}, {"dim": 0}),
        Case({"*": (9, 70)}, {"dim": 1}, draw=Choice(-INF, -1.0, 3.0, INF)),
        Case({"*": (9, 60)}, {"dim": 1}, draw=Choice(-0.0, 1.0, 3.0, INF)),
        Case({"*": (30, 41)}, {"dim": -1}, draw=Choice(*[0.5] * 30, -1.0, NAN)),
        Case({"*": (3, 5)}, {"dim": 1}, draw=Constant(INF)),
        Case({"*": (33, 20)}, {"dim": 0}, layouts={"input_tensor": "transposed"}),
        Case({"*": (5, 4, 6, 7)}, {"dim": 0}, layouts={"input_tensor": "transposed"}),
        Case({"*": (7, 41, 30)}, {"dim": 1}, layouts={"input_tensor": "strided"}, draw=Ints(-9, 30), dtypes=LONG),
        Case({"*": (3, 0, 4)}, {"dim": 0}),
        # Contiguous, but the axis of length 1 has a stride of its own.
        Case({"*": (5, 1, 37, 4)}, {"dim": 3}, layouts={"input_tensor": UNIT_AXIS}),
        Case({"*": (6, 5, 173)}, {"dim": -1, "keepdim": True}, draw=Ints(0, 30), held=True),
        Case({"*": (5, 173, 7)}, {"dim": 1}, draw=Ints(-(10**12), 10**12), dtypes=LONG, held=True),
    ),
    varied=(
        reduced(lambda p: {"keepdim": p.chance()}),
        long_axis(tensors=("input_tensor",), lines={"dtypes": {}, "draw": Normal(), "draws": {}}),
        sizes(lambda p: {"*": p.shape(2, 3, 90)}, lambda p, s: {"dim": p.axis(len(s["*"]))}, dtypes={}, draw=TINY, draws={}),
        reduced(dtypes={"input_tensor": "i64"}, draw=HIGHEST),
    ),
    timed=(
        *(Case({"*": (m, 1024)}, {"dim": 0}, draw=Uniform()) for m in (32768, 262144)),
        *(Case({"*": (m, 1024)}, {"dim": 1}, draw=Uniform()) for m in (32768, 262144)),
    ),
)
def min(input_tensor, dim, keepdim=False):
    """Minimum and its index (int64) along one axis: a tuple (values, indices).

    Example: min([[2, -1, 0], [5, 3, 3]], dim=1) = ([-1, 3], [1, 1])
    Example: min([[2, -1], [2, 3]], dim=0, keepdim=True) = ([[2, -1]], [[0, 0]])

    input_tensor is fp32 or int64 of any rank >= 1; values has its dtype. The first index wins among equal minima, also
    where all are +inf. NaN counts as smaller than everything, -inf too: the first NaN wins. dim may be negative; with
    keepdim the reduced axis stays with length 1. The reduced axis is not empty; others may be. int64 values use all 64
    bits. Zeros of different sign in one slice are not tested. New tensors; the input may have any strides.
    """
    low = input_tensor.amin(dim, keepdim=True)
    is_low = (input_tensor == low) | (input_tensor != input_tensor)
    n = input_tensor.shape[dim]
    shape = [n if i == dim % input_tensor.dim() else 1 for i in range(input_tensor.dim())]
    where = torch.arange(n, device=input_tensor.device).view(shape)
    index = torch.where(is_low, where, n).amin(dim, keepdim=keepdim)
    return (low if keepdim else low.squeeze(dim)), index
