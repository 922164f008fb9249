# parts: pointwise
import math

import triton
import triton.language as tl


@triton.jit
def op(x, s, t, MODE: tl.constexpr):
    """Four terms of the sum (or steps of the recurrence), then the asymptotic series; s is (-1)^(n+1) n!."""
    a = x + 4.0
    r = 1.0 / a
    w = r * r
    if MODE == 0:
        series = w * (0.08333333333 - w * (0.008333333333 - w * (0.003968253968 - w * 0.004166666667)))
        # 1/x + 1/(x+1) + 1/(x+2) + 1/(x+3) with y = x (x + 3)
        y = x * (x + 3.0)
        return tl.log(a) - 0.5 * r - series - (2.0 * x + 3.0) * (2.0 * y + 2.0) / (y * (y + 2.0))
    else:
        total = tl.zeros(x.shape, tl.float32)
        for k in tl.static_range(4):
            q = 1.0 / (x + k)
            p = q
            for _ in tl.static_range(MODE):
                p *= q
            total += p
        p = r
        for _ in tl.static_range(MODE - 1):
            p *= r
        h = 1.0 - w * ((MODE + 2) * (MODE + 3) / 60) * (1.0 - w * ((MODE + 4) * (MODE + 5) / 42))
        return s * (total + p * (1.0 / MODE + 0.5 * r + w * ((MODE + 1) / 12) * h))


def polygamma(n, input, *, out=None):
    return pointwise(input, out=out, s=(-1.0) ** (n + 1) * math.factorial(n), mode=int(n))
