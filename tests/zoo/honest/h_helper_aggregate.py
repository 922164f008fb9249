# task: reduce/std
# shows: the running moments of Welford's method as an aggregate class with jit methods, carried through a loop
# family: helpers

import torch
import triton
import triton.language as tl
from triton.language.core import _aggregate as aggregate


@triton.jit
def _merge(na, ma, sa, nb, mb, sb):
    n = na + nb
    share = tl.where(n > 0, nb / tl.maximum(n, 1.0), 0.0)
    delta = mb - ma
    return n, ma + delta * share, sa + sb + delta * delta * na * share


@aggregate
class Moments:
    count: tl.tensor
    mean: tl.tensor
    m2: tl.tensor

    @triton.constexpr_function
    def __init__(self, count, mean, m2):
        self.count = count
        self.mean = mean
        self.m2 = m2

    @triton.jit
    def push(self, x, mask):
        count = self.count + mask.to(tl.float32)
        delta = tl.where(mask, x - self.mean, 0.0)
        mean = self.mean + delta / tl.maximum(count, 1.0)
        return Moments(count, mean, self.m2 + delta * tl.where(mask, x - mean, 0.0))

    @triton.jit
    def total(self):
        return tl.reduce((self.count, self.mean, self.m2), 0, _merge)


@triton.jit
def _std_rows(x, y, n, correction, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    zeros = tl.zeros((BLOCK,), dtype=tl.float32)
    moments = Moments(zeros, zeros, zeros)
    for start in range(0, n, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        v = tl.load(x + row.to(tl.int64) * n + cols, mask=cols < n, other=0.0)
        moments = moments.push(v, cols < n)
    _, _, m2 = moments.total()
    tl.store(y + row, tl.sqrt(m2 / (n - correction)))


def std(input, dim=None, correction=1, keepdim=False, out=None):
    if dim is None:
        x = input.reshape(1, -1)
        shape = (1,) * input.dim() if keepdim else ()
    else:
        dim %= input.dim()
        x = input.movedim(dim, -1)
        shape = input.shape[:dim] + ((1,) if keepdim else ()) + input.shape[dim + 1 :]
    n = x.shape[-1]
    x = x.contiguous()
    y = torch.empty(shape, dtype=input.dtype, device=input.device)
    if y.numel():
        _std_rows[(y.numel(),)](x, y, n, int(correction), BLOCK=min(1024, max(64, triton.next_power_of_2(n))))
    return y if out is None else out.copy_(y)
