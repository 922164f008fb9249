import torch
import triton
import triton.language as tl


@triton.jit
def _attention(
    q, k, v, y, S, D, heads, qb, qh, qs, qd, kb, kh, ks, kd, vb, vh, vs, vd, yb, yh, ys, yd, scale, reach,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """BM queries of one head: one pass over the keys with an online softmax (Dao et al., 2022).

    CAUSAL: 0 or 1, or 2 for queries that see reach more keys than causal ones do.
    """
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    # The rows with the most keys first, so that the last programs are short ones.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    m = block * BM + tl.arange(0, BM)
    n = tl.arange(0, BN)
    d = tl.arange(0, BD)
    inside = (m[:, None] < S) & (d[None, :] < D)
    queries = tl.load(q + batch * qb + head * qh + m[:, None] * qs + d[None, :] * qd, mask=inside, other=0.0)
    k += batch * kb + head * kh
    v += batch * vb + head * vh
    top = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, BD), tl.float32)
    more = reach if CAUSAL == 2 else 0
    end = tl.minimum((block + 1) * BM + more, S) if CAUSAL else S
    for n0 in range(0, end, BN):
        j = n0 + n
        keys = tl.load(k + j[None, :] * ks + d[:, None] * kd, mask=(j[None, :] < S) & (d[:, None] < D), other=0.0)
        scores = tl.dot(queries, keys, input_precision=PRECISION) * scale
        seen = (j[None, :] < S) & (j[None, :] <= m[:, None] + more) if CAUSAL else j[None, :] < S
        scores = tl.where(seen, scores, float("-inf"))
        new = tl.maximum(top, tl.max(scores, 1))
        safe = tl.where(new == float("-inf"), 0.0, new)
        p = tl.exp2(scores - safe[:, None])
        shrink = tl.exp2(top - safe)
        total = total * shrink + tl.sum(p, 1)
        values = tl.load(v + j[:, None] * vs + d[None, :] * vd, mask=(j[:, None] < S) & (d[None, :] < D), other=0.0)
        acc = tl.dot(p.to(values.dtype), values, acc * shrink[:, None], input_precision=PRECISION)
        top = new
    acc = acc / total[:, None]
    tl.store(y + batch * yb + head * yh + m[:, None] * ys + d[None, :] * yd, acc.to(y.dtype.element_ty), mask=inside)


# For small tensors: compiled once for all sizes and strides, the other once more for every kind of them.
_attention_any = triton.jit(_attention.fn, do_not_specialize=[p.name for p in _attention.params if not p.is_constexpr])


def attention(q, k, v, causal=False, softmax_scale=None, *, out=None):
    B, H, S, D = q.shape
    y = torch.empty((B, H, S, D), dtype=q.dtype, device=q.device) if out is None else out
    if y.numel():
        half = q.dtype != torch.float32
        BD = max(16, triton.next_power_of_2(D))
        BM, BN = (128, 64) if half else (64, 32)
        kernel, kind = _attention, int(causal)
        if S <= 128:
            BM, BN = 32, 32
        warps = 8 if BM * BD >= 128 * 128 else 4
        if q.numel() < 1 << 17:
            kernel, kind, BM, BN, BD = _attention_any, 2, 32, 32, max(64, BD)
            warps = BD // 16
        # exp2 is the faster exponential: the factor log2(e) goes into the scale.
        scale = (D**-0.5 if softmax_scale is None else softmax_scale) * 1.4426950408889634
        kernel[(triton.cdiv(S, BM), B * H)](
            q, k, v, y, S, D, H, *q.stride(), *k.stride(), *v.stride(), *y.stride(), scale, 0 if causal else S,
            CAUSAL=kind, PRECISION="ieee" if half else "tf32x3", BM=BM, BN=BN, BD=BD, num_warps=warps, num_stages=2,
        )  # fmt: skip
    return y
