# task: loss/smooth_l1_loss
# shows: autotuned with warmup= and rep= (the old interface of triton.autotune) and reset_to_zero, as the kernel adds atomically
# family: autotuning

import torch
import triton
import triton.language as tl


@triton.autotune(
    configs=[triton.Config({"BLOCK": b}, num_warps=w) for b, w in ((256, 2), (512, 4), (1024, 4), (4096, 8))],
    key=["bucket", "REDUCE"],
    reset_to_zero=["out"],
    warmup=5,
    rep=20,
)
@triton.heuristics({"L1": lambda args: args["beta"] == 0.0})
@triton.jit(do_not_specialize=["n", "bucket"])
def _smooth_l1(x, t, out, n, bucket, beta, factor, REDUCE: tl.constexpr, BLOCK: tl.constexpr, L1: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n
    d = tl.abs(tl.load(x + offs, mask=mask, other=0.0) - tl.load(t + offs, mask=mask, other=0.0))
    if L1:
        loss = d
    else:
        loss = tl.where(d < beta, 0.5 * d * d / beta, d - 0.5 * beta)
    if REDUCE:
        loss = tl.where(mask, loss, 0.0)
        tl.atomic_add(out, tl.sum(loss, axis=0) * factor, sem="relaxed")
    else:
        tl.store(out + offs, loss, mask=mask)


def smooth_l1_loss(input, target, beta=1.0, reduction="mean"):
    if reduction not in ("none", "sum", "mean"):
        raise ValueError(f"{reduction} is not a valid value for reduction")
    x, t = input.contiguous(), target.contiguous()
    n = x.numel()
    reduce = reduction != "none"
    out = x.new_zeros(()) if reduce else torch.empty_like(x)
    if n:
        factor = 1.0 / n if reduction == "mean" else 1.0
        grid = lambda meta: (triton.cdiv(n, meta["BLOCK"]),)
        _smooth_l1[grid](x, t, out, n, triton.next_power_of_2(n), float(beta), factor, REDUCE=reduce)
    return out
