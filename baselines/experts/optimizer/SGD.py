# parts: in_place
import torch
import triton
import triton.language as tl


@triton.jit
def _plain(p, g, n, decay, lr, BLOCK: tl.constexpr):
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = o < n
    param = tl.load(p + o, mask=inside)
    tl.store(p + o, param - lr * (tl.load(g + o, mask=inside) + decay * param), mask=inside)


@triton.jit
def _momentum(
    p, b, g, n, decay, lr, momentum, share, FRESH: tl.constexpr, NESTEROV: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = o < n
    param = tl.load(p + o, mask=inside)
    grad = tl.load(g + o, mask=inside) + decay * param
    buffer = share * grad
    if not FRESH:
        buffer += momentum * tl.load(b + o, mask=inside)
    step = buffer
    if NESTEROV:
        step = grad + momentum * buffer
    tl.store(b + o, buffer, mask=inside)
    tl.store(p + o, param - lr * step, mask=inside)


def sgd_step(
    param, grad, momentum_buffer=None, lr=0.1, momentum=0.9, weight_decay=0.0, dampening=0.0, nesterov=False
):  # fmt: skip
    """A buffer that does not exist yet is written without being read: no zeros are filled in first."""
    if not momentum > 0:
        in_place(_plain, (param,), (grad,), weight_decay, lr)
        return (param,) if momentum_buffer is None else (param, momentum_buffer)
    fresh = momentum_buffer is None
    if fresh:
        momentum_buffer = torch.empty(param.shape, dtype=param.dtype, device=param.device)
    return in_place(
        _momentum, (param, momentum_buffer), (grad,), weight_decay, lr, momentum, 1 - dampening,
        FRESH=fresh, NESTEROV=bool(nesterov),
    )  # fmt: skip
