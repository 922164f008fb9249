"""matrixmultiply/tensordot_rsqrt."""

from functools import partial

import torch
from kbx_env.tasks._varied import adjacent, few_rows, large_factor

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Cost, Paper, T, Uniform, task

POSITIVE = Uniform(0.1, 1.5)


def _case(a, b, dims, depth, **more):
    return Case({"*a": a, "*b": b, "K": depth}, {"dims": dims}, draw=POSITIVE, **more)


def _deep(p):
    shared = (*(p.whole(2, 6) for _ in range(p.whole(0, 2))), p.whole(600, 700))
    a, b = (tuple(p.whole(2, 7) for _ in range(p.whole(1, 2))) for _ in range(2))
    return p.like({"*a": (*a, *shared), "*b": (*shared, *b)}, {"dims": len(shared)})


def _wide(p, shift=2.0**-15, rows=1100):
    shared = tuple(p.whole(2, 3) for _ in range(p.whole(1, 3)))
    draws = {"a": Uniform(0.5 * shift, 2 * shift), "b": Uniform(0.5 / shift, 2 / shift)}
    return p.like({"*a": (p.whole(2, 3), rows, *shared), "*b": (*shared, p.whole(2, 7))}, {"dims": len(shared)}, draws=draws)


def _vector(p):
    m, k, n = few_rows(p, "m", "k", "n").values()
    return p.like({"*a": (m, k), "*b": (k, n)}, {"dims": 1}, layouts=adjacent(p, 0, "b"))


def _large_right_factor(p):
    m, k, n = large_factor(p, "m", "k", "n").values()
    return p.like({"*a": (m, k), "*b": (k, n)}, {"dims": 1})


def _axes(p):
    left, right = p.slab(4, 4, 1100)[0], [p.whole(2, 5), p.whole(2, 5)]
    ours = p.shuffled(range(4))[:2]
    theirs = p.shuffled(range(4))[:2]
    b = [right.pop() if k not in theirs else left[ours[theirs.index(k)]] for k in range(4)]
    dims = tuple(tuple(d - 4 if p.chance() else d for d in side) for side in (ours, theirs))
    return p.like({"*a": left, "*b": tuple(b)}, {"dims": dims})


@task(
    difficulty=4,
    takes={"a": T("*a"), "b": T("*b")},
    truth=Close(ulps=16),
    cost=Cost(flops="2 * numel(a) * numel(b) / K"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="All forms of dims are exercised at real sizes; inputs are positive, so that every result is finite.",
    cases=(
        _case((3,), (3,), 1, 3),
        _case((2, 2), (2, 2), ((1,), (0,)), 2),
        _case((60, 130), (130, 40), 1, 130),
        # Many rows: kernels walk the tiles in groups of rows, of which the last one is not full. Results of one product.
        _case((270, 1), (1, 520), 1, 1),
        Case({"*a": (7, 5, 6), "*b": (5, 6, 9), "K": 30}, {"dims": 2}, draw=Uniform(0.5, 40)),
        _case((4, 5, 6), (6, 4, 7), ((0, 2), (1, 0)), 24),
        _case((5, 8, 3), (7, 3, 11), ((-1,), (1,)), 3),
        _case((3, 4), (4, 3), ((0, 1), (1, 0)), 12),
        _case((3, 5), (4,), 0, 1),
        _case((33, 70), (70, 21), 1, 70, layouts={"a": "transposed", "b": "transposed"}),
        _case((9, 20), (20, 6), 1, 20, layouts={"a": "strided", "b": "strided"}),
        _case((0, 4), (4, 3), 1, 4),
        _case((6, 11, 13), (13, 5, 11), ((2, 1), (0, 2)), 143, held=True),
    ),
    varied=(_deep, _wide, partial(_wide, shift=2.0**15, rows=9), _axes, _vector, _large_right_factor),
    timed=tuple(_case((n, n), (n, n), 1, n) for n in (1024, 2048, 4096)),
)
def tensordot_rsqrt(a, b, dims):
    """1 / sqrt of the contraction of two fp32 tensors, as torch.rsqrt(torch.tensordot(a, b, dims)).

    Example: tensordot_rsqrt([[1, 3], [0, 4]], [1, 1], dims=1) = [0.5, 0.5]

    dims is an int n: the last n axes of a are contracted with the first n of b (0: an outer product), or a pair of
    sequences: axis dims[0][i] of a (negative counts from the end) with axis dims[1][i] of b. The result has the remaining
    axes of a, then those of b (none: 0-d). Every contraction is positive. Products and sums in IEEE fp32: TF32 is too
    coarse and fails. A new tensor is returned; inputs may have any strides; axes that are not contracted may be empty.
    """
    return torch.rsqrt(torch.tensordot(a, b, dims=dims))
