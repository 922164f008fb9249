"""fusion/fused_tile_exp."""

import math

import torch

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Choice, Cost, Literal, Normal, Outlier, Paper, T, Uniform, task
from kbx_env.spec.varied import layout

MOVED = "4 * numel(input) + 4 * copies * numel(input)"


def _case(shape, dims, **more):
    copies = 1
    for d in dims:
        copies *= d
    return Case({"*": shape, "copies": copies}, {"dims": dims}, **more)


def _tiled(p):
    shape = p.slab(4, 5, 1100)[0]
    dims = tuple(p.among(1, 1, 2, 3) for _ in range(p.whole(1, 5)))
    return p.like({"*": shape, "copies": math.prod(dims)}, {"dims": dims}, out=True)


def _many_axes(p):
    # None of them of length 1.
    shape = tuple(p.whole(2, 4) for _ in range(5))
    dims = tuple(p.whole(1, 2) for _ in shape)
    return p.like({"*": shape, "copies": math.prod(dims)}, {"dims": dims}, out=True)


def _sliced(p):
    # Slices of lines that are one element longer: strides of rows and columns are easily confused.
    shape, rows = (p.whole(2, 40), p.whole(2, 40)), p.whole(1, 3)
    padded = layout((0, 1), (1, 1), pad=1)
    return p.like({"*": shape, "copies": rows}, {"dims": (rows, 1)}, out=True, layouts={"input": padded, "out": padded})


@task(
    difficulty=3,
    takes={"input": T("*")},
    truth=Close(scale="element", ulps=16),
    cost=Cost(
        flops="2 * numel(input)",
        bytes="4 * numel(input) * min(1, copies) + 4 * copies * numel(input)",
        least="numel(input)",
    ),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="The result is torch.tile followed by exp, as the text always said; the published reference put dims in "
    "front as new axes. Small values are judged relative to themselves. out is filled and returned.",
    cases=(
        _case((3,), (2,), draw=Literal(1, 2, 3)),
        _case((2, 2), (2, 3), draw=Literal(1, 2, 3, 4)),
        _case((64, 130), (3, 2)),
        _case((5, 1030), (1, 2), draw=Outlier()),
        _case((64, 130), (3, 1), draw=Uniform(-40, 40)),
        _case((5, 7, 31), (2,)),
        _case((5, 31), (3, 1, 2)),
        _case((4, 3, 5), (2, 3, 4), draw=Normal(-5)),
        _case((1, 33), (50, 1)),
        # More copies than two for each multiprocessor, and an odd number: they cannot be shared evenly.
        _case((2,), (2501,)),
        _case((33, 20), (2, 3), layouts={"input": "transposed"}),
        _case((7, 31), (2, 2), layouts={"input": "strided"}),
        _case((6, 77), (2,), out=True),
        _case((3,), (2, 2), out=True),
        _case((40, 51), (1, 1), draw=Choice(0.0, -0.0, 88.5, -86.0, 1e-20, 1.0)),
        _case((9,), ()),
        _case((), (4, 3)),
        _case((4, 5), (0, 2)),
        _case((0, 3), (2, 2)),
        _case((3, 5, 41), (2, 1, 3), held=True),
    ),
    varied=(_tiled, _many_axes, _sliced),
    timed=(*(_case((1 << k,), (2,)) for k in (23, 25, 27)), _case((4096, 4096), (2, 3))),
)  # fmt: skip
def fused_tile_exp(input, dims, *, out=None):
    """exp of input repeated along its axes: exp(torch.tile(input, dims)), in fp32.

    Example: fused_tile_exp([0, 1], (2,)) = [1, 2.718282, 1, 2.718282]
    Example: fused_tile_exp([[0, 1]], (2, 2)) = [[1, 2.718282, 1, 2.718282], [1, 2.718282, 1, 2.718282]]

    input is an fp32 tensor of any rank, dims a tuple of integers >= 0. Where the two differ in length, ones are put in
    front of the shorter (dims or the shape of input), so that the result has as many axes as the longer; axis d of the
    result is dims[d] times as long as that of input and holds dims[d] copies of it one after the other:
    y[i, j, ...] = exp(input[i % n0, j % n1, ...]). dims=() repeats nothing; a 0 in dims gives an empty result.

    out: None (the default: a new tensor), or a tensor of the result's shape and dtype with any strides and any
    contents, which is filled and returned. The input may be non-contiguous, 0-d or empty and is not changed. Each value
    is judged relative to its own size; the accuracy of tl.exp is enough. Overflow, infinities and NaN are not tested.
    """
    y = torch.exp(torch.tile(input, dims))
    return y if out is None else out.copy_(y)
