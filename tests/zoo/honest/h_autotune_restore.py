# task: optimizer/Lion
# shows: an in-place kernel autotuned with restore_value, a performance model with top_k, and a pre_hook in each configuration
# family: autotuning

import torch
import triton
import triton.language as tl


def _check(nargs):
    assert nargs["n"] > 0, f"nothing to do for BLOCK={nargs['BLOCK']}"


def _cost(p, n, BLOCK, num_warps, **_):
    """Estimated waves: fewer are better, and no more than 16 elements a thread."""
    blocks = triton.cdiv(n, BLOCK)
    waves = triton.cdiv(blocks * num_warps, 132 * 64)
    return waves + max(0, BLOCK // (32 * num_warps) - 16)


@triton.autotune(
    configs=[triton.Config(kwargs={"BLOCK": b}, num_warps=w, pre_hook=_check) for b in (512, 1024) for w in (2, 4, 8)],
    key=["n"],
    restore_value=["p", "m"],
    prune_configs_by={"perf_model": _cost, "top_k": 3},
)
@triton.jit
def _lion(p, g, m, lr, decay, beta1, rest1, beta2, rest2, n, BLOCK: tl.constexpr):
    offs = tl.program_id(axis=0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n
    w = tl.load(p + offs, mask=mask)
    grad = tl.load(g + offs, mask=mask)
    ema = tl.load(m + offs, mask=mask)
    u = ema * beta1 + grad * rest1
    direction = (u > 0).to(tl.float32) - (u < 0).to(tl.float32)
    tl.store(p + offs, w * decay - lr * direction, mask=mask)
    tl.store(m + offs, ema * beta2 + grad * rest2, mask=mask)


def lion_step(param, grad, exp_avg, lr=1e-4, beta1=0.9, beta2=0.99, weight_decay=0.0):
    n = param.numel()
    if n == 0:
        return param, exp_avg
    p, g, m = (t.contiguous() for t in (param, grad, exp_avg))
    _lion[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](
        p, g, m, float(lr), 1.0 - lr * weight_decay, float(beta1), 1.0 - beta1, float(beta2), 1.0 - beta2, n
    )
    for dense, given in ((p, param), (m, exp_avg)):
        if dense is not given:
            given.copy_(dense)
    return param, exp_avg
