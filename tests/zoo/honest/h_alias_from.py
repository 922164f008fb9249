# task: math/softmax
# shows: every triton name imported by itself; retries with a smaller block where OutOfResources (from triton.runtime.errors) is raised
# family: aliased imports

from functools import lru_cache

from torch import Tensor, empty, float64
from triton import cdiv, jit
from triton import next_power_of_2 as np2
from triton.language import arange, constexpr, exp, float32, full, load, maximum, program_id, store, where
from triton.language import float64 as f64
from triton.language import max as reduce_max
from triton.language import sum as reduce_sum
from triton.runtime.errors import OutOfResources


@jit
def rows_kernel(x, y, rows, n, WIDE: constexpr, R: constexpr, B: constexpr):
    acc: constexpr = f64 if WIDE else float32
    r = (program_id(0) * R + arange(0, R))[:, None]
    top = full((R, 1), float("-inf"), acc)
    total = full((R, 1), 0.0, acc)
    for k in range(0, n, B):
        c = k + arange(0, B)[None, :]
        v = load(x + r * n + c, mask=(r < rows) & (c < n), other=float("-inf")).to(acc)
        new = maximum(top, reduce_max(v, 1, keep_dims=True))
        safe = where(new == float("-inf"), 0.0, new)
        total = total * exp(top - safe) + reduce_sum(exp(v - safe), 1, keep_dims=True)
        top = new
    for k in range(0, n, B):
        c = k + arange(0, B)[None, :]
        inside = (r < rows) & (c < n)
        v = load(x + r * n + c, mask=inside, other=0.0).to(acc)
        store(
            y + r * n + c,
            (exp(v - where(r < rows, top, 0.0)) / where(r < rows, total, 1.0)).to(y.dtype.element_ty),
            mask=inside,
        )


@lru_cache(maxsize=None)
def blocks(n: int) -> list[int]:
    b = min(2048, np2(n))
    return [b, max(1, b // 4)]


def softmax(input: Tensor, dim: int, dtype=None) -> Tensor:
    dtype = dtype or input.dtype
    moved = input.movedim(dim, -1)
    x = moved.contiguous()
    y = empty(x.shape, dtype=dtype, device=x.device)
    if y.numel():
        n = x.shape[-1]
        rows = x.numel() // n
        for b in blocks(n):
            try:
                rows_kernel[(cdiv(rows, 2),)](x, y, rows, n, WIDE=dtype == float64, R=2, B=b)
                break
            except OutOfResources:
                continue
    return y.movedim(-1, dim).contiguous()
