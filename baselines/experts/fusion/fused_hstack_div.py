import torch
import triton
import triton.language as tl


@triton.jit
def _part(x, y, n, width, total, start, divisor, MODE: tl.constexpr, BLOCK: tl.constexpr):
    """One tensor: rows of width numbers go to rows of total numbers, from column start on."""
    k = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = k < n
    v = tl.load(x + k, mask=inside, other=0)
    if x.dtype.element_ty == tl.int64 and MODE != "none":
        q = v // divisor
        r = v - q * divisor
        # Integer division truncates; the floor is one less where a remainder has the other sign.
        if MODE == "floor":
            q = tl.where((r != 0) & ((r < 0) != (divisor < 0)), q - 1, q)
        result = q
    else:
        result = tl.div_rn(v.to(tl.float32), tl.full((BLOCK,), divisor, tl.float32))
        if MODE == "floor":
            result = tl.floor(result)
        if MODE == "trunc":
            result = tl.where(result < 0, tl.ceil(result), tl.floor(result))
    tl.store(y + k // width * total + start + k % width, result, mask=inside)


# For small tensors: compiled once for all sizes and strides, the other once more for every kind of them.
_part_any = triton.jit(_part.fn, do_not_specialize=[p.name for p in _part.params if not p.is_constexpr])


def fused_hstack_div(tensors, divisor, *, rounding_mode=None, out=None):
    first = tensors[0]
    axis = 0 if first.dim() == 1 else 1
    shape = list(first.shape)
    shape[axis] = sum(t.shape[axis] for t in tensors)
    whole = first.dtype == torch.int64 and rounding_mode is not None
    dtype = first.dtype if whole or first.dtype != torch.int64 else torch.float32
    fresh = out is None or not out.is_contiguous()
    y = torch.empty(shape, dtype=dtype, device=first.device) if fresh else out
    inner = 1
    for size in shape[axis + 1 :]:
        inner *= size
    start, total = 0, shape[axis] * inner
    kernel = _part_any if y.numel() < 1 << 17 else _part
    for t in tensors:
        n, width = t.numel(), t.shape[axis] * inner
        if n:
            kernel[(triton.cdiv(n, 1024),)](
                t.contiguous(), y, n, width, total, start, int(divisor) if whole else float(divisor),
                MODE=rounding_mode or "none", BLOCK=1024, num_warps=8,
            )  # fmt: skip
        start += width
    return y if out is None or out is y else out.copy_(y)
