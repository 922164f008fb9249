# parts: int8


def bmm_w8a8(input, mat2):
    # Both operands are stored with K innermost, as the int8 tensor cores want them.
    few = max(input.numel(), mat2.numel()) < 1 << 17
    return gemm8(*quantize_lines(input, few), *quantize_lines(mat2.mT, few))
