# parts: gemm, pointwise, softmax
import torch
import triton
import triton.language as tl


@triton.jit
def epilogue(acc, bias, e, f, where, s, t, MODE: tl.constexpr):
    return acc


@triton.jit
def op(a, b, c, s, t, MODE: tl.constexpr):
    return a * b + c


@triton.jit
def finish(y, where, s, t, MODE: tl.constexpr):
    if MODE:
        # s is the drop probability, t the seed.
        y = tl.where(tl.rand(t, where.to(tl.uint32)) >= s, y / (1.0 - s), 0.0)
    return y


@triton.jit
def _row(
    a, b, c, y, N, M, ab, an, am, bb, bn, bm, cb, cn, cm, s, t, MODE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """finish(log_softmax(a * b + c)) of one row along the last axis, in registers."""
    row = tl.program_id(0).to(tl.int64)
    i, n = row // N, row % N
    k = tl.arange(0, BLOCK)
    inside = k < M
    u = tl.load(a + i * ab + n * an + k * am, mask=inside, other=0.0)
    v = tl.load(b + i * bb + n * bn + k * bm, mask=inside, other=0.0)
    z = tl.where(inside, u * v + tl.load(c + i * cb + n * cn + k * cm, mask=inside, other=0.0), float("-inf"))
    z = z - tl.max(z, 0)
    z = z - tl.log(tl.sum(tl.exp(z), 0))
    where = row * M + k
    tl.store(y + where, finish(z, where, s, t, MODE), mask=inside)


# For small tensors: compiled once for all sizes and strides, the other once more for every kind of them.
_row_any = triton.jit(_row.fn, do_not_specialize=[p.name for p in _row.params if not p.is_constexpr])


def fused_mul_add_logsoftmax_dropout_bmm(
    input1, input2, other, mat2, p=0.5, training=True, inplace=False, dim=-1, *, out=None
):
    B, N, M = input1.shape
    drop = training and p > 0
    seed = torch.randint(0, 2**31 - 1, (1,)).item() | 1 if drop else 0
    if dim % 3 == 2 and input1.numel():
        z = torch.empty((B, N, M), dtype=input1.dtype, device=input1.device)
        few = input1.numel() < 1 << 17
        BLOCK = max(256 if few else 1, triton.next_power_of_2(M))
        c = other.expand(B, N, M)
        kernel = _row_any if few else _row
        kernel[(B * N,)](
            input1, input2, c, z, N, M, *input1.stride(), *input2.stride(), *c.stride(), float(p), seed, MODE=int(drop),
            BLOCK=BLOCK, num_warps=8 if BLOCK > 1024 else 4,
        )  # fmt: skip
    else:
        z = pointwise(input1, input2, other)
        softmax_along(z, dim, z, log=True, s=float(p), t=seed, mode=int(drop))
    return gemm(z, mat2, out=out)
