import triton
import triton.language as tl


@triton.jit
def combine(ma, qa, na, mb, qb, nb):
    """Mean, sum of squared deviations and count of two sets, from those of each (Chan's formula: no cancellation)."""
    n = na + nb
    share = nb / tl.maximum(n, 1.0)
    d = mb - ma
    return ma + d * share, qa + qb + d * d * na * share, n


@triton.jit
def another(mean, square, count, v, inside):
    """Welford's update of every lane by one more value where inside."""
    count += inside.to(tl.float32)
    d = tl.where(inside, v - mean, 0.0)
    mean += d / tl.maximum(count, 1.0)
    return mean, square + d * (v - mean), count
