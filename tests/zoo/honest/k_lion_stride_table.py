# task: optimizer/Lion
# shows: any rank and any strides in place: sizes and strides lie in an int64 table on the device, the kernel walks over it
# family: in place

import torch
import triton
import triton.language as tl


@triton.jit
def lion_kernel(p, g, m, table, ndim, n, lr, beta1, beta2, decay, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = i < n
    rest = i
    op = tl.zeros((BLOCK,), tl.int64)
    og = tl.zeros((BLOCK,), tl.int64)
    om = tl.zeros((BLOCK,), tl.int64)
    for d in range(ndim):
        size = tl.load(table + 4 * d)
        c = rest % size
        rest = rest // size
        op += c * tl.load(table + 4 * d + 1)
        og += c * tl.load(table + 4 * d + 2)
        om += c * tl.load(table + 4 * d + 3)
    w = tl.load(p + op, mask=ok)
    grad = tl.load(g + og, mask=ok)
    avg = tl.load(m + om, mask=ok)
    u = beta1 * avg + (1 - beta1) * grad
    sign = (u > 0).to(tl.float32) - (u < 0).to(tl.float32)
    tl.store(p + op, w * decay - lr * sign, mask=ok)
    tl.store(m + om, beta2 * avg + (1 - beta2) * grad, mask=ok)


def lion_step(param, grad, exp_avg, lr=1e-4, beta1=0.9, beta2=0.99, weight_decay=0.0):
    n = param.numel()
    if n:
        rows = list(zip(param.shape, param.stride(), grad.stride(), exp_avg.stride()))[::-1]
        table = torch.tensor(rows or [(1, 0, 0, 0)], dtype=torch.int64, device=param.device)
        lion_kernel[(triton.cdiv(n, 1024),)](
            param,
            grad,
            exp_avg,
            table,
            len(rows),
            n,
            float(lr),
            float(beta1),
            float(beta2),
            1.0 - lr * weight_decay,
            BLOCK=1024,
        )
    return param, exp_avg
