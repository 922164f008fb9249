import torch
import triton
import triton.language as tl


@triton.jit
def _softmax(
    x, y, N, INNER, s, t, LOG: tl.constexpr, MODE: tl.constexpr, WHOLE: tl.constexpr, BN: tl.constexpr, BI: tl.constexpr
):
    """finish(softmax) along the middle axis of contiguous x (outer, N, INNER); the expert defines finish(y, where, ...)."""
    blocks = tl.cdiv(INNER, BI)
    outer = (tl.program_id(0) // blocks).to(tl.int64)
    i = tl.program_id(0) % blocks * BI + tl.arange(0, BI)
    base = outer * N * INNER + i[:, None]
    n = tl.arange(0, BN)
    columns = i[:, None] < INNER
    if WHOLE:
        v = tl.load(x + base + n[None, :] * INNER, mask=columns & (n[None, :] < N), other=float("-inf")).to(tl.float32)
        top = tl.max(v, 1)
        total = tl.sum(tl.exp(v - top[:, None]), 1)
    else:
        top = tl.full((BI,), float("-inf"), tl.float32)
        total = tl.zeros((BI,), tl.float32)
        for n0 in range(0, N, BN):
            k = n0 + n[None, :]
            v = tl.load(x + base + k * INNER, mask=columns & (k < N), other=float("-inf")).to(tl.float32)
            new = tl.maximum(top, tl.max(v, 1))
            safe = tl.where(new == float("-inf"), 0.0, new)
            total = total * tl.exp(top - safe) + tl.sum(tl.exp(v - safe[:, None]), 1)
            top = new
    for n0 in range(0, N, BN):
        k = n0 + n[None, :]
        where = base + k * INNER
        inside = columns & (k < N)
        v = tl.load(x + where, mask=inside, other=0.0).to(tl.float32)
        if LOG:
            v = (v - top[:, None]) - tl.log(total)[:, None]
        else:
            v = tl.exp(v - top[:, None]) / total[:, None]
        tl.store(y + where, finish(v, where, s, t, MODE), mask=inside)


# For small tensors: compiled once for all sizes and strides, the other once more for every kind of them.
_softmax_any = triton.jit(_softmax.fn, do_not_specialize=[p.name for p in _softmax.params if not p.is_constexpr])


def softmax_along(x, dim, y=None, log=False, s=0.0, t=0.0, mode=0, dtype=None, few=None):
    """Softmax (or its logarithm) of contiguous x along dim, into y (which may be x); sums in fp32.

    few: whether the task's tensors are small (see _softmax_any); by default decided by x.
    """
    y = torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device) if y is None else y
    if x.numel() == 0:
        return y
    dim = dim % max(x.dim(), 1)
    N = x.shape[dim] if x.dim() else 1
    INNER = 1
    for size in x.shape[dim + 1 :]:
        INNER *= size
    outer = x.numel() // (N * INNER)
    BN = min(4096 if INNER == 1 else 64, triton.next_power_of_2(N))
    whole = BN >= N
    BI = 1 if INNER == 1 else min(32, triton.next_power_of_2(INNER))
    kernel = _softmax
    if x.numel() < 1 << 17 if few is None else few:
        kernel, whole = _softmax_any, False
        BN, BI = (512, 1) if INNER == 1 else (64, 32)
    kernel[(outer * triton.cdiv(INNER, BI),)](
        x, y, N, INNER, s, t, LOG=log, MODE=mode, WHOLE=whole, BN=BN, BI=BI, num_warps=8 if BN * BI >= 2048 else 4
    )
    return y
