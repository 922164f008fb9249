import torch
import triton
import triton.language as tl


@triton.jit
def _gemm(
    a, b, c, bias, e, f, M, N, K, ab, am, ak, bb, bk, bn, cb, cm, cn, eb, em, en, fb, fm, fn, s, t,
    MODE: tl.constexpr, BIAS: tl.constexpr, E: tl.constexpr, F: tl.constexpr, PRECISION: tl.constexpr,
    EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """c = epilogue(a @ b, ...) for a batch; the expert's file defines epilogue(acc, bias, e, f, where, s, t, MODE)."""
    rows, columns = tl.cdiv(M, BM), tl.cdiv(N, BN)
    pid = tl.program_id(0) % (rows * columns)
    batch = (tl.program_id(0) // (rows * columns)).to(tl.int64)
    # Programs walk down GROUP rows of tiles at a time, so that tiles of b are still in L2 when they are needed again.
    first = pid // (GROUP * columns) * GROUP
    height = tl.minimum(rows - first, GROUP)
    m = (first + pid % (GROUP * columns) % height) * BM + tl.arange(0, BM)
    n = pid % (GROUP * columns) // height * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    # Rows and columns beyond the edge repeat others, so that loads need no mask but the one along K.
    pa = a + batch * ab + (m % M)[:, None].to(tl.int64) * am + k[None, :] * ak
    pb = b + batch * bb + k[:, None] * bk + (n % N)[None, :].to(tl.int64) * bn
    acc = tl.zeros((BM, BN), tl.float32)
    for k0 in range(0, K, BK):
        if EVEN:
            x, y = tl.load(pa), tl.load(pb)
        else:
            x = tl.load(pa, mask=k[None, :] < K - k0, other=0.0)
            y = tl.load(pb, mask=k[:, None] < K - k0, other=0.0)
        acc = tl.dot(x, y, acc, input_precision=PRECISION)
        pa += BK * ak
        pb += BK * bk
    inside = (m[:, None] < M) & (n[None, :] < N)
    row, column = m[:, None].to(tl.int64), n[None, :].to(tl.int64)
    shift = tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32) if BIAS else tl.zeros((BN,), tl.float32)
    u = tl.load(e + batch * eb + row * em + column * en, mask=inside, other=0.0).to(tl.float32) if E else 0.0
    v = tl.load(f + batch * fb + row * fm + column * fn, mask=inside, other=0.0).to(tl.float32) if F else 0.0
    where = (batch * M + row) * N + column
    tl.store(
        c + batch * cb + row * cm + column * cn, epilogue(acc, shift[None, :], u, v, where, s, t, MODE), mask=inside
    )


@triton.jit
def _thin(
    a, b, c, bias, e, f, M, N, K, am, ak, bk, bn, cm, cn, em, en, fm, fn, s, t,
    MODE: tl.constexpr, BIAS: tl.constexpr, E: tl.constexpr, F: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One row of a: a product of vectors for every column of b. Programs of the same columns follow each other."""
    m = (tl.program_id(0) % M).to(tl.int64)
    n = tl.program_id(0) // M * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    acc = tl.zeros((BN, BK), tl.float32)
    pb = b + n[:, None].to(tl.int64) * bn
    for k0 in range(0, K, BK):
        x = tl.load(a + m * am + (k0 + k) * ak, mask=k0 + k < K, other=0.0).to(tl.float32)
        inside = (n[:, None] < N) & (k0 + k[None, :] < K)
        acc += tl.load(pb + (k0 + k[None, :]).to(tl.int64) * bk, mask=inside, other=0.0).to(tl.float32) * x[None, :]
    inside = n < N
    shift = tl.load(bias + n, mask=inside, other=0.0).to(tl.float32) if BIAS else tl.zeros((BN,), tl.float32)
    u = tl.load(e + m * em + n * en, mask=inside, other=0.0).to(tl.float32) if E else 0.0
    v = tl.load(f + m * fm + n * fn, mask=inside, other=0.0).to(tl.float32) if F else 0.0
    where = m * N + n
    tl.store(c + m * cm + n * cn, epilogue(tl.sum(acc, 1), shift, u, v, where, s, t, MODE), mask=inside)


# For small tensors: compiled once for all sizes and strides, the other once more for every kind of them.
_gemm_any = triton.jit(_gemm.fn, do_not_specialize=[p.name for p in _gemm.params if not p.is_constexpr])


def gemm(a, b, bias=None, e=None, f=None, out=None, s=0.0, t=0.0, mode=0, dtype=None):
    """a (..., M, K) @ b (..., K, N) -> epilogue of the product, bias (N,) and the tensors e, f (broadcast to the result).

    fp32 as three TF32 products on the tensor cores, which is as exact as fp32.
    """
    (M, K), N = a.shape[-2:], b.shape[-1]
    lead = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    c = torch.empty((*lead, M, N), dtype=dtype or a.dtype, device=a.device) if out is None else out
    if c.numel() == 0:
        return c
    target = c if c.is_contiguous() else torch.empty(c.shape, dtype=c.dtype, device=c.device)
    extra = [None if x is None else x.expand(c.shape) for x in (e, f)]
    if b.dim() == 2 and a.dim() > 2:
        # One tall matrix instead of a batch.
        a, shape = a.reshape(1, -1, K), (1, -1, N)
        b = b.unsqueeze(0)
    else:
        a, shape = a.expand(*lead, M, K).reshape(-1, M, K), (-1, M, N)
        b = b.expand(*lead, K, N).reshape(-1, K, N)
    flat = target.view(shape)
    e, f = (flat if x is None else x.reshape(flat.shape) for x in extra)
    batch, M = a.shape[:2]
    options = {"MODE": mode, "BIAS": bias is not None, "E": extra[0] is not None, "F": extra[1] is not None}
    bias = a if bias is None else bias.contiguous()
    if batch == 1 and M <= 2 and K >= 1024 and b.stride(1) == 1:
        _thin[(triton.cdiv(N, 4) * M,)](
            a, b, flat, bias, e, f, M, N, K, *a.stride()[1:], *b.stride()[1:], *flat.stride()[1:], *e.stride()[1:],
            *f.stride()[1:], s, t, **options, BN=4, BK=1024, num_warps=8,
        )  # fmt: skip
        return c if target is c else c.copy_(target)
    half = a.dtype != torch.float32
    tiles = ((128, 256, 64, 8), (128, 128, 64, 8)) if half else ((128, 128, 32, 8), (128, 64, 32, 4))
    if not half and M >= 256 and b.stride(-2) != 1:
        # Tensor cores read TF32 operands along K only: a transposed copy of b is cheaper than shuffling every tile.
        b = b.mT.contiguous().mT
    BM, BN, BK, warps = 32, 32, 32, 4
    # The largest tile that still gives every multiprocessor of an H200 (132) about one program.
    for tile in (*tiles, (64, 64, 32, 4)):
        if M > 32 and triton.cdiv(M, tile[0]) * triton.cdiv(N, tile[1]) * batch >= 128:
            BM, BN, BK, warps = tile
            break
    few = max(a.numel(), b.numel(), c.numel()) < 1 << 17
    kernel = _gemm_any if few else _gemm
    kernel[(triton.cdiv(M, BM) * triton.cdiv(N, BN) * batch,)](
        a, b, flat, bias, e, f, M, N, K, *a.stride(), *b.stride(), *flat.stride(), *e.stride(),
        *f.stride(), s, t, **options, PRECISION="ieee" if half else "tf32x3", EVEN=not few and K % BK == 0, BM=BM, BN=BN, BK=BK,
        GROUP=8, num_warps=warps, num_stages=3,
    )  # fmt: skip
    return c if target is c else c.copy_(target)
