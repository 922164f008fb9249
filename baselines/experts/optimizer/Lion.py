# parts: in_place
import triton
import triton.language as tl


@triton.jit
def _lion(p, m, g, n, keep, lr, beta1, one_beta1, beta2, one_beta2, BLOCK: tl.constexpr):
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = o < n
    param = tl.load(p + o, mask=inside) * keep
    first = tl.load(m + o, mask=inside)
    grad = tl.load(g + o, mask=inside)
    u = beta1 * first + one_beta1 * grad
    param -= tl.where(u > 0.0, lr, tl.where(u < 0.0, -lr, 0.0))
    tl.store(p + o, param, mask=inside)
    tl.store(m + o, beta2 * first + one_beta2 * grad, mask=inside)


def lion_step(param, grad, exp_avg, lr=1e-4, beta1=0.9, beta2=0.99, weight_decay=0.0):
    keep = 1 - lr * weight_decay
    return in_place(_lion, (param, exp_avg), (grad,), keep, lr, beta1, 1 - beta1, beta2, 1 - beta2)
