# parts: int8


def bmm_w8a8(input, mat2):
    # Both operands are stored with K innermost, as the int8 tensor cores want them.
    return gemm8(*quantize_lines(input), *quantize_lines(mat2.mT))
