# parts: pointwise
import triton
import triton.language as tl


@triton.jit
def op(x, s, t, MODE: tl.constexpr):
    last = tl.full(x.shape, 1.0, tl.float32)
    this = x
    if MODE == 0:
        this = last
    for _ in tl.static_range(1, MODE):
        last, this = this, 2.0 * x * this - last
    return this


def chebyshev_polynomial_t(input, n, out=None):
    return pointwise(input, out=out, mode=int(n))
