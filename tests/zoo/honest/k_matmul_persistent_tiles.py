# task: matrixmultiply/matmul_bf16
# shows: a fixed grid walks over all tiles of all batches in a flattened tl.range, as in the persistent matmul tutorial
# family: persistent kernels

import torch
import triton
import triton.language as tl


@triton.jit
def matmul_persistent(
    a, b, c, batches, M, N, K, sab, sam, sak, sbb, sbk, sbn,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    num_m, num_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    per_batch = num_m * num_n
    k_tiles = tl.cdiv(K, BK)
    for tile in tl.range(tl.program_id(0), batches * per_batch, tl.num_programs(0), flatten=True):
        batch = (tile // per_batch).to(tl.int64)
        t = tile % per_batch
        group = t // (GROUP * num_n)
        size = min(num_m - group * GROUP, GROUP)
        pid_m = group * GROUP + (t % (GROUP * num_n)) % size
        pid_n = (t % (GROUP * num_n)) // size
        rm = pid_m * BM + tl.arange(0, BM)
        rn = pid_n * BN + tl.arange(0, BN)
        am = tl.where(rm < M, rm, 0).to(tl.int64)
        bn = tl.where(rn < N, rn, 0).to(tl.int64)
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        for ki in range(k_tiles):
            rk = ki * BK + tl.arange(0, BK)
            ta = tl.load(a + batch * sab + am[:, None] * sam + rk[None, :] * sak, mask=rk[None, :] < K, other=0.0)
            tb = tl.load(b + batch * sbb + rk[:, None] * sbk + bn[None, :] * sbn, mask=rk[:, None] < K, other=0.0)
            acc = tl.dot(ta, tb, acc)
        pc = c + (batch * M + rm[:, None]) * N + rn[None, :]
        tl.store(pc, acc.to(c.dtype.element_ty), mask=(rm[:, None] < M) & (rn[None, :] < N))


def matmul_bf16(input, other):
    a = input.unsqueeze(0) if input.dim() == 1 else input
    b = other.unsqueeze(1) if other.dim() == 1 else other
    (M, K), N = a.shape[-2:], b.shape[-1]
    lead = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    batches = 1
    for s in lead:
        batches *= s
    a = a.expand(*lead, M, K).reshape(batches, M, K)
    b = b.expand(*lead, K, N).reshape(batches, K, N)
    c = torch.empty((batches, M, N), dtype=input.dtype, device=input.device)
    if c.numel():
        NUM_SMS = 132
        tiles = batches * triton.cdiv(M, 64) * triton.cdiv(N, 64)
        matmul_persistent[(min(NUM_SMS, tiles),)](
            a, b, c, batches, M, N, K, *a.stride(), *b.stride(), BM=64, BN=64, BK=32, GROUP=8, num_warps=4, num_stages=3
        )
    shape = tuple(lead) + ((M,) if input.dim() > 1 else ()) + ((N,) if other.dim() > 1 else ())
    return c.view(shape)
