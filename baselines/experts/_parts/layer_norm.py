import triton
import triton.language as tl


@triton.jit
def _layer_norm(z, y, L, eps, WHOLE: tl.constexpr, BLOCK: tl.constexpr):
    """Standardises one row of z into y: in registers where it fits, else in three passes."""
    z += tl.program_id(0).to(tl.int64) * L
    y += tl.program_id(0).to(tl.int64) * L
    k = tl.arange(0, BLOCK)
    if WHOLE:
        v = tl.load(z + k, mask=k < L, other=0.0)
        mean = tl.sum(v, 0) / L
        d = tl.where(k < L, v - mean, 0.0)
        tl.store(y + k, d / tl.sqrt_rn(tl.sum(d * d, 0) / L + eps), mask=k < L)
    else:
        total = tl.zeros((BLOCK,), tl.float32)
        for q in range(0, L, BLOCK):
            total += tl.load(z + q + k, mask=q + k < L, other=0.0)
        mean = tl.sum(total, 0) / L
        total = tl.zeros((BLOCK,), tl.float32)
        for q in range(0, L, BLOCK):
            d = tl.where(q + k < L, tl.load(z + q + k, mask=q + k < L, other=0.0) - mean, 0.0)
            total += d * d
        scale = 1.0 / tl.sqrt_rn(tl.sum(total, 0) / L + eps)
        for q in range(0, L, BLOCK):
            v = tl.load(z + q + k, mask=q + k < L, other=0.0)
            tl.store(y + q + k, (v - mean) * scale, mask=q + k < L)


# For small tensors: compiled once for all sizes and strides, the other once more for every kind of them.
_layer_norm_any = triton.jit(
    _layer_norm.fn, do_not_specialize=[p.name for p in _layer_norm.params if not p.is_constexpr]
)


def layer_norm_rows(z, L, eps, y=None):
    """Rows of L of contiguous z, standardised into y or in place."""
    y = z if y is None else y
    if z.numel():
        BLOCK = min(8192, triton.next_power_of_2(L))
        kernel, whole = _layer_norm, BLOCK >= L
        if z.numel() < 1 << 17:
            kernel, whole, BLOCK = _layer_norm_any, False, 256
        kernel[(z.numel() // L,)](z, y, L, eps, WHOLE=whole, BLOCK=BLOCK, num_warps=8 if BLOCK > 1024 else 4)
    return y
