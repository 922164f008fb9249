import torch
import triton
import triton.language as tl


@triton.jit
def _matvec(
    a, x, y, e, N, M, an, am, xs, es, s, t, MODE: tl.constexpr, E: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr
):
    """y = epilogue(a @ x, e): BN rows a program, a is read once; the expert's file defines epilogue(acc, e, row, s, t, MODE)."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    acc = tl.zeros((BN, BM), tl.float32)
    rows = a + n[:, None].to(tl.int64) * an
    for m0 in range(0, M, BM):
        m = m0 + tl.arange(0, BM)
        tile = tl.load(rows + m[None, :].to(tl.int64) * am, mask=(n[:, None] < N) & (m[None, :] < M), other=0.0)
        acc += tile.to(tl.float32) * tl.load(x + m * xs, mask=m < M, other=0.0).to(tl.float32)[None, :]
    u = tl.load(e + n * es, mask=n < N, other=0.0).to(tl.float32) if E else 0.0
    tl.store(y + n, epilogue(tl.sum(acc, 1), u, n, s, t, MODE), mask=n < N)


# For small tensors: compiled once for all sizes and strides, the other once more for every kind of them.
_matvec_any = triton.jit(_matvec.fn, do_not_specialize=[p.name for p in _matvec.params if not p.is_constexpr])


def matvec(a, x, e=None, dtype=None, s=0.0, t=0.0, mode=0):
    """epilogue of a (N, M) @ x (M,) and e (broadcast to N); fp32 accumulator."""
    N, M = a.shape
    y = torch.empty(N, dtype=dtype or a.dtype, device=a.device)
    extra = y if e is None else e.expand(N)
    if N:
        BN, BM = (4, 1024) if M >= 1024 else (16, 64)
        kernel = _matvec if N * M >= 1 << 17 else _matvec_any
        kernel[(triton.cdiv(N, BN),)](
            a, x, y, extra, N, M, *a.stride(), x.stride(0), extra.stride(0), s, t, MODE=mode, E=e is not None, BN=BN, BM=BM,
            num_warps=8 if M >= 1024 else 4,
        )  # fmt: skip
    return y
