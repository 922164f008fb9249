# task: matrixmultiply/matrix_multiply_symmetric
# shows: one block-pointer kernel launched twice, the second time with its own result and its transpose as operands
# family: tensor descriptors

import torch
import triton
import triton.language as tl


@triton.jit
def gemm_block_ptr(
    a, b, c, d, M, N, K, alpha, beta, sam, sak, sbk, sbn, scm, scn,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    m, n = tl.program_id(0) * BM, tl.program_id(1) * BN
    pa = tl.make_block_ptr(a, (M, K), (sam, sak), (m, 0), (BM, BK), order=(1, 0))
    pb = tl.make_block_ptr(base=b, shape=(K, N), strides=(sbk, sbn), offsets=(0, n), block_shape=(BK, BN), order=(0, 1))
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for _ in range(0, K, BK):
        x = tl.load(pa, boundary_check=(0, 1), padding_option="zero")
        w = tl.load(pb, boundary_check=(0, 1), padding_option="zero")
        acc = tl.dot(x, w, acc, input_precision="ieee")
        pa = tl.advance(pa, (0, BK))
        pb = tl.advance(pb, (BK, 0))
    pc = tl.make_block_ptr(c, (M, N), (scm, scn), (m, n), (BM, BN), order=(1, 0))
    pd = tl.make_block_ptr(d, (M, N), (N, 1), (m, n), (BM, BN), order=(1, 0))
    old = tl.load(pc, boundary_check=(0, 1), padding_option="zero")
    tl.store(pd, alpha * acc + beta * old, boundary_check=(0, 1))


def launch(a, b, c, alpha, beta):
    (M, K), N = a.shape, b.shape[1]
    d = torch.empty((M, N), dtype=torch.float32, device=a.device)
    if d.numel():
        gemm_block_ptr[(triton.cdiv(M, 32), triton.cdiv(N, 32))](
            a, b, c, d, M, N, K, float(alpha), float(beta), *a.stride(), *b.stride(), *c.stride(), BM=32, BN=32, BK=32
        )
    return d


def matrix_multiply_symmetric(A, B, C, alpha, beta):
    C1 = launch(A, B, C, alpha, beta)
    return launch(C1, C1.t(), C1, alpha, beta)
