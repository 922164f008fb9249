# parts: jacobi
import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def _exponent(k_high, k_low, like):
    """Scalars come as fp32: the exponent's two halves are put together in the precision of what is raised to it."""
    return tl.zeros_like(like) + (k_high.to(like.dtype) + k_low.to(like.dtype))


@triton.jit(do_not_specialize=["n"])
def _power(a, out, flag, spare, n, k_high, k_low, N: tl.constexpr):
    """One symmetric matrix per program: sum of w^k u u^T over the eigenpairs."""
    batch = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, N)
    spare += batch * (2 * N * N)
    a += batch * n * n
    x, scale = tall(a, cols, cols, n, n, n, 1)
    # Singular vectors of A + shift are eigenvectors of A if the shift makes every eigenvalue positive; twice the bound
    # of the eigenvalues keeps A + shift far from singular, too.
    bound = tl.max(tl.sum(tl.abs(x), 1), 0)
    shift = 2.0 * tl.where(bound > 0, bound, 1.0)
    eye = cols[:, None] == cols[None, :]
    x = tl.where(eye & (cols < n)[:, None], x + shift, x)
    w, square = orthogonalise(x, cols, flag + batch, N, N, N)
    u = directions(w, square)
    # Many rotations have let lengths and angles drift by a few roundings.
    u = 1.5 * u - 0.5 * dot(dot(u, tl.trans(u), spare), u, spare)
    # A is read again rather than kept in registers through all the rotations.
    x, scale = tall(a, cols, cols, n, n, n, 1)
    # u A u^T is diagonal up to rounding. What is left beside the diagonal enters the power by its first-order term,
    # times the difference quotient of w^k, or the derivative where two eigenvalues are close.
    g = dot(dot(u, x, spare), tl.trans(u), spare)
    value = tl.sum(tl.where(eye, g, 0.0), 1)
    other = tl.sum(tl.where(eye, g, 0.0), 0)
    real = (cols[:, None] < n) & (cols[None, :] < n)
    # Few numbers are raised to a power, in one place: that is long code.
    k = _exponent(k_high, k_low, other)
    power_of_other = libdevice.pow(other, k)
    slope_of_other = tl.where(
        other == 0, tl.where(k == 1, 1.0, 0.0), k * power_of_other / tl.where(other == 0, 1.0, other)
    )
    power = tl.sum(tl.where(eye, power_of_other[None, :], 0.0), 1)
    slope = tl.sum(tl.where(eye, slope_of_other[None, :], 0.0), 1)
    gap = value[:, None] - other[None, :]
    apart = tl.abs(gap) > 1e-3 * (tl.abs(value)[:, None] + tl.abs(other)[None, :])
    quotient = (power[:, None] - power_of_other[None, :]) / tl.where(apart, gap, 1.0)
    quotient = tl.where(apart, quotient, 0.5 * (slope[:, None] + slope_of_other[None, :]))
    core = tl.where(eye, power[:, None], quotient * g)
    y = dot(dot(tl.trans(u), tl.where(real, core, 0.0), spare), u, spare)
    y = tl.where(k_high == 0, tl.where(eye, 1.0, 0.0).to(x.dtype), y)
    # A was divided by a power of two.
    factor = libdevice.pow(scale, _exponent(k_high, k_low, scale))
    tl.store(out + batch * n * n + cols[:, None] * n + cols[None, :], y * factor, mask=real)


def matrix_power_eig(A, k, *, out=None):
    x = A.contiguous()
    y = torch.empty_like(x) if out is None or not out.is_contiguous() else out
    B, n, _, _, _, N, _, _, warps, spare = sides(x)
    if x.numel():
        flag = torch.empty(B, dtype=torch.int32, device=A.device)
        # Not a constant of the kernel: it would be compiled anew for every exponent, for two seconds each.
        spread = float(k) * (2.0**29 + 1.0)
        high = spread - (spread - float(k))
        _power[(B,)](x, y, flag, spare, n, high, float(k) - high, N=N, num_warps=warps)
    return y if out is None or y is out else out.copy_(y)
