# parts: int8
import torch
import triton
import triton.language as tl


@triton.jit
def _attention8(
    q, k, v, sq, sk, sv, y, S, D, scale, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr
):  # fmt: skip
    """BM queries: one pass over the keys for the maximum of each row, one for the rounded probabilities."""
    batch = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.arange(0, BN)
    d = tl.arange(0, BD)
    inside = (m[:, None] < S) & (d[None, :] < D)
    queries = tl.load(q + batch * S * D + m[:, None] * D + d[None, :], mask=inside, other=0)
    left = tl.load(sq + batch * S + m, mask=m < S, other=0.0)
    top = tl.full((BM,), float("-inf"), tl.float32)
    for n0 in range(0, S, BN):
        j = n0 + n
        keys = tl.load(
            k + batch * S * D + j[None, :] * D + d[:, None], mask=(j[None, :] < S) & (d[:, None] < D), other=0
        )
        right = tl.load(sk + batch * S + j, mask=j < S, other=0.0)
        s = tl.dot(queries, keys, out_dtype=tl.int32).to(tl.float32) * left[:, None] * right[None, :] * scale
        top = tl.maximum(top, tl.max(tl.where(j[None, :] < S, s, float("-inf")), 1))
    acc = tl.zeros((BM, BD), tl.int32)
    total = tl.zeros((BM,), tl.int32)
    for n0 in range(0, S, BN):
        j = n0 + n
        keys = tl.load(
            k + batch * S * D + j[None, :] * D + d[:, None], mask=(j[None, :] < S) & (d[:, None] < D), other=0
        )
        right = tl.load(sk + batch * S + j, mask=j < S, other=0.0)
        s = tl.dot(queries, keys, out_dtype=tl.int32).to(tl.float32) * left[:, None] * right[None, :] * scale
        p = tl.where(j[None, :] < S, 127.0 * tl.exp(s - top[:, None]), 0.0)
        # Adding 1.5 * 2^23 leaves no bits below one: the addition itself rounds half to even.
        u = ((p + 12582912.0) - 12582912.0).to(tl.int8)
        total += tl.sum(u.to(tl.int32), 1)
        # Values are stored with the keys innermost, as the int8 tensor cores want them.
        values = tl.load(
            v + batch * D * S + d[None, :] * S + j[:, None], mask=(d[None, :] < D) & (j[:, None] < S), other=0
        )
        acc = tl.dot(u, values, acc, out_dtype=tl.int32)
    gain = tl.load(sv + batch * D + d, mask=d < D, other=0.0)
    result = acc.to(tl.float32) * gain[None, :] / total.to(tl.float32)[:, None]
    tl.store(y + batch * S * D + m[:, None] * D + d[None, :], result, mask=inside)


# For small tensors: compiled once for all sizes and strides, the other once more for every kind of them.
_attention8_any = triton.jit(
    _attention8.fn, do_not_specialize=[p.name for p in _attention8.params if not p.is_constexpr]
)


def attention_w8a8(query, key, value):
    B, S, D = query.shape
    y = torch.empty((B, S, D), dtype=torch.float32, device=query.device)
    if y.numel():
        few = y.numel() < 1 << 17
        (q, sq), (k, sk), (v, sv) = (quantize_lines(x, few) for x in (query, key, value.mT))
        BM, BN = (64, 64) if S > 128 and not few else (32, 32)
        kernel = _attention8_any if few else _attention8
        kernel[(triton.cdiv(S, BM), B)](
            q, k, v, sq, sk, sv, y, S, D, D**-0.5, BM=BM, BN=BN, BD=max(64 if few else 32, triton.next_power_of_2(D)), num_warps=4,
            num_stages=2,
        )  # fmt: skip
    return y
