"""fusion/fused_hstack_div."""

import torch

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Choice, Cost, Ints, Normal, Outlier, Paper, T, task

LONG = {"tensors.0": "i64", "tensors.1": "i64", "tensors.2": "i64"}
GIVEN = ("tensors.2",)
CLEAR = Choice(-7.25, -3.5, -1.75, -0.75, 0.25, 0.5, 1.25, 2.75, 6.5, 100.75)
"""Quotients by 2 and -0.25 are exact: no rounding decides where the floor lies."""


def _case(a, b, c=(1,), divisor=2.0, mode=None, **more):
    args = {"divisor": divisor} | ({} if mode is None else {"rounding_mode": mode})
    return Case({"*a": a, "*b": b, "*c": c}, args, **more)


def _int64(p):
    return _stacked(p, p.shape(3, 4, 30), True)


def _fp32(p):
    return _stacked(p, p.shape(3, 4, 30), False)


def _stacked(p, shape, kind):
    at = 1
    parts = [tuple(p.whole(1, 20) if k == at else n for k, n in enumerate(shape)) for _ in range(5)]
    parts[2] = tuple(1100 if k == at else n for k, n in enumerate(parts[2]))
    names = tuple(f"tensors.{k}" for k in range(5))
    mode = p.among(None, "floor", "trunc") if kind else None
    return p.like(
        dict(zip(("*a", "*b", "*c", "*d", "*e"), parts, strict=True)),
        {"divisor": p.among(-4, 8, -6, 12) if kind else p.real(0.5, 3), "rounding_mode": mode},
        given=names[2:], out=True, dtypes=dict.fromkeys(names, "i64") if kind else {},
        draw=Ints(-(2**20), 2**20) if kind else Normal(), draws={},
    )  # fmt: skip


@task(
    difficulty=3,
    takes={
        "tensors.0": T("*a"), "tensors.1": T("*b"), "tensors.2": T("*c", optional=True), "tensors.3": T("*d", optional=True),
        "tensors.4": T("*e", optional=True),
    },
    truth=Close(ulps=2, scale="element"),
    cost=Cost(flops="a + b"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="Two and three tensors of unequal widths, every rounding mode at exact quotients, integers and out= are exercised.",
    cases=(
        _case((2,), (2,)),
        _case((5,), (3,), (4,), 0.5, given=GIVEN),
        _case((2,), (2,), mode="floor", draw=CLEAR),
        _case((37, 64), (37, 20), mode="trunc", draw=CLEAR),
        _case((37, 64), (37, 1), (37, 130), -0.25, "floor", draw=CLEAR, given=GIVEN),
        _case((128, 65), (128, 33), divisor=3.0, draw=Outlier()),
        _case((6, 4, 9), (6, 7, 9), (6, 2, 9), -1.7, given=GIVEN),
        _case((5, 3, 2, 4), (5, 1, 2, 4), divisor=7, out=True),
        _case((300,), (77,), divisor=3, draw=Ints(-1000, 1000), dtypes=LONG),
        # Numbers that fp32 does not hold.
        _case((30, 7), (30, 12), divisor=4, mode="floor", draw=Ints(-(2**50), 2**50), dtypes=LONG),
        _case((30, 7), (30, 12), divisor=-4, mode="trunc", draw=Ints(-1000, 1000), dtypes=LONG),
        _case((33, 20), (33, 31), layouts={"tensors.0": "transposed", "tensors.1": "strided"}),
        _case((0,), (5,)),
        _case((29, 83), (29, 44), (29, 7), 1.3, given=GIVEN, held=True),
    ),
    varied=(_int64, _fp32),
    timed=(_case((1 << 22,), (1 << 22,)), _case((8192, 1024), (8192, 3072)), _case((1 << 26,), (1 << 26,))),
)  # fmt: skip
def fused_hstack_div(tensors, divisor, *, rounding_mode=None, out=None):
    """The tensors side by side, divided by a number.

    Example: fused_hstack_div([[1, 2], [3]], 2) = [0.5, 1, 1.5]

    tensors is a list of two or more tensors of one dtype, fp32 or int64. 1-D tensors are joined along axis 0, others along
    axis 1; all other axes agree. divisor is a number that is not 0. rounding_mode None: the quotient, in fp32 also for
    integers. "floor" rounds it down, "trunc" towards zero; then integers stay int64. Tested quotients that are rounded are
    exact. out: None (the default: a new tensor), or a tensor of the result's shape and dtype with any strides and any
    contents, which is filled and returned. Inputs may have any strides, and one of them may be empty.
    """
    y = torch.div(torch.hstack(tensors), divisor, rounding_mode=rounding_mode)
    return y if out is None else out.copy_(y)
