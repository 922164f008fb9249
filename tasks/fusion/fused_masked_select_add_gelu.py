"""fusion/fused_masked_select_add_gelu."""

import torch
import torch.nn.functional as F
from kbx_env.tasks._varied import LARGE, LARGE_POSITIVE, SMALL_POSITIVE, TINY, both_ways, sizes

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Bernoulli, Case, Cost, Linspace, Literal, Outlier, Paper, Shuffled, T, task

TANH = {"approximate": "tanh"}
ALL = {"mask": Bernoulli(1.0)}
THREE = {"mask": Literal(1, 0, 1, 1)}
QUARTER = {"mask": Shuffled(1, 0, 1, 1)}
"""The length of the selection is known, what is selected is not."""


def _case(shape, mask, other, args=None, **more):
    """``other`` is a number, or the shape of a tensor."""
    number = {} if isinstance(other, tuple) else {"other": other}
    axes = {"*": shape, "*m": mask, "*o": other if isinstance(other, tuple) else ()}
    return Case(axes, number | (args or {}), **more)


@task(
    difficulty=3,
    takes={"input": T("*"), "mask": T("*m", "bool", Bernoulli(0.5)), "other": T("*o")},
    truth=Close(ulps=8),
    # How many elements are selected differs from call to call: nonzero(mask) is a bound for all of them.
    cost=Cost(
        flops="5 * numel(input)",
        bytes="numel(mask) + 4 * (under(input, mask) + min(numel(other), numel(result)) + single_call * numel(result)"
        " + (1 - single_call) * nonzero(mask))",
        least="0",
    ),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="other may be a tensor and the mask may broadcast, as the text says; timed on numbers of both signs.",
    cases=(
        _case((4,), (4,), 1.0, draw=Literal(1, 2, 3, 4), draws=THREE),
        _case((4,), (4,), 2.0, {"alpha": 0.5}, draw=Literal(1, 2, 3, 4), draws=THREE),
        _case((4096,), (4096,), 0.1, {"alpha": 0.5} | TANH),
        _case((64, 128), (64, 128), -0.5, {"alpha": -2}, draw=Outlier(), draws={"mask": Bernoulli(0.02)}),
        _case((1025,), (1025,), 0.25, draw=Linspace(-12, 12), draws=ALL),
        _case((30, 40), (30, 40), (), {"alpha": 3} | TANH),
        _case((30, 40), (30, 40), (1,), {"alpha": -1}),
        _case((400,), (400,), (300,), {"alpha": 0.75}, draws=QUARTER),
        _case((3, 5, 60), (3, 5, 60), (675,), TANH, draws=QUARTER, layouts={"other": "strided"}),
        _case((2, 33, 40), (1, 33, 1), 0.5, draws={"mask": Bernoulli(0.7)}),
        _case((1, 77), (50, 1), 2, {"alpha": 0.1}),
        _case((40, 51), (40, 51), 0.5, layouts={"input": "transposed", "mask": "transposed"}),
        _case((9, 331), (9, 331), -1, TANH, out=True, layouts={"input": "strided"}),
        _case((333,), (333,), 1.0, draws={"mask": Bernoulli(0.0)}),
        # More than 2**22 elements: a kernel of a limited number of programs takes two blocks in each.
        _case((1, 2100), (2050, 1), 0.5, draws={"mask": Bernoulli(0.02)}),
        _case((0, 3), (0, 3), 1.0),
        _case((0, 3), (0, 3), 1.0, out=True),
        _case((30001,), (30001,), 0.5, {"alpha": -1.5}, draws={"mask": Bernoulli(0.3)}),
        _case((7, 1, 301), (7, 5, 301), 0.25, {"alpha": 2}, draws={"mask": Bernoulli(0.3)}, held=True),
    ),
    varied=(
        both_ways("*", "*m", args=lambda p: {"other": p.real(-1, 1), "alpha": p.real(-2, 2)}, out=True,
                  draws={"mask": Bernoulli(0.95)}),
        sizes(lambda p: dict.fromkeys(("*", "*m"), p.shape(3, 3, 90)), lambda p, s: {"other": p.among(1e-5, -2e-5), "alpha": 0.5},
              draws={"input": TINY, "mask": Bernoulli(0.9)}),
        sizes(lambda p: dict.fromkeys(("*", "*m"), p.shape(3, 3, 90)), lambda p, s: {"other": p.real(-1, 1), "alpha": 2},
              draws={"input": LARGE, "mask": Bernoulli(0.9)}),
        *(
            sizes(lambda p: dict.fromkeys(("*", "*m"), p.shape(3, 3, 90)) | {"*o": p.among((), (1,))},
                  lambda p, s: {"alpha": p.real(0.5, 2)}, where=lambda c: "other" not in c.args,
                  draws={"input": TINY, "mask": Bernoulli(0.9), "other": other})
            for other in (SMALL_POSITIVE, LARGE_POSITIVE)
        ),
    ),
    timed=(*(_case((1 << k,), (1 << k,), 0.5) for k in (23, 25, 27)), _case((1 << 25,), (1 << 25,), 0.5, TANH)),
)  # fmt: skip
def fused_masked_select_add_gelu(input, mask, other, *, alpha=1, approximate="none", out=None):
    """gelu(torch.masked_select(input, mask) + alpha * other): a 1-D fp32 tensor.

    Example: fused_masked_select_add_gelu([1, -2, 3, 4], [True, True, False, True], 1.0, alpha=0.5) = [1.399789,
    -0.100211, 4.499985]

    input (fp32) and mask (bool) are broadcast against each other, as torch broadcasts; the elements of input where mask
    is True are taken in row-major order. Their number is the length of the result and may be 0; reading it back to the
    host is allowed. other is a number, or an fp32 tensor with one element (0-d or 1-D), or a 1-D one as long as the
    selection, which is added element by element. alpha is a number of either sign.

    gelu(x) for approximate="none": x / 2 * (1 + erf(x / sqrt(2))); for "tanh": x / 2 * (1 + tanh(sqrt(2 / pi) *
    (x + 0.044715 * x^3))). out: None (the default: a new tensor), or a tensor of the result's shape and dtype with any
    strides and any contents, which is filled and returned. Inputs may have any strides or be empty and are not changed.
    Infinities and NaN are not tested.
    """
    y = F.gelu(torch.masked_select(input, mask) + alpha * other, approximate=approximate)
    return y if out is None else out.copy_(y)
