"""random/logspace."""

import torch

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Cost, DeviceArg, DtypeArg, Paper, task

WIDE = {"dtype": DtypeArg("f64")}


def _case(start, end, steps, held=False, **args):
    return Case({}, {"start": start, "end": end, "steps": steps, "device": DeviceArg(), **args}, held=held)


def _any_ends(p):
    args = {"start": p.real(-5, 5), "end": p.real(-5, 5), "steps": p.among(1, p.whole(2, 40), p.whole(1000, 5000)),
            "base": p.real(0.2, 12), "dtype": p.among(None, DtypeArg("f32"),
                  DtypeArg("f64")), "requires_grad": p.chance()}  # fmt: skip
    return p.like({}, args | {"device": DeviceArg()})


@task(
    difficulty=1,
    takes={},
    truth=Close(scale="element", ulps=64),
    cost=Cost(flops="10 * steps", bytes="bytes(result)", least="steps"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    eager=torch.logspace,
    differs="Other bases, decreasing exponents and many steps are exercised; fp32 values are judged against fp64 ones, "
    "where torch itself rounds the exponent.",
    cases=(
        _case(1.0, 3.0, 5),
        _case(0.0, 4.0, 5, base=2.0),
        _case(1.0, 2.0, 4, **WIDE),
        _case(1.0, 3.0, 3, requires_grad=True),
        _case(0.0, 10.0, 50001),
        _case(0.0, 10.0, 20011, **WIDE),
        _case(5, -5, 1001),
        _case(-20.5, 30.25, 4097, base=2),
        _case(-3.0, 2.0, 777, base=0.5, dtype=DtypeArg("f32")),
        _case(0.5, 8.0, 333, base=2.718281828459045, **WIDE),
        _case(-8.0, 8.0, 6, base=7.5, requires_grad=True),
        _case(2.0, -1.5, 2),
        _case(1.5, 3.0, 1),
        _case(0.0, 1.0, 0),
        _case(-7.25, 9.5, 2999, held=True),
        _case(3.0, -4.0, 511, base=4.5, held=True, **WIDE),
    ),
    varied=(_any_ends,),
    timed=tuple(_case(0.0, 10.0, 1 << k) for k in (24, 26, 27)),
)  # fmt: skip
def logspace(start, end, steps, base=10.0, dtype=None, layout=torch.strided, device=None, requires_grad=False):
    """A new tensor of steps values base ** e on device, the exponents e evenly spaced from start to end.

    Example: logspace(1.0, 3.0, 5) = [10, 31.6228, 100, 316.228, 1000]
    Example: logspace(0, 4, 5, base=2) = [1, 2, 4, 8, 16]

    e_i = start + i (end - start) / (steps - 1) for i = 0 .. steps - 1, both ends included; steps=1 gives base ** start,
    steps=0 an empty tensor. start and end are Python numbers (end may be the smaller), base a positive Python number.
    dtype is float32 (default, also for None) or float64. Values are judged relative to their own size: 64 steps of the
    dtype, which bears rounding the exponent to the dtype as long as |e log base| stays below 25, as in all tests.
    requires_grad is set on the result. layout is torch.strided; device is given (its default None is not tested). Not tested
    either: more than 2^24 steps in float64.
    """
    # The exponents in fp64: rounded to fp32 they cost up to 20 fp32 steps of the result.
    y = torch.logspace(start, end, steps, base, dtype=torch.float64, layout=layout, device=device)
    return y.to(dtype or torch.get_default_dtype()).requires_grad_(requires_grad)
