"""random/rand."""

import torch

from kbx_env.spec.criteria import Sample
from kbx_env.spec.task import Case, Cost, DeviceArg, DtypeArg, GeneratorArg, Paper, task

SEEDED = {"generator": GeneratorArg(), "device": DeviceArg()}
FREE = {"device": DeviceArg()}


def _case(*size, held=False, out=False, **args):
    return Case({"*": size}, {"size": size, **args}, held=held, out=out)


def _any_size(p):
    shape = p.shape(4, 6, 1500)
    return p.like(
        {"*": shape}, {"size": shape, "requires_grad": False}, where=lambda c: "dtype" not in c.args, out=True
    )


@task(
    difficulty=2,
    takes={},
    truth=Sample(law="uniform01", generator="generator"),
    cost=Cost(flops="10 * n", bytes="bytes(result)", least="0"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="Any stream of good uniform samples is right, seeded by the generator where one is given; as published, "
    "torch's own Philox stream and its thread mapping had to be reproduced bit for bit. size is one tuple, not *size.",
    cases=(
        _case(2, 3, **SEEDED),
        _case(2, 3, dtype=DtypeArg("f64"), **SEEDED),
        _case(2, 3, requires_grad=True, **SEEDED),
        _case(128, 256, **SEEDED),
        _case(128, 256, dtype=DtypeArg("f64"), **SEEDED),
        _case(100, 333, **FREE),
        _case(4097, dtype=DtypeArg("f32"), **FREE),
        _case(64, 65, out=True, **SEEDED),
        _case(**FREE),
        _case(0, 5, **FREE),
        # So many that calls which read one pool of numbers meet in it.
        _case(1 << 17, **FREE),
        _case(331, 397, **FREE),
        _case(7, 11, 113, held=True, **SEEDED),
        _case(3, 1999, dtype=DtypeArg("f64"), held=True, **FREE),
    ),
    varied=(_any_size,),
    timed=tuple(_case(1 << k, **FREE) for k in (23, 25, 27)),
)
def rand(
    size,
    *,
    generator=None,
    out=None,
    dtype=None,
    layout=torch.strided,
    device=None,
    requires_grad=False,
    pin_memory=False,
):
    """Independent uniform samples on [0, 1): a tensor of the given size (a tuple of ints) on device.

    dtype is None (the default: float32), torch.float32 or torch.float64; float32 samples use at least 23 random bits,
    float64 samples at least 52, and none is ever 1.0. With a generator (a torch.Generator) the samples are a function
    of its state alone, which the call advances: equal states give equal samples, other seeds others (a seed may be
    drawn from it with torch.randint of one element). With generator=None (the default) every call gives fresh samples.
    Torch's own stream is not asked for. out: None (the default: a new tensor), or a tensor of the result's shape and
    dtype with any strides and any contents, which is filled and returned. requires_grad is set on the result. layout is
    torch.strided and pin_memory False; device is given (its default None is not tested).
    """
    return torch.rand(
        size, generator=generator, out=out, dtype=dtype, layout=layout, device=device, requires_grad=requires_grad,
        pin_memory=pin_memory,
    )  # fmt: skip
