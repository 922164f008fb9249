"""math/erfc_sqrt."""

import torch
from kbx_env.tasks._cases import pointwise, stream
from kbx_env.tasks._varied import elementwise

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Choice, Cost, HalfNormal, Paper, T, Uniform, task


@task(
    difficulty=2,
    takes={"input": T("*")},
    truth=Close(scale="element", ulps=16),
    cost=Cost(flops="20 * n", least="n"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    cases=pointwise("input", Uniform(-2, 6), special=Choice(0.0, -0.0, 1e-6, 2.0, -1.0, -3.0, 9.0, 20.0, 1e10)),
    varied=(elementwise(),),
    timed=stream(draw=HalfNormal(1e-6)),
    differs="Small values of erfc are judged relative to themselves; as published, an absolute 1e-5 hid them.",
)
def erfc_sqrt(input):
    """Two results per element x of input, an fp32 tensor of any shape: the pair (erfc(x), sqrt(x)).

    Example: erfc_sqrt([0, 4, -1]) = ([1, 1.54173e-08, 1.8427], [0, 2, nan])

    erfc(x) = 1 - erf(x) = 2/sqrt(pi) * integral over t from x to infinity of exp(-t^2); it is judged relative to its
    own size (down to 1e-38, smaller results may be zero), so that subtracting erf from 1 is not enough. sqrt of a
    negative number is NaN, of zero it is zero. Returns a tuple of two new fp32 tensors shaped like input. The input may
    be non-contiguous, 0-d or empty and is not changed; infinities and NaN in it are not tested.
    """
    return torch.erfc(input), torch.sqrt(input)
