# parts: pointwise
import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def op(x, s, t, MODE: tl.constexpr):
    """Asymptotic series at z >= 4; below, four steps of the recurrence in one division."""
    a = tl.where(x < 0, 1.0 - x, x)
    small = a < 4.0
    z = tl.where(small, a + 4.0, a)
    q = 1.0 / z
    w = q * q
    series = w * (0.08333333333 - w * (0.008333333333 - w * (0.003968253968 - w * 0.004166666667)))
    # 1/a + 1/(a+1) + 1/(a+2) + 1/(a+3) with y = a (a + 3)
    b = tl.minimum(a, 4.0)
    y = b * (b + 3.0)
    steps = (2.0 * b + 3.0) * (2.0 * y + 2.0) / (y * (y + 2.0))
    psi = tl.log(z) - 0.5 * q - series - tl.where(small, steps, 0.0)
    part = x - libdevice.rint(x)
    return tl.where(x < 0, psi - 3.141592653589793 * (libdevice.cospi(part) / libdevice.sinpi(part)), psi)


def digamma(input_tensor):
    return pointwise(input_tensor)
