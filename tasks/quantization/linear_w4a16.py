"""quantization/linear_w4a16."""

import torch.nn.functional as F
from kbx_env.tasks._schemes import int4_symmetric, packed
from kbx_env.tasks._varied import LARGE, SMALL_BIAS, TINY, balanced, longs, sizes

from kbx_env.spec.criteria import QuantizationScheme
from kbx_env.spec.task import Case, Choice, Constant, Cost, Literal, Normal, Outlier, Paper, T, task

BIAS = ("bias",)


def _case(b, k, o, **more):
    return Case({"B": b, "K": k, "O": o}, **more)


def _eager(input, weight, bias=None):
    return F.linear(input, weight, bias)


@task(
    difficulty=4,
    takes={"input": T("B K", "f16"), "weight": T("O K", "f16"), "bias": T("O", "f16", optional=True)},
    truth=QuantizationScheme(
        operands="int4", accumulate="fp32", dots=("i4 in f16*f16->f32", "i4 in bf16*bf16->f32", "i4 in f32*f32->f32"),
        disturb="bytes", least="O * K / 2",
    ),
    cost=Cost(flops="2 * B * K * O"),
    paper=Paper(cosine=0.9, l1=0.1, rmse=0.15),
    eager=_eager,
    differs="Judged against the stated int4 scheme itself, with evidence that the product's weights came out of packed bytes; as "
    "published, the absolute error bound failed every faithful kernel and plain fp16 passed. The timed baseline is the "
    "unquantized product; batches are timed beside the published few rows.",
    cases=(
        _case(1, 4, 2, draws={"weight": Literal(7, -3.4, 0.6, 2, -1, 0.1, 0.9, 1)}),
        _case(1, 2, 1),
        _case(32, 128, 96, given=BIAS),
        _case(16, 64, 64, draw=Outlier(p=0.01, scale=20), given=BIAS),
        _case(17, 78, 33),
        _case(9, 130, 20, draws={"weight": Normal(scale=1e-3), "input": Normal(scale=0.01)}),
        _case(9, 64, 24, draws={"weight": Normal(scale=100)}, given=BIAS),
        _case(7, 34, 20, draws={"weight": Normal(scale=1e-5), "input": Normal(scale=1000)}),
        _case(40, 96, 50, layouts={"input": "transposed", "weight": "transposed", "bias": "strided"}, given=BIAS),
        _case(11, 20, 9, layouts={"input": "strided", "weight": "strided"}),
        _case(8, 32, 16, draws={"weight": Constant(0)}, given=BIAS),
        _case(24, 48, 24, draws={"weight": Choice(0, 0, 0, 1, -3)}),
        # A row that is longer than two blocks, but not than three.
        _case(3, 300, 10),
        _case(0, 8, 8),
        _case(29, 190, 70, given=BIAS, held=True),
    ),
    varied=(
        sizes(longs({"B": (2, 20), "O": (2, 30)}, {"B": 150, "O": 300}, lambda p, s: {"K": 2 * p.whole(2, 40)})),
        sizes(lambda p: {"B": p.whole(2, 8), "O": p.whole(2, 8), "K": 2 * p.whole(500, 600)},
              draws=lambda p, s: balanced(p, "weight", "input")),
        # A weight of 2**19 elements and more.
        sizes(lambda p: {"B": p.whole(2, 8), "O": p.whole(512, 530), "K": 1026}),
        # And one of short rows.
        sizes(lambda p: {"B": p.whole(2, 8), "O": p.whole(2190, 2200), "K": 2 * p.whole(120, 126)}),
        *(
            sizes(lambda p: {"B": p.whole(2, 5), "O": p.whole(9, 20), "K": 2 * p.whole(2, 5)}, full=True, draws=draws)
            for draws in ({"bias": LARGE}, {"input": TINY, "bias": SMALL_BIAS})
        ),
    ),
    timed=tuple(_case(b, 4096, o, given=BIAS) for b, o in ((32, 16384), (2048, 4096), (4096, 8192))),
)  # fmt: skip
def linear_w4a16(input, weight, bias=None):
    """input @ weight^T + bias in fp16, with the weights rounded to int4 and packed two to a byte.

    Example: linear_w4a16([[1, 10]], [[7, -3.4]]) = [[-23]]

    input (B, K), weight (O, K), bias (O,) or None, all fp16; K is even. Each row of weight is quantized symmetrically in
    fp32: scale = max|w| / 7 (1 if all are zero), q = round(w / scale) to -7 .. 7, half to even. Two neighbours along K share
    a byte: the even one in the low four bits, the odd one in the high four, both in two's complement. The kernel of the
    product unpacks them from bytes; y[b, o] = (sum over k of input[b, k] * q[o, k]) * scale[o] + bias[o] with fp32
    accumulation, rounded once to fp16.

    Quotients within 4 units in the last place of a half may round either way. A product of the unquantized weights fails,
    and so does one whose weights were never packed. A new fp16 tensor (B, O) is returned; inputs may have any strides; B
    may be 0.
    """
    q, scale = int4_symmetric(weight, dim=1)
    y = (input.to(q.dtype) @ packed(q).mT) * scale.mT
    y = y if bias is None else y + bias.to(q.dtype)
    return y.to(input.dtype)
