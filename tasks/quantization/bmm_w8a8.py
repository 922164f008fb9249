"""quantization/bmm_w8a8."""

import torch
from kbx_env.tasks._schemes import int8_symmetric, operand
from kbx_env.tasks._varied import large_factor, longs, sizes

from kbx_env.spec.criteria import QuantizationScheme
from kbx_env.spec.task import Case, Choice, Constant, Cost, Literal, Normal, Outlier, Paper, T, task


def _case(b, m, k, n, **more):
    return Case({"B": b, "M": m, "K": k, "N": n}, **more)


@task(
    difficulty=3,
    takes={"input": T("B M K"), "mat2": T("B K N")},
    truth=QuantizationScheme(operands="int8", accumulate="int32", least="2 * numel(result) * K"),
    cost=Cost(flops="2 * B * M * N * K"),
    paper=Paper(cosine=0.95, l1=0.05, rmse=0.1),
    eager=torch.bmm,
    differs="Judged against the stated int8 scheme itself, with evidence of an int8 product; as published, the check compared "
    "with the unquantized product and failed honest int8 kernels while fp32 passed. The timed baseline is the unquantized "
    "product, torch.bmm.",
    cases=(
        _case(1, 1, 2, 3, draws={"input": Literal(1, 2), "mat2": Literal(-1, 0.5, 3, 2, 1, -3)}),
        _case(2, 1, 1, 1, draws={"input": Literal(127), "mat2": Literal(-127)}),
        _case(2, 32, 128, 48, draw=Normal(clamp=10)),
        _case(3, 40, 64, 64, draw=Outlier(p=0.01, clamp=10)),
        _case(2, 17, 77, 33, draw=Outlier(p=0.01, scale=1000)),
        _case(2, 40, 96, 50, layouts={"input": "transposed", "mat2": "transposed"}),
        _case(2, 11, 20, 9, layouts={"input": "strided", "mat2": "strided"}),
        _case(2, 9, 130, 20, draw=Normal(scale=1e-6)),
        _case(2, 16, 64, 24, draws={"input": Normal(scale=0.01), "mat2": Normal(scale=1000)}),
        _case(2, 16, 32, 16, draws={"input": Constant(0)}),
        _case(2, 24, 48, 24, draw=Choice(0, 0, 0, 1, -3)),
        # More rows of tiles than are computed together, and a rest.
        _case(2, 296, 8, 40),
        _case(0, 4, 8, 8),
        _case(3, 29, 190, 40, draw=Normal(scale=7), held=True),
    ),
    varied=(
        # 2**17 results of one product each.
        sizes(lambda p: {"B": 1, "M": p.whole(364, 380), "K": 1, "N": p.whole(364, 380)}),
        sizes(
            longs(
                {"B": (1, 2), "M": (2, 6), "K": (2, 20), "N": (2, 6)},
                {"B": 20, "M": 140, "K": 560, "N": 140},
                most=300_000,
            )
        ),
        sizes(lambda p: {"B": 1} | large_factor(p, "M", "K", "N")),
    ),
    timed=(_case(8, 256, 512, 1024), _case(16, 512, 1024, 2048), _case(16, 1024, 2048, 2048)),
)
def bmm_w8a8(input, mat2):
    """fp32 (B, M, K) @ (B, K, N) -> fp32 (B, M, N), computed with int8 operands and int32 accumulation.

    Example: bmm_w8a8([[[1, 3]]], [[[1], [-0.5]]]) = [[[-0.519685]]]

    In every matrix of the batch each row of input and each column of mat2 is quantized symmetrically: scale = max|x| / 127
    (1 if all are zero), q = round(x / scale) to int8, half to even, in fp32. The int8 product accumulates exactly in int32
    (tl.dot on int8); y[b, m, n] = acc[b, m, n] * scale_input[b, m] * scale_mat2[b, n] in fp32.

    Quotients within 4 units in the last place of a half may round either way, so that the fast division of the GPU and
    a product with 127 / max are accepted too. A float product fails, and so does a product more exact than the scheme.
    A new tensor is returned; inputs may have any strides; B may be 0.
    """
    (qa, sa), (qb, sb) = int8_symmetric(input, dim=2), int8_symmetric(mat2, dim=1)
    return (operand(qa) @ operand(qb)) * sa * sb
