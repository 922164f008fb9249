# parts: gemm
import triton
import triton.language as tl


@triton.jit
def epilogue(acc, bias, e, f, where, s, t, MODE: tl.constexpr):
    return 1.0 / tl.sqrt_rn(acc)


def tensordot_rsqrt(a, b, dims):
    if isinstance(dims, int):
        left, right = list(range(a.dim() - dims, a.dim())), list(range(dims))
    else:
        left, right = [d % a.dim() for d in dims[0]], [d % b.dim() for d in dims[1]]
    rows = [d for d in range(a.dim()) if d not in left]
    columns = [d for d in range(b.dim()) if d not in right]
    depth = 1
    for d in left:
        depth *= a.shape[d]
    shape = [a.shape[d] for d in rows] + [b.shape[d] for d in columns]
    m = a.numel() // depth if depth else 0
    n = b.numel() // depth if depth else 0
    return gemm(a.permute(*rows, *left).reshape(m, depth), b.permute(*right, *columns).reshape(depth, n)).view(shape)
