# task: index/index_select
# shows: a whole line is loaded into registers and picked from with tl.gather, with hints (assume, multiple_of, max_contiguous)
# family: order of work

import torch
import triton
import triton.language as tl


@triton.jit
def select_lines(x, index, y, D, pitch, K, si, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    tl.assume(D > 0)
    tl.assume(K > 0)
    line = tl.program_id(0).to(tl.int64)
    pitch = tl.multiple_of(pitch, 16)
    c = tl.max_contiguous(tl.multiple_of(tl.arange(0, WIDTH), WIDTH), WIDTH)
    row = tl.load(x + line * pitch + c, mask=c < D, other=0.0)
    for k0 in range(0, K, BLOCK):
        k = k0 + tl.arange(0, BLOCK)
        i = tl.load(index + k.to(tl.int64) * si, mask=k < K, other=0)
        tl.store(y + line * K + k, tl.gather(row, i.to(tl.int32), 0), mask=k < K)


@triton.jit
def select_long(x, index, y, pitch, K, si, BLOCK: tl.constexpr):
    line = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    i = tl.load(index + k.to(tl.int64) * si, mask=k < K, other=0)
    tl.store(y + line * K + k, tl.load(x + line * pitch + i, mask=k < K), mask=k < K)


def index_select(input, dim, index):
    moved = input.movedim(dim, -1)
    D, K = moved.shape[-1], index.numel()
    y = torch.empty(moved.shape[:-1] + (K,), dtype=input.dtype, device=input.device)
    if y.numel():
        pitch = triton.cdiv(D, 16) * 16
        x = torch.empty(moved.shape[:-1] + (pitch,), dtype=input.dtype, device=input.device)
        x[..., :D].copy_(moved)
        lines = y.numel() // K
        if D <= 4096:
            select_lines[(lines,)](
                x, index, y, D, pitch, K, index.stride(0), WIDTH=triton.next_power_of_2(D), BLOCK=128, num_warps=2
            )
        else:
            select_long[(lines, triton.cdiv(K, 256))](x, index, y, pitch, K, index.stride(0), BLOCK=256)
    return y.movedim(-1, dim).contiguous()
