"""math/pow."""

import torch
from kbx_env.tasks._cases import broadcast, stream
from kbx_env.tasks._varied import TINY, both_ways, sizes

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Choice, Cost, HalfNormal, Ints, Normal, Outlier, Paper, T, Uniform, task

EDGES = {"input_tensor": Choice(0.0, 1.0, -1.0, 2.0, -3.0, 0.5, 1e10, 1e-10),
         "exponent": Choice(0.0, 1.0, 2.0, -1.0, 3.0, -2.0, 0.5, -0.5)}  # fmt: skip
SIGNED = {"input_tensor": Normal(), "exponent": Ints(-3, 6)}
POSITIVE = {"input_tensor": HalfNormal(0.01), "exponent": Normal(scale=3.0)}
NUMBERS = (2, 3, -0.5, 0.5, -1, 2.5, 0, 1)


@task(
    difficulty=3,
    takes={"input_tensor": T("*a"), "exponent": T("*b")},
    truth=Close(scale="element", ulps=16),
    cost=Cost(
        flops="max(2 * numel(input_tensor), 20 * numel(exponent))",
        reads={
            "input_tensor": "under(input_tensor, exponent)",
            "exponent": "max(0, numel(exponent) - numel(input_tensor) + differing(input_tensor, 1))",
        },
        least="numel(input_tensor)",
    ),
    paper=Paper(rtol=1e-5, atol=1e-5),
    cases=(
        *broadcast("input_tensor", "exponent", Uniform(0.1, 4), out=True),
        Case({"*a": (3, 50), "*b": (3, 50)}, draws=EDGES),
        Case({"*a": (64, 130), "*b": (130,)}, draws=SIGNED),
        Case({"*a": (64, 130), "*b": (64, 130)}, draws=POSITIVE),
        *(Case({"*a": (60, 33)}, {"exponent": e}, draw=HalfNormal(0.001)) for e in NUMBERS),
        Case({"*a": (60, 33)}, {"exponent": 3}, draw=Outlier(), layouts={"input_tensor": "transposed"}),
        Case({"*a": (6, 77)}, {"exponent": 2}, draw=Outlier(), out=True),
        Case({"*a": (6, 77)}, {"exponent": -1.5}, draw=Normal()),
        Case({"*a": (5, 211)}, {"exponent": 1.75}, draw=HalfNormal(0.01), held=True),
        Case({"*a": (5, 211)}, {"exponent": -3}, draw=Normal(), held=True),
    ),
    varied=(
        both_ways(out=True, tensors=("exponent",)),
        *(
            sizes(lambda p: dict.fromkeys(("*a", "*b"), p.shape(2, 3, 90)), where=lambda c: "exponent" not in c.args, draws=draws)
            for draws in ({"input_tensor": Uniform(0.7, 1.3), "exponent": Uniform(20, 60)},
                          {"input_tensor": Uniform(0.01, 100), "exponent": TINY})
        ),
    ),
    timed=(
        *stream("*a", args={"exponent": 2}, draw=Uniform(0, 1)),
        *stream("*a", "*b", draw=Uniform(0, 1), powers=(25,)),
    ),
    differs="Tensor exponents, broadcasting, negative bases and out= are exercised; results are judged relative to "
    "themselves.",
)  # fmt: skip
def pow(input_tensor, exponent, out=None):
    """Power input_tensor ** exponent, elementwise with broadcasting.

    Example: pow([1, 2, -3, 4], 2) = [1, 4, 9, 16]
    Example: pow([4, -2, -2, 0], [-0.5, 3, 0.5, 0]) = [0.5, -8, nan, 1]

    input_tensor is an fp32 tensor; exponent is an fp32 tensor or a Python number (int or float, an fp32 number in all
    tests). x ** 0 is 1 for every x, 0 to a negative power +inf; a negative x gives the signed power for an integral
    exponent and NaN for any other. Results are judged relative to their own size: 16 fp32 steps, more where rounding
    the operands themselves brings more (large results of large exponents). -0, infinities and NaN in the operands,
    overflow and underflow are not tested.

    The shapes broadcast by torch's rules; either tensor may be non-contiguous, 0-d or empty, and neither is changed.
    The result has the broadcast shape and dtype fp32. out: None (the default: a new tensor), or a tensor of the
    result's shape and dtype with any strides and any contents, which is filled and returned.
    """
    return torch.pow(input_tensor, exponent, out=out)
