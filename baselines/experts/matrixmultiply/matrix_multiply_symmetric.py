# parts: gemm
import triton
import triton.language as tl


@triton.jit
def epilogue(acc, bias, e, f, where, s, t, MODE: tl.constexpr):
    return s * acc + t * e


def matrix_multiply_symmetric(A, B, C, alpha, beta):
    first = gemm(A, B, e=C, s=float(alpha), t=float(beta))
    return gemm(first, first.mT, e=first, s=float(alpha), t=float(beta))
