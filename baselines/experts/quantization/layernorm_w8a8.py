# parts: int8
import torch
import triton
import triton.language as tl


@triton.jit
def _norm8(
    x, qw, sw, bias, y, L, eps, WEIGHT: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One row in registers: int8, exact sums of integers, then the normalised row."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    v = tl.load(x + row * L + k, mask=k < L, other=0.0)
    top = tl.max(tl.abs(v), 0)
    scale = tl.where(top == 0.0, 1.0, tl.div_rn(top, 127.0))
    q = _round8(v, tl.broadcast_to(scale, (BLOCK,))).to(tl.int32)
    # Sums of integers are exact: n * sum(q^2) - sum(q)^2 loses nothing in 64 bits.
    total = tl.sum(q, 0).to(tl.int64)
    squares = tl.sum((q * q).to(tl.int64), 0)
    spread = (squares * L - total * total).to(tl.float64) / L / L
    # (x' - mean) / sqrt(var + eps), both divided by the scale's square
    s = scale.to(tl.float64)
    inverse = (s / tl.sqrt(spread * s * s + eps)).to(tl.float32)
    # L times the distance from the mean is a whole number too.
    r = (q.to(tl.int64) * L - total).to(tl.float32) / L * inverse
    if WEIGHT:
        r = r * (tl.load(qw + k, mask=k < L, other=0).to(tl.float32) * tl.load(sw))
    if BIAS:
        r = r + tl.load(bias + k, mask=k < L, other=0.0)
    tl.store(y + row * L + k, r, mask=k < L)


# For small tensors: compiled once for all sizes and strides, the other once more for every kind of them.
_norm8_any = triton.jit(_norm8.fn, do_not_specialize=[p.name for p in _norm8.params if not p.is_constexpr])


def layernorm_w8a8(input, normalized_shape, weight=None, bias=None, eps=1e-5):
    x = input.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    L = 1
    for size in normalized_shape:
        L *= size
    few = x.numel() < 1 << 17
    if x.numel():
        qw, sw = quantize_lines(weight.reshape(1, 1, L), few) if weight is not None else (x, x)
        b = x if bias is None else bias.contiguous()
        BLOCK = max(256 if few else 1, triton.next_power_of_2(L))
        kernel = _norm8_any if few else _norm8
        kernel[(x.numel() // L,)](
            x, qw, sw, b, y, L, eps, WEIGHT=weight is not None, BIAS=bias is not None, BLOCK=BLOCK,
            num_warps=8 if BLOCK > 2048 else 4,
        )  # fmt: skip
    return y
