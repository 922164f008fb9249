"""fusion/fused_mul_sub."""

from kbx_env.tasks._varied import GAPS, both_ways

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Choice, Cost, Literal, Outlier, Paper, T, task


def _case(a, b, c, args=None, **more):
    return Case({"*a": a, "*b": b, "*c": c}, args or {}, **more)


@task(
    difficulty=2,
    takes={"input": T("*a"), "other_mul": T("*b"), "other_sub": T("*c")},
    truth=Close(),
    cost=Cost(flops="3 * max(numel(input), max(numel(other_mul), numel(other_sub)))"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="Three numbers at once, whose result would be a Python number, do not occur; broadcasting, out and every "
    "choice of one or two numbers do.",
    cases=(
        _case((3,), (3,), (3,), draw=Literal(1, 2, 3)),
        _case((129, 257), (129, 257), (129, 257)),
        _case((128, 300), (128, 300), (128, 300), {"alpha": -0.5}, draw=Outlier()),
        _case((64, 130), (130,), (64, 1), {"alpha": 3}),
        _case((), (5, 7), (7,), {"alpha": 0.25}),
        _case((4, 1, 33), (9, 1), (1, 1, 1), {"alpha": 2.5}),
        _case((33, 50), (33, 50), (33, 50), {"other_mul": 2.5}),
        _case((33, 50), (50,), (33, 50), {"other_sub": 0.75, "alpha": -2}),
        _case((33, 50), (33, 1), (33, 50), {"input": -1.5}),
        # Several blocks along both axes.
        _case((7, 2100), (2100,), (7, 1), {"alpha": 0.5}),
        _case((7, 31), (), (), {"other_mul": 3, "other_sub": 0.5, "alpha": 0.125}),
        _case((), (7, 31), (), {"input": 2, "other_sub": 1.25}, out=True, layouts={"other_mul": GAPS, "out": GAPS}),
        _case((), (), (7, 31), {"input": 2.0, "other_mul": 1.5, "alpha": 0.3}),
        _case((40, 51), (40, 51), (40, 51), {"alpha": 0.3}, layouts={"input": "transposed", "other_sub": "strided"}),
        _case((6, 77), (77,), (6, 77), {"alpha": -1.25}, out=True),
        _case((3, 50), (3, 50), (3, 50), draw=Choice(0.0, -0.0, 1e-30, -1e18, 1e15, 1.0)),
        _case((), (), ()),
        _case((0, 3), (3,), (0, 1)),
        _case((3, 5, 211), (5, 1), (211,), {"alpha": -0.75}, held=True),
    ),
    varied=(
        both_ways("*a", "*b", "*c", args=lambda p: {"alpha": p.among(p.whole(-3, 3), p.real(-2, 2), p.real(-2, 2))}, out=True,
                  tensors=("input", "other_mul", "other_sub")),
    ),
    timed=tuple(_case((1 << k,), (1 << k,), (1 << k,)) for k in (22, 24, 27)),
)  # fmt: skip
def fused_mul_sub(input, other_mul, other_sub, alpha=1, out=None):
    """input * other_mul - alpha * other_sub, elementwise, in fp32.

    Example: fused_mul_sub([1, 2, 3], [0.5, 1.5, 2.5], [0.1, 0.2, 0.3], alpha=2) = [0.3, 2.6, 6.9]

    input, other_mul and other_sub are fp32 tensors of any shapes that broadcast against each other as torch broadcasts,
    or numbers (int or float): any one or two of them, so that at least one is a tensor. alpha is a number of either
    sign. The result is an fp32 tensor of the common shape of the tensors. out: None (the default: a new tensor), or a
    tensor of the result's shape and dtype with any strides and any contents, which is filled and returned. The tensors
    may be non-contiguous, 0-d or empty and are not changed. A fused multiply-add is as right as two roundings.
    Infinities and NaN are not tested.
    """
    y = input * other_mul - alpha * other_sub
    return y if out is None else out.copy_(y)
