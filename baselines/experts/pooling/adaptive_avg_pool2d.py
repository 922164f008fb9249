"""Adaptive average pooling: rows of small bins, or one program for each large bin."""

import torch
import triton
import triton.language as tl


@triton.jit
def _small_bins(x, y, H, W, OH, OW, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """One program averages neighbouring bins of an output row; a bin is at most WIDTH columns wide."""
    row = tl.program_id(0)
    i = row % OH
    plane = (row // OH).to(tl.int64)
    top, bottom = i * H // OH, ((i + 1) * H + OH - 1) // OH
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    left, right = j * W // OW, ((j + 1) * W + OW - 1) // OW
    total = tl.zeros((BLOCK,), tl.float32)
    for r in range(top, bottom):
        for k in tl.static_range(WIDTH):
            inside = (j < OW) & (left + k < right)
            total += tl.load(x + (plane * H + r) * W + left + k, mask=inside, other=0.0)
    tl.store(y + row.to(tl.int64) * OW + j, total / ((bottom - top) * (right - left)), mask=j < OW)


@triton.jit
def _large_bins(x, y, H, W, OH, OW, BH: tl.constexpr, BW: tl.constexpr):
    """One program averages one bin."""
    bin = tl.program_id(0)
    j = bin % OW
    i = bin // OW % OH
    plane = (bin // OW // OH).to(tl.int64)
    top, bottom = i * H // OH, ((i + 1) * H + OH - 1) // OH
    left, right = j * W // OW, ((j + 1) * W + OW - 1) // OW
    total = tl.zeros((BH, BW), tl.float32)
    for r0 in range(top, bottom, BH):
        r = r0 + tl.arange(0, BH)
        for c0 in range(left, right, BW):
            c = c0 + tl.arange(0, BW)
            inside = (r[:, None] < bottom) & (c[None, :] < right)
            total += tl.load(x + (plane * H + r[:, None]) * W + c[None, :], mask=inside, other=0.0)
    mean = tl.sum(tl.sum(total, 1), 0) / ((bottom - top) * (right - left))
    tl.store(y + bin, mean)


def adaptive_avg_pool2d(input, output_size):
    """Chooses the kernel by the width of a bin."""
    x = input.contiguous()
    H, W = x.shape[-2:]
    size = (output_size, output_size) if isinstance(output_size, int) or output_size is None else output_size
    OH, OW = (H if size[0] is None else size[0]), (W if size[1] is None else size[1])
    y = torch.empty((*x.shape[:-2], OH, OW), dtype=x.dtype, device=x.device)
    if not y.numel():
        return y
    # Bins that do not divide the image evenly start and end inside a pixel: one more than the rounded-up quotient.
    height, width = (n // o if n % o == 0 else triton.cdiv(n, o) + 1 for n, o in ((H, OH), (W, OW)))
    # A long sum is added up as a tree: faster, and more accurate.
    if height * width <= 64:
        BLOCK = min(256, max(16, triton.next_power_of_2(OW)))
        _small_bins[(y.numel() // OW, triton.cdiv(OW, BLOCK))](x, y, H, W, OH, OW, WIDTH=width, BLOCK=BLOCK)
    else:
        BW = min(128, triton.next_power_of_2(width))
        BH = min(2048 // BW, max(2, triton.next_power_of_2(height)))
        _large_bins[(y.numel(),)](x, y, H, W, OH, OW, BH=BH, BW=BW)
    return y
