import torch
import triton
import triton.language as tl


@triton.jit
def _radius(a, out, n, sb, sr, sc, N: tl.constexpr, SQUARINGS: tl.constexpr):
    """One matrix per program: the limit of |A^p|^(1/p), p = 2^SQUARINGS, by squaring.

    Equal magnitudes, complex pairs and Jordan blocks only slow the limit down like log(p) / p. Before each squaring a
    power of two is taken out, so that the exponents add up without rounding errors.
    """
    batch = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, N)
    inside = (i[:, None] < n) & (i[None, :] < n)
    b = tl.load(a + batch * sb + i[:, None].to(tl.int64) * sr + i[None, :].to(tl.int64) * sc, mask=inside, other=0.0)
    exponent = tl.full((), 0.0, tl.float64)
    weight = tl.full((), 1.0, tl.float64)
    for _ in range(SQUARINGS):
        peak = tl.max(tl.max(tl.abs(b), 1), 0)
        # The exponent bits of the peak; 127 is 2^0. A matrix of zeros stays one.
        bits = tl.where(peak > 0, (peak.to(tl.int32, bitcast=True) >> 23) & 255, 127)
        exponent += weight * (bits - 127).to(tl.float64)
        weight *= 0.5
        b = b * ((254 - bits) << 23).to(tl.float32, bitcast=True)
        b = tl.dot(b, b, input_precision="ieee")
    size = tl.sqrt(tl.sum(tl.sum(b * b, 1), 0))
    whole = tl.floor(exponent)
    rest = (exponent - whole).to(tl.float32) + tl.log2(tl.where(size > 0, size, 1.0)) * weight.to(tl.float32)
    radius = tl.exp2(rest) * tl.exp2(whole.to(tl.float32))
    tl.store(out + batch, tl.where(size > 0, radius, 0.0))


# For few matrices: compiled once for all sizes and strides, the other once more for every kind of them. In many warps,
# because few products in each thread are little code.
_radius_any = triton.jit(_radius.fn, do_not_specialize=[p.name for p in _radius.params if not p.is_constexpr])


def spectral_norm_eig(A, *, out=None):
    n = A.shape[-1]
    x = A.reshape(-1, n, n)
    y = torch.empty(A.shape[:-2], dtype=A.dtype, device=A.device) if out is None or not out.is_contiguous() else out
    if x.shape[0]:
        N = max(16, triton.next_power_of_2(n))
        kernel, warps = _radius, 1 if N == 16 else 4 if N <= 64 else 8
        if x.shape[0] < 32:
            kernel, warps, N = _radius_any, 16, max(32, N)
        kernel[(x.shape[0],)](x, y, n, *x.stride(), N=N, SQUARINGS=28, num_warps=warps)
    return y if out is None or y is out else out.copy_(y)
