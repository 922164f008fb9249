# task: matrixmultiply/addmm
# shows: stream-K with flags: who begins a tile waits for the partial tiles of the programs after it; a grid no larger than the multiprocessors
# family: persistent kernels

import torch
import triton
import triton.language as tl


@triton.jit
def streamk_addmm(
    a, b, c, y, partial, flags, M, N, K, steps, share, alpha, beta,
    sam, sak, sbk, sbn, scm, scn, sym, syn, BIAS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    num_n = tl.cdiv(N, BN)
    work = tl.cdiv(M, BM) * num_n * steps
    it = pid * share
    end = tl.minimum(it + share, work)
    slot = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
    while it < end:
        tile = it // steps
        tile_end = (tile + 1) * steps
        stop = tl.minimum(tile_end, end)
        m = tile // num_n * BM + tl.arange(0, BM)
        n = tile % num_n * BN + tl.arange(0, BN)
        acc = tl.zeros((BM, BN), tl.float32)
        for s in range(it, stop):
            k = s % steps * BK + tl.arange(0, BK)
            left = tl.load(a + m[:, None] * sam + k[None, :] * sak, mask=(m[:, None] < M) & (k[None, :] < K), other=0.0)
            right = tl.load(
                b + k[:, None] * sbk + n[None, :] * sbn, mask=(k[:, None] < K) & (n[None, :] < N), other=0.0
            )
            acc = tl.dot(left, right, acc, input_precision="ieee")
        if it % steps != 0:
            # Someone before this program began the tile: leave the partial sum and raise the flag.
            tl.store(partial + pid * (BM * BN) + slot, acc)
            tl.debug_barrier()
            tl.atomic_xchg(flags + pid, 1, sem="release")
        else:
            nxt = pid + 1
            while nxt * share < tile_end:
                while tl.atomic_cas(flags + nxt, 1, 1, sem="acquire") != 1:
                    pass
                acc += tl.load(partial + nxt * (BM * BN) + slot, volatile=True)
                nxt += 1
            ok = (m[:, None] < M) & (n[None, :] < N)
            r = alpha * acc
            if BIAS:
                r += beta * tl.load(c + m[:, None] * scm + n[None, :] * scn, mask=ok, other=0.0).to(tl.float32)
            tl.store(y + m[:, None] * sym + n[None, :] * syn, r.to(y.dtype.element_ty), mask=ok)
        it = stop


def addmm(input, mat1, mat2, beta=1, alpha=1, out=None):
    (M, K), N = mat1.shape, mat2.shape[1]
    y = torch.empty((M, N), dtype=mat1.dtype, device=mat1.device) if out is None else out
    if y.numel():
        steps = triton.cdiv(K, 32)
        tiles = triton.cdiv(M, 32) * triton.cdiv(N, 32)
        share = triton.cdiv(tiles * steps, 100)
        programs = triton.cdiv(tiles * steps, share)
        partial = torch.empty((programs, 32, 32), dtype=torch.float32, device=y.device)
        flags = torch.zeros(programs, dtype=torch.int32, device=y.device)
        c = input.expand(M, N)
        streamk_addmm[(programs,)](
            mat1, mat2, c, y, partial, flags, M, N, K, steps, share, float(alpha), float(beta), *mat1.stride(), *mat2.stride(),
            *c.stride(), *y.stride(), BIAS=beta != 0, BM=32, BN=32, BK=32, launch_cooperative_grid=True,
        )  # fmt: skip
    return y
