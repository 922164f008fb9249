"""reduce/min_gelu."""

import torch
import torch.nn.functional as F
from kbx_env.tasks._varied import SMALL_POSITIVE, elementwise, long_axis, reduced, sizes

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Choice, Cost, Literal, Normal, Outlier, Paper, T, Uniform, task

TANH = {"approximate": "tanh"}
# Values whose GELUs are farther apart than rounding: the index of the minimum is certain.
APART = Choice(*(k / 100 for k in range(-400, -100)), *(k / 100 for k in range(300)))
UP = Choice(*(k / 100 for k in range(1, 500)))


def _eager(input, dim=None, keepdim=False, approximate="none", out=None):
    y = F.gelu(input, approximate=approximate)
    return y.min() if dim is None else torch.min(y, dim, keepdim)


@task(
    difficulty=2,
    takes={"input": T("*")},
    truth=Close(ulps=16),
    # No value of gelu is below -0.17: who has met it need not look on.
    cost=Cost(
        flops="9 * numel(input)",
        reads={"input": "numel(input) * min(1, given(dim) + above(result, -0.1699))"},
        least="0",
    ),
    eager=_eager,
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="approximate='none' is GELU, as the published text has it (the published reference lacked the + 1); ties "
    "are decided by the first index; values whose GELUs nearly coincide are kept out where the index counts.",
    cases=(
        Case({"*": (4,)}, draw=Literal(-0.5, 0.5, 1, 2)),
        Case({"*": (2, 2)}, {"dim": 1}, draw=Literal(-0.5, 0.5, 1, 2)),
        Case({"*": (129, 257)}, draw=Normal(mean=6)),
        Case({"*": (4097,)}, TANH, draw=Uniform(-4, -0.9)),
        Case({"*": (3001,)}, TANH, draw=Normal(mean=-0.75, scale=1e-3), out=True),
        Case({"*": (128, 256)}, {"dim": 1}, draw=Uniform(0.1, 3)),
        # 2**17 elements: kernels share each column between two programs.
        Case({"*": (128, 1030)}, {"dim": 0, "keepdim": True}, draw=UP),
        Case({"*": (128, 6)}, {"dim": -1} | TANH, draw=APART),
        Case({"*": (5, 37, 6)}, {"dim": 1}, draw=APART),
        Case({"*": (3, 20001)}, {"dim": 1} | TANH, draw=Uniform(0.1, 3)),
        # Columns of so many parts that a block holds the states of few of them.
        Case({"*": (8201, 17)}, {"dim": 0} | TANH, draw=Uniform(0.1, 3)),
        Case({"*": (40, 50)}, draw=Outlier(0.01, 30)),
        Case({"*": (33, 20)}, {"dim": 0}, draw=APART, layouts={"input": "transposed"}),
        Case({"*": (5, 4, 6, 7)}, {"dim": 0}, draw=APART, layouts={"input": "transposed"}),
        Case({"*": (9, 31)}, {"dim": 1} | TANH, draw=UP, layouts={"input": "strided"}),
        Case({"*": (3, 0, 4)}, {"dim": 0}),
        # Two runs of axes, the outer one of length 2.
        Case({"*": (2, 9)}, draw=Uniform(-4, -0.9), layouts={"input": "transposed"}),
        Case({"*": (6, 5, 13)}, {"dim": -2, "keepdim": True}, draw=APART, held=True),
        Case({"*": (7, 211)}, TANH, draw=Normal(mean=4), out=True, held=True),
    ),
    varied=(
        reduced(lambda p: {"keepdim": p.chance()}, where=lambda c: c.args.get("dim") is not None),
        # Many of so many normal numbers come near the least value of gelu.
        long_axis(where=lambda c: c.args.get("dim") is not None, lines={"draw": Uniform(0.1, 3), "draws": {}}),
        elementwise(out=True, where=lambda c: c.args.get("dim") is None),
        *(sizes(lambda p: {"*": p.shape(2, 4, 90)}, where=lambda c: c.args.get("dim") is None, draw=draw, draws={})
          for draw in (SMALL_POSITIVE, Uniform(20, 60))),
    ),
    timed=(
        *(Case({"*": (1 << k,)}, {"dim": 0}, draw=Uniform()) for k in (25, 27)),
        Case({"*": (16384, 4096)}, {"dim": 1}, draw=Uniform()),
        Case({"*": (1 << 26,)}, TANH),
    ),
)
def min_gelu(input, dim=None, keepdim=False, approximate="none", out=None):
    """Minimum of GELU(input), an fp32 tensor of any rank >= 1: over all elements, or along dim with its index.

    Example: min_gelu([-0.5, 0.5, 1, 2]) = -0.154269
    Example: min_gelu([[-0.5, -2], [1, 1]], dim=1) = ([-0.154269, 0.841345], [0, 0])

    approximate="none": GELU(x) = 0.5 * x * (1 + erf(x / sqrt(2))); "tanh": 0.5 * x * (1 + tanh(sqrt(2 / pi) * (x +
    0.044715 * x^3))). dim None (the default): the minimum as a 0-d tensor; keepdim is then not used. out: None (the
    default: a new tensor), or for dim None a 0-d fp32 tensor with any contents, which is filled and returned; out
    together with a dim is not tested. dim an int (may be negative): a tuple (values fp32, indices int64), in which the
    first index wins among equal elements; keepdim keeps the axis with length 1. Where an index is asked, the GELUs of
    different elements differ by more than fp32 rounding. Infinities and NaN are not tested. The reduced axis is not
    empty; others may be. input may have any strides.
    """
    y = F.gelu(input, approximate=approximate)
    if dim is None:
        return y.amin() if out is None else out.copy_(y.amin())
    # Compared by input: torch's GELU rounds equal numbers differently where they lie at different places of a vector.
    n, least = input.shape[dim], input.gather(dim, y.argmin(dim, keepdim=True))
    where = torch.arange(n, device=y.device).view([n if i == dim % y.dim() else 1 for i in range(y.dim())])
    return y.amin(dim, keepdim=keepdim), torch.where(input == least, where, n).amin(dim, keepdim=keepdim)
