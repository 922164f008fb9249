"""reduce/argmax."""

import torch
from kbx_env.tasks._varied import LOWEST, TINY, long_axis, reduced, sizes

from kbx_env.spec.criteria import Exact
from kbx_env.spec.task import Case, Choice, Constant, Cost, Distinct, Ints, Normal, Outlier, Paper, T, task

LONG = {"input_tensor": "i64"}
HALF = {"input_tensor": "f16"}


def _eager(input_tensor, dim, keepdim=False):
    return torch.argmax(input_tensor, dim, keepdim)


@task(
    difficulty=3,
    takes={"input_tensor": T("*")},
    truth=Exact(),
    # Behind the first NaN of a line nothing matters.
    cost=Cost(flops="numel(input_tensor)", reads={"input_tensor": "to_nan(input_tensor, dim)"}),
    paper=Paper(),
    eager=_eager,
    differs="Ties are decided: the first index wins, and NaN counts as the maximum; as published ties were untested "
    "and torch leaves them open.",
    cases=(
        Case({"*": (2, 3)}, {"dim": 0}, draw=Distinct(), dtypes=LONG),
        Case({"*": (2, 3)}, {"dim": 1}, draw=Ints(-5, 5), dtypes=LONG),
        Case({"*": (2, 2, 3)}, {"dim": 1, "keepdim": True}, draw=Ints(-(2**62), 2**62), dtypes=LONG),
        Case({"*": (50, 12)}, {"dim": 1}, draw=Ints(2**62 - 40, 2**62), dtypes=LONG),
        # 2**17 elements: kernels share each column between two programs.
        Case({"*": (128, 1030)}, {"dim": 0}),
        Case({"*": (128, 256)}, {"dim": 1}, draw=Outlier()),
        # Columns of so many parts that a block holds the states of few of them.
        Case({"*": (8201, 17)}, {"dim": 0}),
        Case({"*": (8, 16, 32)}, {"dim": 1, "keepdim": True}),
        Case({"*": (8, 16, 32)}, {"dim": -1}, draw=Ints(0, 4)),
        Case({"*": (5, 3001)}, {"dim": 1}, draw=Ints(0, 40), dtypes=HALF),
        Case({"*": (2049,)}, {"dim": 0}, dtypes=HALF),
        Case({"*": (9, 70)}, {"dim": 1}, draw=Choice(float("-inf"), -1.0, 3.0, float("inf"))),
        Case({"*": (30, 41)}, {"dim": -1}, draw=Choice(*[0.5] * 30, 1.0, float("nan"))),
        Case({"*": (4, 5, 6)}, {"dim": 1}, draw=Choice(-1.0, 0.0, float("inf"), float("nan")), dtypes=HALF),
        Case({"*": (3, 5)}, {"dim": 1}, draw=Constant(float("-inf"))),
        Case({"*": (60, 9)}, {"dim": 1}, draw=Choice(*(1 + k * 2.0**-23 for k in range(8)))),
        Case({"*": (33, 20)}, {"dim": 0}, layouts={"input_tensor": "transposed"}),
        Case({"*": (5, 4, 6, 7)}, {"dim": 0}, layouts={"input_tensor": "transposed"}),
        Case({"*": (3, 0, 4)}, {"dim": 0}),
        Case({"*": (6, 5, 173)}, {"dim": -1, "keepdim": True}, draw=Ints(0, 30), held=True),
    ),
    varied=(
        reduced(lambda p: {"keepdim": p.chance()}),
        long_axis(tensors=("input_tensor",), lines={"dtypes": {}, "draw": Normal(), "draws": {}}),
        sizes(lambda p: {"*": tuple(max(n, 3) for n in p.shape(2, 3, 90))},
              lambda p, s: {"dim": p.axis(len(s["*"]))}, dtypes={}, draw=TINY, draws={}),
        reduced(dtypes=LONG, draw=LOWEST),
    ),
    timed=tuple(Case({"*": (1 << k,)}, {"dim": 0}, dtypes=HALF) for k in (24, 26, 28)),
)
def argmax(input_tensor, dim, keepdim=False):
    """Index (int64) of the maximum along one axis, for an fp32, fp16 or int64 input_tensor of any rank >= 1.

    Example: argmax([[1, 3, 3], [2, 0, 1]], 1) = [1, 0]

    The first index wins among equal maxima, also where all are -inf. NaN counts as larger than everything, +inf too:
    the first NaN wins. dim may be negative; with keepdim the reduced axis stays with length 1. The reduced axis is not
    empty; others may be. int64 values use all 64 bits. New tensor; the input may have any strides.
    """
    top = input_tensor.amax(dim, keepdim=True)
    is_top = (input_tensor == top) | (input_tensor != input_tensor)
    n = input_tensor.shape[dim]
    shape = [n if i == dim % input_tensor.dim() else 1 for i in range(input_tensor.dim())]
    where = torch.arange(n, device=input_tensor.device).view(shape)
    return torch.where(is_top, where, n).amin(dim, keepdim=keepdim)
