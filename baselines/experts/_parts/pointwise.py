import torch
import triton
import triton.language as tl


@triton.jit
def _unary(x, y, n, s, t, MODE: tl.constexpr, BLOCK: tl.constexpr):
    """y = op(x) over n elements; the expert's file defines op."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    tl.store(y + offsets, op(tl.load(x + offsets, mask=inside), s, t, MODE), mask=inside)


@triton.jit
def _binary(a, b, y, n, s, t, MODE: tl.constexpr, BLOCK: tl.constexpr):
    """y = op(a, b) over n elements."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    v, w = tl.load(a + offsets, mask=inside), tl.load(b + offsets, mask=inside)
    tl.store(y + offsets, op(v, w, s, t, MODE), mask=inside)


@triton.jit
def _ternary(a, b, c, y, n, s, t, MODE: tl.constexpr, BLOCK: tl.constexpr):
    """y = op(a, b, c) over n elements."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    u, v, w = tl.load(a + offsets, mask=inside), tl.load(b + offsets, mask=inside), tl.load(c + offsets, mask=inside)
    tl.store(y + offsets, op(u, v, w, s, t, MODE), mask=inside)


def pointwise(*inputs, out=None, dtype=None, s=0.0, t=0.0, mode=0, bytes=16):
    """op of one, two or three tensors of equal or broadcastable shapes; s, t (numbers) and mode are handed to op.

    bytes is what a thread stores: 16 is best for cheap operations, more of it hides the latency of long ones.
    """
    shape = torch.broadcast_shapes(*[x.shape for x in inputs])
    xs = [x.expand(shape).contiguous() for x in inputs]
    y = torch.empty(shape, dtype=dtype or xs[0].dtype, device=xs[0].device) if out is None else out
    target = y if y.is_contiguous() else torch.empty(shape, dtype=y.dtype, device=y.device)
    n = target.numel()
    if n:
        kernel = (_unary, _binary, _ternary)[len(xs) - 1]
        BLOCK = 128 * bytes // target.element_size()
        kernel[(triton.cdiv(n, BLOCK),)](*xs, target, n, s, t, MODE=mode, BLOCK=BLOCK, num_warps=4)
    if target is not y:
        y.copy_(target)
    return y
