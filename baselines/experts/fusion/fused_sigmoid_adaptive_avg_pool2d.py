"""The sigmoid follows the average in registers: many small bins in one program, or a program for each large bin."""

import torch
import triton
import triton.language as tl


@triton.jit
def _small_bins(x, y, bins, H, W, OH, OW, EVEN: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
                BJ: tl.constexpr, BW: tl.constexpr):  # fmt: skip
    """BJ neighbouring bins of at most HEIGHT x WIDTH pixels; neighbouring threads read neighbouring pixels."""
    b = tl.program_id(0) * BJ + tl.arange(0, BJ)
    j, i = b % OW, b // OW % OH
    plane = (b // OW // OH).to(tl.int64)
    if EVEN:
        top, left, height, width = i * HEIGHT, j * WIDTH, HEIGHT, WIDTH
    else:
        top, left = i * H // OH, j * W // OW
        height, width = ((i + 1) * H + OH - 1) // OH - top, ((j + 1) * W + OW - 1) // OW - left
    k = tl.arange(0, BW)
    at = (x + (plane * H + top) * W + left)[:, None] + k[None, :]
    total = tl.zeros((BJ, BW), tl.float32)
    for r in tl.static_range(HEIGHT):
        inside = (b < bins)[:, None] & (k < WIDTH)[None, :]
        if EVEN == 0:
            inside = inside & (r < height)[:, None] & (k[None, :] < width[:, None])
        total += tl.load(at + r * W, mask=inside, other=0.0)
    tl.store(y + b, tl.sigmoid(tl.sum(total, 1) / (height * width)), mask=b < bins)


@triton.jit
def _large_bins(x, y, H, W, OH, OW, BH: tl.constexpr, BW: tl.constexpr):
    """One program averages one bin."""
    b = tl.program_id(0)
    j, i = b % OW, b // OW % OH
    plane = x + (b // OW // OH).to(tl.int64) * H * W
    top, bottom = i * H // OH, ((i + 1) * H + OH - 1) // OH
    left, right = j * W // OW, ((j + 1) * W + OW - 1) // OW
    total = tl.zeros((BH, BW), tl.float32)
    for r0 in range(top, bottom, BH):
        r = r0 + tl.arange(0, BH)
        for c0 in range(left, right, BW):
            c = c0 + tl.arange(0, BW)
            inside = (r < bottom)[:, None] & (c < right)[None, :]
            total += tl.load(plane + r[:, None] * W + c[None, :], mask=inside, other=0.0)
    mean = tl.sum(tl.sum(total, 1), 0) / ((bottom - top) * (right - left))
    tl.store(y + b, tl.sigmoid(mean))


def fused_sigmoid_adaptive_avg_pool2d(input, output_size):
    """Chooses the kernel by the size of a bin."""
    x = input.contiguous()
    H, W = x.shape[-2:]
    size = (output_size, output_size) if isinstance(output_size, int) or output_size is None else output_size
    OH, OW = (H if size[0] is None else size[0]), (W if size[1] is None else size[1])
    y = torch.empty((*x.shape[:-2], OH, OW), dtype=x.dtype, device=x.device)
    bins = y.numel()
    if not bins:
        return y
    # Bins that do not divide the map evenly start and end inside a pixel: one more than the rounded-up quotient.
    height, width = (n // o if n % o == 0 else min(n, triton.cdiv(n, o) + 1) for n, o in ((H, OH), (W, OW)))
    if height <= 16 and width <= 32:
        BW = triton.next_power_of_2(width)
        BJ = min(1024 // BW, triton.next_power_of_2(bins))
        even = H % OH == 0 and W % OW == 0
        _small_bins[(triton.cdiv(bins, BJ),)](
            x, y, bins, H, W, OH, OW, EVEN=even, HEIGHT=height, WIDTH=width, BJ=BJ, BW=BW, num_warps=4
        )
    else:
        BW = min(256, triton.next_power_of_2(width))
        BH = min(4096 // BW, triton.next_power_of_2(height))
        _large_bins[(bins,)](x, y, H, W, OH, OW, BH=BH, BW=BW, num_warps=8 if BH * BW == 4096 else 4)
    return y
