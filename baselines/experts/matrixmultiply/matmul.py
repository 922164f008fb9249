# parts: gemm, matmul
import triton
import triton.language as tl


@triton.jit
def epilogue(acc, bias, e, f, where, s, t, MODE: tl.constexpr):
    return acc


def matmul(tensor1, tensor2):
    return product(tensor1, tensor2)
