# task: normalization/batch_norm
# shows: a kernel parameter and a local variable that are called vars (the variances), like a builtin
# family: words

import torch
import triton
import triton.language as tl


@triton.jit
def _channel(
    x,
    y,
    means,
    vars,
    w,
    b,
    n,
    momentum,
    eps,
    TRAIN: tl.constexpr,
    HAS_W: tl.constexpr,
    HAS_B: tl.constexpr,
    B: tl.constexpr,
):
    c = tl.program_id(0)
    row = x + c.to(tl.int64) * n
    if TRAIN:
        total = tl.zeros((B,), tl.float32)
        for k in range(0, n, B):
            o = k + tl.arange(0, B)
            total += tl.load(row + o, mask=o < n, other=0.0).to(tl.float32)
        mean = tl.sum(total, 0) / n
        square = tl.zeros((B,), tl.float32)
        for k in range(0, n, B):
            o = k + tl.arange(0, B)
            d = tl.where(o < n, tl.load(row + o, mask=o < n, other=0.0).to(tl.float32) - mean, 0.0)
            square += d * d
        whole = tl.sum(square, 0)
        var = whole / n
        tl.store(means + c, (1 - momentum) * tl.load(means + c) + momentum * mean)
        tl.store(vars + c, (1 - momentum) * tl.load(vars + c) + momentum * (whole / (n - 1)))
    else:
        mean, var = tl.load(means + c), tl.load(vars + c)
    scale = 1.0 / tl.sqrt_rn(var + eps)
    if HAS_W:
        scale *= tl.load(w + c)
    shift = 0.0
    if HAS_B:
        shift = tl.load(b + c)
    for k in range(0, n, B):
        o = k + tl.arange(0, B)
        v = tl.load(row + o, mask=o < n, other=0.0).to(tl.float32)
        tl.store(y + c.to(tl.int64) * n + o, ((v - mean) * scale + shift).to(y.dtype.element_ty), mask=o < n)


def batch_norm(input, running_mean, running_var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5):
    x = input.transpose(0, 1).contiguous()
    y = torch.empty_like(x)
    if x.numel():
        means, vars = running_mean.contiguous(), running_var.contiguous()
        w = means if weight is None else weight.contiguous()
        b = means if bias is None else bias.contiguous()
        C = x.shape[0]
        meta = {"HAS_W": weight is not None, "HAS_B": bias is not None, "B": 1024}
        _channel[(C,)](
            x, y, means, vars, w, b, x.numel() // C, float(momentum), float(eps), TRAIN=bool(training), **meta
        )
        if training and means is not running_mean:
            running_mean.copy_(means)
        if training and vars is not running_var:
            running_var.copy_(vars)
    return y.transpose(0, 1).contiguous()
