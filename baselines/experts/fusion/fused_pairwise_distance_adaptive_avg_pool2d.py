"""One pass: pooling is linear, so the difference is pooled, and a program keeps a row of bins in registers."""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

# MODE: 1 and 2 for these p, 0 for infinity, 3 for any other.


@triton.jit
def _rows(x1, x2, y, H, W, OH, OW, p, eps, EVEN: tl.constexpr, WIDTH: tl.constexpr, MODE: tl.constexpr,
          BJ: tl.constexpr, BW: tl.constexpr):  # fmt: skip
    """One output row: BJ bins at a time, of at most WIDTH columns, BW of them at a time."""
    row = tl.program_id(0)
    i = row % OH
    top, bottom = i * H // OH, ((i + 1) * H + OH - 1) // OH
    plane = (row // OH).to(tl.int64) * H * W
    result = tl.zeros((BJ,), tl.float32)
    for j0 in range(0, OW, BJ):
        j = j0 + tl.arange(0, BJ)
        left = j * WIDTH if EVEN else j * W // OW
        width = tl.full((BJ,), WIDTH, tl.int32) if EVEN else ((j + 1) * W + OW - 1) // OW - left
        total = tl.zeros((BJ, BW), tl.float32)
        for r in range(top, bottom):
            for k0 in tl.static_range(0, WIDTH, BW):
                k = k0 + tl.arange(0, BW)
                inside = (j < OW)[:, None] & (k[None, :] < width[:, None])
                at = plane + r * W + left[:, None] + k[None, :]
                total += tl.load(x1 + at, mask=inside, other=0.0) - tl.load(x2 + at, mask=inside, other=0.0)
        mean = tl.sum(total, 1) / ((bottom - top) * width)
        d = tl.where(j < OW, tl.abs(mean + eps), 0.0)
        if MODE == 0:
            result = tl.maximum(result, d)
        elif MODE == 1:
            result += d
        elif MODE == 2:
            result += d * d
        else:
            result += libdevice.pow(d, p)
    if MODE == 0:
        distance = tl.max(result, 0)
    else:
        distance = tl.sum(result, 0)
        if MODE == 2:
            distance = tl.sqrt_rn(distance)
        elif MODE == 3:
            distance = libdevice.pow(distance, 1.0 / p)
    tl.store(y + row, distance)


def fused_pairwise_distance_adaptive_avg_pool2d(x1, x2, output_size, p=2.0, eps=1e-6, keepdim=False):
    x1, x2 = x1.contiguous(), x2.contiguous()
    H, W = x1.shape[-2:]
    size = (output_size, output_size) if isinstance(output_size, int) or output_size is None else output_size
    OH, OW = (H if size[0] is None else size[0]), (W if size[1] is None else size[1])
    y = torch.empty((*x1.shape[:-2], OH, 1), dtype=x1.dtype, device=x1.device)
    if y.numel():
        # Bins that do not divide the map evenly start and end inside a pixel: one more than the rounded-up quotient.
        width = W // OW if W % OW == 0 else min(W, triton.cdiv(W, OW) + 1)
        BW = min(64, triton.next_power_of_2(width))
        BJ = min(1024 // BW, triton.next_power_of_2(OW))
        mode = 0 if p == float("inf") else int(p) if p in (1, 2) else 3
        _rows[(y.numel(),)](
            x1, x2, y, H, W, OH, OW, float(p) if mode == 3 else 1.0, float(eps), EVEN=W % OW == 0, WIDTH=width,
            MODE=mode, BJ=BJ, BW=BW, num_warps=4 if BJ * BW >= 512 else 1,
        )  # fmt: skip
    return y if keepdim else y.squeeze(-1)
