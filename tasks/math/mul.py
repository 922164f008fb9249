"""math/mul."""

import torch
from kbx_env.tasks._cases import broadcast, stream
from kbx_env.tasks._varied import BOTH_ENDS, ENDS, both_ways, plain, sizes

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Cost, Ints, Outlier, Paper, T, task

LONG = {"input": "i64", "other": "i64"}
COMPLEX = {"input": "c64", "other": "c64"}
HALF = {"input": "f16", "other": "f16"}


def _pair(x, y, **more):
    return Case({"*a": x, "*b": y}, **more)


@task(
    difficulty=3,
    takes={"input": T("*a"), "other": T("*b")},
    truth=Close(ulps=2, scale="element"),
    cost=Cost(flops="numel(input)"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="Complex products have a real tolerance; as published they were compared bit for bit. out= and fp16, which the "
    "published timings use, are exercised.",
    cases=(
        *broadcast("input", "other", out=True),
        _pair((64, 130), (130,), draw=Outlier()),
        _pair((40, 33), (), args={"other": 2.5}),
        _pair((40, 33), (40, 1), dtypes=HALF),
        _pair((40, 33), (33,), dtypes=LONG, draw=Ints(-(2**33), 2**33)),
        _pair((50,), (), dtypes={"input": "i64"}, draw=Ints(-(2**40), 2**40), args={"other": -3}),
        _pair((3,), (3, 1), dtypes=COMPLEX),
        _pair((40, 31), (40, 31), dtypes=COMPLEX, layouts={"other": "transposed"}),
        _pair((20, 31), (31,), dtypes=COMPLEX, out=True, layouts={"out": "transposed"}),
        _pair((17, 29), (29,), dtypes=COMPLEX, held=True),
    ),
    varied=(
        both_ways(out=True, tensors=("other",)), both_ways(out=True, tensors=("other",), dtypes=LONG, draw=ENDS),
        sizes(lambda p: dict.fromkeys(("*a", "*b"), p.shape(2, 3, 90)), where=lambda c: plain(c) and "other" not in c.args,
              draw=BOTH_ENDS),
    ),
    timed=(*stream("*a", "*b", powers=(23, 27)), *stream("*a", "*b", powers=(25,), dtypes=HALF),
           *stream("*a", "*b", powers=(24,), dtypes=COMPLEX)),
)  # fmt: skip
def mul(input, other, *, out=None):
    """input * other, elementwise with broadcasting.

    Example: mul([1, 2, 3], [[2], [-1]]) = [[2, 4, 6], [-1, -2, -3]]
    Example: mul([1 + 2j], [3j]) = [-6 + 3j]

    Both tensors have one dtype: fp32, fp16, int64 (exact, modulo 2^64) or complex64 (whose parts are each within fp32
    accuracy of |input| * |other|); or other is a number: an int or float beside fp32, an int beside int64 (beside the
    other dtypes not tested). Triton has no complex type: torch.view_as_real gives the parts as a last axis of 2. The
    result has the dtype of input and the broadcast shape. out: None (the default: a new tensor), or a tensor of the
    result's shape and dtype with any strides and any contents, which is filled and returned. Inputs may have any
    strides, be 0-d or empty.
    """
    return torch.mul(input, other, out=out)
