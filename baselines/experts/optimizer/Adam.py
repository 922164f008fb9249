# parts: in_place
import triton
import triton.language as tl


@triton.jit
def _adam(p, m, v, g, n, decay, beta1, one_beta1, beta2, one_beta2, rate, root, eps, BLOCK: tl.constexpr):
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = o < n
    param = tl.load(p + o, mask=inside)
    grad = tl.load(g + o, mask=inside) + decay * param
    first = beta1 * tl.load(m + o, mask=inside) + one_beta1 * grad
    second = beta2 * tl.load(v + o, mask=inside) + one_beta2 * grad * grad
    tl.store(p + o, param - rate * first / (tl.sqrt(second) / root + eps), mask=inside)
    tl.store(m + o, first, mask=inside)
    tl.store(v + o, second, mask=inside)


def adam_step(param, grad, exp_avg, exp_avg_sq, step, lr=0.001, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0):
    """The numbers that depend on the step alone are worked out here, in double precision."""
    rate, root = lr / (1 - beta1**step), (1 - beta2**step) ** 0.5
    return in_place(
        _adam, (param, exp_avg, exp_avg_sq), (grad,), weight_decay, beta1, 1 - beta1, beta2, 1 - beta2, rate, root, eps
    )
