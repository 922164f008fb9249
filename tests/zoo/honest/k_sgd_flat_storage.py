# task: optimizer/SGD
# shows: tensors that are dense in the same order are updated through flat as_strided views, others through copies written back
# family: in place

import torch
import triton
import triton.language as tl


@triton.jit
def sgd_kernel(
    p, g, b, n, lr, momentum, decay, fresh, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = o < n
    w = tl.load(p + o, mask=ok)
    d = tl.load(g + o, mask=ok) + decay * w
    if MOMENTUM:
        v = momentum * tl.load(b + o, mask=ok) + fresh * d
        tl.store(b + o, v, mask=ok)
        d = d + momentum * v if NESTEROV else v
    tl.store(p + o, w - lr * d, mask=ok)


def _order(t):
    """The axes from the outermost in memory, or None where t has gaps or overlaps."""
    axes = sorted((d for d in range(t.dim()) if t.shape[d] != 1), key=lambda d: -t.stride(d))
    step = 1
    for d in reversed(axes):
        if t.stride(d) != step:
            return None
        step *= t.shape[d]
    return tuple(axes)


def sgd_step(param, grad, momentum_buffer=None, lr=0.1, momentum=0.9, weight_decay=0.0, dampening=0.0, nesterov=False):
    if momentum == 0 and momentum_buffer is None:
        result = (param,)
    else:
        if momentum_buffer is None:
            momentum_buffer = torch.zeros_like(param)
        result = (param, momentum_buffer)
    n = param.numel()
    if n == 0:
        return result
    tensors = [param, grad] + list(result[1:])
    orders = [_order(t) for t in tensors]
    alike = orders[0] is not None and all(o == orders[0] for o in orders)
    flat = [t.as_strided((n,), (1,)) if alike else t.contiguous() for t in tensors]
    sgd_kernel[(triton.cdiv(n, 1024),)](
        flat[0], flat[1], flat[-1], n, float(lr), float(momentum), float(weight_decay), 1.0 - dampening,
        MOMENTUM=momentum > 0, NESTEROV=bool(nesterov), BLOCK=1024,
    )  # fmt: skip
    if not alike:
        for t, f in list(zip(tensors, flat))[::2] if len(tensors) > 2 else [(param, flat[0])]:
            if f.data_ptr() != t.data_ptr():
                t.copy_(f)
    return result
