# parts: int8


def matmul_w8a8(input, weight):
    # Both operands are stored with K innermost, as the int8 tensor cores want them.
    few = max(input.numel(), weight.numel()) < 1 << 17
    left, right = quantize_lines(input.unsqueeze(0), few), quantize_lines(weight.mT.unsqueeze(0), few)
    return gemm8(*left, *right).squeeze(0)
