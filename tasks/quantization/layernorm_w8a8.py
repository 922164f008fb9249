"""quantization/layernorm_w8a8."""

import math

import torch.nn.functional as F
from kbx_env.tasks._schemes import int8_symmetric, operand
from kbx_env.tasks._varied import sizes

from kbx_env.spec.criteria import QuantizationScheme
from kbx_env.spec.task import Case, Choice, Constant, Cost, Normal, Outlier, Paper, T, Uniform, task

AFFINE = ("weight", "bias")


def _case(lead, shape, args=None, **more):
    given = more.pop("given", AFFINE)
    return Case({"*": lead, "*n": shape}, {"normalized_shape": list(shape)} | (args or {}), given=given, **more)


def _eager(input, normalized_shape, weight=None, bias=None, eps=1e-5):
    return F.layer_norm(input, normalized_shape, weight, bias, eps)


@task(
    difficulty=3,
    takes={"input": T("* *n"), "weight": T("*n", optional=True), "bias": T("*n", optional=True)},
    truth=QuantizationScheme(
        operands="int8", accumulate="fp32", ulps=256.0, dots=("f32->i8", "i32->i8"), disturb="roundings",
        least="numel(input)",
    ),
    cost=Cost(flops="8 * numel(input)", least="2 * numel(input)"),
    paper=Paper(cosine=0.95, l1=0.05, rmse=0.1),
    eager=_eager,
    differs="The scheme is stated, and a row's statistics are those of its quantized values; as published nothing said what was to "
    "be 8 bits wide, and a plain fp32 layer norm passed. The timed baseline is the unquantized layer norm.",
    cases=(
        _case((2,), (8,), given=()),
        _case((1,), (4,), {"eps": 1e-10}, given=()),
        _case((16,), (128,)),
        _case((3, 5), (6, 10), draw=Outlier(p=0.02, scale=30)),
        _case((7,), (1025,), {"eps": 0.1}, given=("weight",)),
        _case((9,), (77,), draws={"input": Normal(scale=1e-6)}),
        _case((9,), (40,), draws={"weight": Normal(scale=1e-5), "bias": Normal(scale=1e-5)}),
        _case((9,), (77,), draws={"input": Normal(scale=1000), "weight": Normal(scale=100), "bias": Normal(scale=100)}),
        _case((5,), (40,), draws={"input": Normal(mean=100)}),
        _case((8,), (150,), layouts={"input": "transposed", "weight": "strided"}),
        _case((6,), (50,), layouts={"input": "strided"}, given=("bias",)),
        _case((3,), (16,), draws={"input": Constant(0)}),
        _case((), (30,), draws={"weight": Uniform(0.5, 2)}),
        _case((0,), (8,)),
        _case((5,), (40,), draws=dict.fromkeys(("input", "weight"), Choice(0, 0.3, 1, -1, 0.7))),
        _case((4, 3), (5, 37), draw=Normal(scale=3), held=True),
    ),
    varied=(
        sizes(lambda p: {"*": p.shape(2, 3, 20), "*n": p.shape(2, 2, 60)}, lambda p,
              s: {"normalized_shape": list(s["*n"]), "eps": p.real(0.001, 0.5)}),
        sizes(lambda p: {"*": (p.whole(1, 3),), "*n": (p.whole(4300, 4500),)}, lambda p, s: {"normalized_shape": list(s["*n"])}),
    ),
    timed=tuple(_case((b,), (n,)) for b, n in ((4096, 4096), (16384, 4096), (16384, 8192))),
)  # fmt: skip
def layernorm_w8a8(input, normalized_shape, weight=None, bias=None, eps=1e-5):
    """Layer norm of fp32 rows whose values and weight are rounded to int8; fp32 result.

    Example: layernorm_w8a8([[127, 0, -1, 10.4]], [4], weight=[1, 1, 1, 0.5]) =
        [[1.72652, -0.631201, -0.649766, -0.224531]]

    normalized_shape is a list equal to the last axes of input; a row is everything over these axes. Each row of input is
    quantized symmetrically: scale = max|x| / 127 (1 if all are zero), q = round(x / scale) to int8, half to even, in fp32;
    weight (of the shape normalized_shape, or None, the default, for 1) likewise with one scale over the whole tensor.
    Then, in fp32, with x' = q * scale and w' = q_weight * scale_weight: y = (x' - mean(x')) / sqrt(variance(x') + eps)
    * w' + bias (of the same shape, or None, the default, for 0), where mean and variance (divided by the count) are
    those of the quantized row.

    Quotients within 4 units in the last place of a half may round either way. The values must really be converted to
    int8. A result more exact than the scheme fails, and so does a coarser one. A new tensor is returned; inputs may
    have any strides; there may be no row (empty input).
    """
    axes = tuple(range(-len(normalized_shape), 0))
    q, scale = int8_symmetric(input, dim=axes)
    if not math.prod(input.shape):
        return input.clone()
    x = operand(q) * scale
    centred = x - x.mean(axes, keepdim=True)
    y = centred / (centred.square().mean(axes, keepdim=True) + eps).sqrt()
    if weight is not None:
        qw, sw = int8_symmetric(weight, dim=tuple(range(weight.dim())))
        y = y * (operand(qw) * sw)
    return y if bias is None else y + bias
