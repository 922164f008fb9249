# parts: gelu, welford
"""One pass over the input, whose activations nobody stores: each tile takes its mean and deviations in registers.

Tiles (and, where few long reductions would not fill a GPU, the splits of them in a second launch) are joined by mean,
squared deviations and count. The sums cost three operations an element, Welford's update a division.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def _pieces(
    x, y, outputs, n, inner, chunk, correction, TANH: tl.constexpr, DONE: tl.constexpr, BN: tl.constexpr,
    BO: tl.constexpr,
):  # fmt: skip
    """One split of the middle axis of (outer, n, inner), for BO outputs: the deviation, or the three numbers of it."""
    split = tl.program_id(1)
    o = tl.program_id(0).to(tl.int64) * BO + tl.arange(0, BO)
    first = (o // inner) * n * inner + o % inner
    m = tl.zeros((BO,), tl.float32)
    q = tl.zeros((BO,), tl.float32)
    k = tl.zeros((BO,), tl.float32)
    end = tl.minimum(n, (split + 1) * chunk)
    for r0 in range(split * chunk, end, BN):
        r = r0 + tl.arange(0, BN)
        inside = (r < end)[:, None] & (o < outputs)[None, :]
        v = tl.load(x + first[None, :] + r[:, None].to(tl.int64) * inner, mask=inside, other=0.0)
        g = gelu_of(v, TANH)  # gelu_of(0) = 0
        count = tl.minimum(end - r0, BN).to(tl.float32)
        mean = tl.sum(g, 0) / count
        d = tl.where(inside, g - mean[None, :], 0.0)
        m, q, k = combine(m, q, k, mean, tl.sum(d * d, 0), count)
    if DONE:
        tl.store(y + o, tl.sqrt_rn(q / (n - correction)), mask=o < outputs)
    else:
        at = y + (split * 3).to(tl.int64) * outputs + o
        tl.store(at, m, mask=o < outputs)
        tl.store(at + outputs, q, mask=o < outputs)
        tl.store(at + 2 * outputs, k, mask=o < outputs)


@triton.jit
def _join(parts, y, outputs, n, splits, correction, BS: tl.constexpr, BO: tl.constexpr):
    o = tl.program_id(0).to(tl.int64) * BO + tl.arange(0, BO)
    s = tl.arange(0, BS)
    inside = (s < splits)[:, None] & (o < outputs)[None, :]
    at = parts + (s * 3)[:, None].to(tl.int64) * outputs + o[None, :]
    m = tl.load(at, mask=inside, other=0.0)
    q = tl.load(at + outputs, mask=inside, other=0.0)
    k = tl.load(at + 2 * outputs, mask=inside, other=0.0)
    m, q, k = tl.reduce((m, q, k), 0, combine)
    tl.store(y + o, tl.sqrt_rn(q / (n - correction)), mask=o < outputs)


# For small tensors: compiled once for all sizes and strides, the other once more for every kind of them.
_pieces_any = triton.jit(_pieces.fn, do_not_specialize=[p.name for p in _pieces.params if not p.is_constexpr])


def fused_gelu_std(input, dim=None, keepdim=False, correction=1, approximate="none", out=None):
    x = input.contiguous()
    rank = x.dim()
    dims = range(rank) if dim is None else (dim % rank,)
    outer = n = inner = 1
    for i, size in enumerate(x.shape):
        if i in dims:
            n *= size
        elif i < dims[0]:
            outer *= size
        else:
            inner *= size
    shape = [1 if i in dims else size for i, size in enumerate(x.shape) if keepdim or i not in dims]
    y = torch.empty(shape, dtype=x.dtype, device=x.device) if out is None else out
    target = y if y.is_contiguous() else torch.empty(shape, dtype=x.dtype, device=x.device)
    outputs = outer * inner
    if outputs:
        if inner > 1:
            BO = min(128, triton.next_power_of_2(outputs))
            BN = min(4096 // BO, triton.next_power_of_2(n))
        else:
            BN = min(4096, triton.next_power_of_2(n))
            BO = min(4096 // BN, 64, triton.next_power_of_2(outputs))
        kernel, few = _pieces, x.numel() < 1 << 17
        if few:
            kernel, BO, BN = _pieces_any, 32 if inner > 1 else 4, 32 if inner > 1 else 256
        programs = triton.cdiv(outputs, BO)
        splits = max(1, min(triton.cdiv(n, 2 * BN), 1056 // programs))
        splits = 1 if few else splits
        chunk = triton.cdiv(triton.cdiv(n, splits), BN) * BN
        splits = triton.cdiv(n, chunk)
        parts = torch.empty((splits, 3, outputs), dtype=x.dtype, device=x.device) if splits > 1 else target
        kernel[(programs, splits)](
            x, parts, outputs, n, inner, chunk, correction, TANH=approximate == "tanh", DONE=splits == 1, BN=BN, BO=BO,
            num_warps=8 if BN * BO >= 2048 else 4,
        )  # fmt: skip
        if splits > 1:
            BS = triton.next_power_of_2(splits)
            BO = min(max(1, 2048 // BS), triton.next_power_of_2(outputs))
            _join[(triton.cdiv(outputs, BO),)](parts, target, outputs, n, splits, correction, BS=BS, BO=BO)
    if target is not y:
        y.copy_(target)
    return y
