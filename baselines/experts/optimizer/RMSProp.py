# parts: in_place
import triton
import triton.language as tl


@triton.jit
def _rmsprop(p, v, g, n, decay, lr, alpha, one_alpha, eps, BLOCK: tl.constexpr):
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = o < n
    param = tl.load(p + o, mask=inside)
    grad = tl.load(g + o, mask=inside) + decay * param
    second = alpha * tl.load(v + o, mask=inside) + one_alpha * grad * grad
    tl.store(p + o, param - lr * grad / (tl.sqrt(second) + eps), mask=inside)
    tl.store(v + o, second, mask=inside)


def rmsprop_step(param, grad, square_avg, lr=0.01, alpha=0.99, eps=1e-8, weight_decay=0.0):
    return in_place(_rmsprop, (param, square_avg), (grad,), weight_decay, lr, alpha, 1 - alpha, eps)
