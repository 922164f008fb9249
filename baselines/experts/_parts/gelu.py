import triton
import triton.language as tl


@triton.jit
def gelu_of(v, TANH: tl.constexpr):
    if TANH:
        # v / 2 * (1 + tanh(u)) is v * sigmoid(2 u): one exponential and no cancellation
        return v * tl.sigmoid(1.5957691216057308 * (v + 0.044715 * v * v * v))
    else:
        # v / 2 * erfc(-v / sqrt 2), by one formula for erfc on the whole half-line (Numerical Recipes, relative error
        # 1.2e-7): a quarter cheaper than erf, which computes two branches, and no cancellation for negative v.
        a = tl.abs(v) * 0.7071067811865476
        d = 1.0 + 0.5 * a
        t = tl.rsqrt(d * d)  # 1 / d in one instruction
        p = -0.82215223 + t * 0.17087277
        p = -1.13520398 + t * (1.48851587 + t * p)
        p = 0.09678418 + t * (-0.18628806 + t * (0.27886807 + t * p))
        p = -1.26551223 + t * (1.00002368 + t * (0.37409196 + t * p))
        tail = 0.5 * v * t * tl.exp(p - a * a)
        return tl.where(v > 0, v - tail, tail)


@triton.jit
def gelu_half(x, TANH: tl.constexpr):
    """Of a 16-bit number: fewer terms will do (Abramowitz and Stegun 7.1.26, absolute error 1.5e-7)."""
    v = x.to(tl.float32)
    if TANH:
        r = gelu_of(v, True)
    else:
        a = tl.abs(v) * 0.7071067811865476
        d = 1.0 + 0.3275911 * a
        t = tl.rsqrt(d * d)  # 1 / d in one instruction
        p = 1.421413741 + t * (-1.453152027 + t * 1.061405429)
        p = 0.254829592 + t * (-0.284496736 + t * p)
        tail = 0.5 * v * t * p * tl.exp(-a * a)
        r = tl.where(v > 0, v - tail, tail)
    return r.to(x.dtype)
