"""AdamW: one fused elementwise kernel."""

import triton
import triton.language as tl


@triton.jit
def _adamw(p, g, m, v, n, decay, beta1, one_beta1, beta2, one_beta2, rate, root, eps, BLOCK: tl.constexpr):
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = o < n
    grad = tl.load(g + o, mask=inside)
    first = beta1 * tl.load(m + o, mask=inside) + one_beta1 * grad
    second = beta2 * tl.load(v + o, mask=inside) + one_beta2 * grad * grad
    param = tl.load(p + o, mask=inside) * decay
    param -= rate * first / (tl.sqrt(second) / root + eps)
    tl.store(p + o, param, mask=inside)
    tl.store(m + o, first, mask=inside)
    tl.store(v + o, second, mask=inside)


def adamw_step(param, grad, exp_avg, exp_avg_sq, step, lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01):
    """Updates param, exp_avg and exp_avg_sq in place and returns them."""
    n = param.numel()
    if n:
        given = (param, exp_avg, exp_avg_sq)
        # Tensors with gaps are updated in a dense copy and copied back.
        p, m, v = (t.contiguous() for t in given)
        _adamw[(triton.cdiv(n, 1024),)](
            p, grad.contiguous(), m, v, n, 1 - lr * weight_decay, beta1, 1 - beta1, beta2, 1 - beta2,
            lr / (1 - beta1**step), (1 - beta2**step) ** 0.5, eps, BLOCK=1024,
        )  # fmt: skip
        for old, new in zip(given, (p, m, v), strict=True):
            if old is not new and old.data_ptr() != new.data_ptr():
                old.copy_(new)
    return param, exp_avg, exp_avg_sq
