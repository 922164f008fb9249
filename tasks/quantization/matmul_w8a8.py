"""quantization/matmul_w8a8."""

from kbx_env.tasks._schemes import int8_symmetric, operand
from kbx_env.tasks._varied import large_factor, longs, sizes

from kbx_env.spec.criteria import QuantizationScheme
from kbx_env.spec.task import Case, Choice, Constant, Cost, Literal, Normal, Outlier, Paper, T, task


@task(
    difficulty=3,
    takes={"input": T("M K"), "weight": T("K N")},
    truth=QuantizationScheme(operands="int8", accumulate="int32", least="2 * numel(result) * K"),
    cost=Cost(flops="2 * M * N * K"),
    paper=Paper(cosine=0.95, l1=0.05, rmse=0.1),
    differs="Judged against the stated int8 scheme itself, with evidence of an int8 product; as published, the check "
    "compared with the unquantized product and failed honest int8 kernels in 39 of 40 calls while fp32 passed.",
    cases=(
        Case({"M": 1, "K": 2, "N": 3}, draws={"input": Literal(1, 2), "weight": Literal(-1, 0.5, 3, 2, 1, -3)}),
        Case({"M": 1, "K": 1, "N": 1}, draws={"input": Literal(127), "weight": Literal(-127)}),
        Case({"M": 1, "K": 2, "N": 2}, draws={"input": Literal(-1, 1), "weight": Literal(0, 1)}),
        Case({"M": 32, "K": 256, "N": 128}, draw=Normal(clamp=10)),
        Case({"M": 64, "K": 128, "N": 64}, draw=Outlier(p=0.01, clamp=10)),
        Case({"M": 17, "K": 77, "N": 33}, draw=Outlier(p=0.01, scale=1000)),
        # Many rows: kernels walk the tiles in groups of rows, of which the last one is not full. Results of one product.
        Case({"M": 296, "K": 1, "N": 445}),
        Case({"M": 40, "K": 96, "N": 50}, layouts={"input": "transposed", "weight": "transposed"}),
        Case({"M": 9, "K": 130, "N": 20}, draw=Normal(scale=1e-6)),
        Case({"M": 16, "K": 32, "N": 16}, draws={"input": Constant(0)}),
        Case({"M": 24, "K": 48, "N": 24}, draw=Choice(0, 0, 0, 1, -3)),
        Case({"M": 0, "K": 8, "N": 8}),
        Case({"M": 29, "K": 190, "N": 70}, draw=Normal(scale=7), held=True),
    ),
    varied=(
        sizes(longs({"M": (2, 20), "K": (2, 40), "N": (2, 20)}, {"M": 140, "K": 1100, "N": 140}, most=500_000)),
        sizes(lambda p: large_factor(p, "M", "K", "N")),
    ),
    timed=tuple(Case({"M": m, "K": 2 * m, "N": 4 * m}) for m in (256, 512, 1024)),
)
def matmul_w8a8(input, weight):
    """fp32 (M, K) @ (K, N) -> fp32 (M, N), computed with int8 operands and int32 accumulation.

    Example: matmul_w8a8([[1, 3]], [[1], [-0.5]]) = [[-0.519685]]

    Each row of input and each column of weight is quantized symmetrically: scale = max|x| / 127 (1 if all are zero),
    q = round(x / scale) to int8, half to even, in fp32. The int8 product accumulates exactly in int32 (tl.dot on int8);
    y[m, n] = acc[m, n] * scale_input[m] * scale_weight[n] in fp32.

    Quotients within 4 units in the last place of a half may round either way, so that the fast division of the GPU and
    a product with 127 / max are accepted too. A float product fails, and so does a product more exact than the scheme.
    A new tensor is returned; inputs may have any strides; M may be 0.
    """
    (qa, sa), (qb, sb) = int8_symmetric(input, dim=1), int8_symmetric(weight, dim=0)
    return (operand(qa) @ operand(qb)) * sa * sb
