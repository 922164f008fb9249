# task: matrixmultiply/matmul_fp16
# shows: descriptors made in the kernel, one set per batch; rows are copied to a 16-byte pitch and the padded result is sliced
# family: tensor descriptors

import torch
import triton
import triton.language as tl


def alloc_fn(size: int, alignment: int, stream):
    return torch.empty(size, device="cuda", dtype=torch.int8)


@triton.jit
def matmul_tma(a, b, c, M, N, K, lda, ldb, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    batch = tl.program_id(2).to(tl.int64)
    da = tl.make_tensor_descriptor(a + batch * M * lda, shape=[M, K], strides=[lda, 1], block_shape=[BM, BK])
    db = tl.make_tensor_descriptor(b + batch * K * ldb, shape=[K, N], strides=[ldb, 1], block_shape=[BK, BN])
    dc = tl.make_tensor_descriptor(c + batch * M * ldb, shape=[M, N], strides=[ldb, 1], block_shape=[BM, BN])
    m, n = tl.program_id(0) * BM, tl.program_id(1) * BN
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, K, BK):
        acc = tl.dot(da.load([m, k]), db.load([k, n]), acc)
    dc.store([m, n], acc.to(tl.float16))


def pitched(x, lead, pitch):
    batches = 1
    for s in lead:
        batches *= s
    rows, cols = x.shape[-2:]
    buf = x.new_empty((batches, rows, pitch))
    buf[:, :, :cols].copy_(x.expand(*lead, rows, cols).reshape(batches, rows, cols))
    return buf


def matmul_fp16(input, other):
    triton.set_allocator(alloc_fn)
    a = input[None, :] if input.ndim == 1 else input
    b = other[:, None] if other.ndim == 1 else other
    M, K, N = a.shape[-2], a.shape[-1], b.shape[-1]
    lead = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    lda, ldb = triton.cdiv(K, 8) * 8, triton.cdiv(N, 8) * 8
    pa, pb = pitched(a, lead, lda), pitched(b, lead, ldb)
    pc = input.new_empty((pa.shape[0], M, ldb))
    if pc.numel():
        grid = (triton.cdiv(M, 64), triton.cdiv(N, 64), pc.shape[0])
        matmul_tma[grid](pa, pb, pc, M, N, K, lda, ldb, BM=64, BN=64, BK=64, num_warps=4, num_stages=3)
    shape = tuple(lead) + ((M,) if input.ndim > 1 else ()) + ((N,) if other.ndim > 1 else ())
    return pc[:, :, :N].reshape(shape)
