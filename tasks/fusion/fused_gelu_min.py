"""fusion/fused_gelu_min."""

import torch
import torch.nn.functional as F
from kbx_env.tasks._varied import SMALL_POSITIVE, elementwise, long_axis, reduced, sizes

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Choice, Cost, Literal, Normal, Outlier, Paper, T, Uniform, task

TANH = {"approximate": "tanh"}
# Values whose GELUs are farther apart than rounding: the index of the minimum is certain.
APART = Choice(*(k / 64 for k in range(-250, -60)), *(k / 64 for k in range(-10, 250)))
UP = Choice(*(k / 100 for k in range(-30, 500)))


def _eager(input, approximate="none", dim=None, keepdim=False, out=None):
    y = F.gelu(input, approximate=approximate)
    return y.min() if dim is None else torch.min(y, dim, keepdim)


@task(
    difficulty=3,
    takes={"input": T("*")},
    truth=Close(ulps=16),
    # No value of gelu is below -0.17: who has met it need not look on.
    cost=Cost(flops="11 * n", reads={"input": "numel(input) * min(1, given(dim) + above(result, -0.1699))"}, least="0"),
    eager=_eager,
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="approximate='none' is GELU, as the published text has it (the published reference lacked the + 1). Ties "
    "are decided; values whose GELUs nearly coincide are kept out where the index counts.",
    cases=(
        Case({"*": (4,)}, draw=Literal(-0.5, 0.5, 1, 2)),
        Case({"*": (2, 2)}, {"dim": 1}, draw=Literal(-1, 1, 0.5, 2)),
        Case({"*": (129, 257)}, draw=Normal(mean=6)),
        Case({"*": (4097,)}, TANH, draw=Uniform(-4, -0.9)),
        # Many numbers about the minimum of gelu, which is at -0.752.
        Case({"*": (999,)}, draw=Uniform(-0.78, -0.72)),
        Case({"*": (999,)}, TANH, draw=Uniform(-0.78, -0.72)),
        # The minimum is that of the largest number below the turning point; of the smallest one above it.
        Case({"*": (999,)}, draw=Choice(-1.0, -0.9, -0.8, 2.0, 3.0)),
        Case({"*": (999,)}, TANH, draw=Choice(-3.0, -2.0, -0.7, -0.6, 1.0)),
        # 2**19 elements and more: kernels share them between programs.
        Case({"*": (800, 661)}, TANH, draw=Uniform(0.1, 3)),
        Case({"*": (300, 211)}, {"keepdim": True}, draw=Normal(mean=4, scale=0.5), out=True),
        Case({"*": (37,)}, TANH, draw=Outlier(0.3, 30), out=True),
        Case({"*": (128, 256)}, {"dim": 1}, draw=UP),
        # 2**17 elements: kernels share each column between two programs.
        Case({"*": (128, 1030)}, {"dim": 0, "keepdim": True} | TANH, draw=UP),
        Case({"*": (128, 6)}, {"dim": -1} | TANH, draw=APART),
        Case({"*": (5, 37, 6)}, {"dim": 1}, draw=APART),
        Case({"*": (30, 9)}, {"dim": 1}, draw=Choice(-3.0, -2.0, -1.0, 1.0, 2.0, 3.0)),
        Case({"*": (3, 20001)}, {"dim": 1} | TANH, draw=UP),
        Case({"*": (33, 20)}, {"dim": 0}, draw=APART, layouts={"input": "transposed"}),
        Case({"*": (5, 4, 6, 7)}, {"dim": 0}, draw=APART, layouts={"input": "transposed"}),
        Case({"*": (9, 31)}, {"dim": 1} | TANH, draw=UP, layouts={"input": "strided"}),
        Case({"*": (3, 0, 4)}, {"dim": 0}),
        # Two runs of axes, the outer one of length 2.
        Case({"*": (2, 9)}, draw=Uniform(-4, -0.9), layouts={"input": "transposed"}),
        Case({"*": (6, 5, 13)}, {"dim": -2, "keepdim": True}, draw=APART, held=True),
        Case({"*": (7, 211)}, TANH, draw=Normal(mean=4), held=True),
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
        *(Case({"*": (1 << k,)}, draw=Normal()) for k in (25, 28)),
        *(Case({"*": (16384, 4096)}, {"dim": d} | TANH, draw=UP) for d in (0, 1)),
    ),
)
def fused_gelu_min(input, approximate="none", dim=None, keepdim=False, out=None):
    """Minimum of gelu(input): over all elements (dim None), or along one axis together with its index.

    approximate="none": gelu(x) = x / 2 * (1 + erf(x / sqrt 2)); "tanh": x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715
    x^3))). input is fp32 of rank >= 1; compute in fp32. gelu is not monotone: its minimum, about -0.17, is near -0.75.

    dim None: one 0-d tensor; keepdim does not matter. dim an int (may be negative): a tuple (values fp32, indices
    int64) with that axis removed, or of length 1 with keepdim; the first index wins among equal elements. Different
    elements have GELUs that differ by more than rounding wherever an index is asked for.

    Example: fused_gelu_min([-0.5, 0.5, 1, 2]) = -0.154269
    Example: fused_gelu_min([[-0.5, -3], [2, 1]], dim=1, approximate="tanh") = ([-0.154286, 0.841192], [0, 1])

    out: None (the default: a new tensor), or for dim None a 0-d fp32 tensor with any contents, which is filled and
    returned; out together with a dim is not tested. input may have any strides; the reduced axis is not empty, others
    may be. Infinities and NaN are not tested.
    """
    y = F.gelu(input, approximate=approximate)
    if dim is None:
        return y.amin() if out is None else out.copy_(y.amin())
    n, at = input.shape[dim], dim % input.dim()
    least = input.gather(dim, y.argmin(dim, keepdim=True))
    where = torch.arange(n, device=y.device).view([n if i == at else 1 for i in range(y.dim())])
    found = y.amin(dim, keepdim=keepdim), torch.where(input == least, where, n).amin(dim, keepdim=keepdim)
    return found if out is None else (out[0].copy_(found[0]), out[1].copy_(found[1]))
