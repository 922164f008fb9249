# task: fusion/fused_tanh_linear
# shows: autotuned with use_cuda_graph=True, keyed on strides, its configurations pruned by the problem's size
# family: autotuning

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice


def get_configs():
    return [
        triton.Config({"BM": bm, "BN": bn, "BK": bk, "GROUP": 4}, num_stages=s, num_warps=w)
        for bm, bn, bk, s, w in [(32, 32, 32, 2, 4), (64, 64, 32, 3, 4), (16, 64, 32, 3, 2), (128, 64, 16, 2, 8)]
    ]


def prune(configs, named_args, **kwargs):
    m = max(16, triton.next_power_of_2(named_args["M"]))
    kept = [c for c in configs if c.kwargs["BM"] <= 2 * m]
    return kept or configs[:1]


@triton.autotune(
    configs=get_configs(),
    key=["M", "N", "K", "stride_am", "stride_wn"],
    prune_configs_by={"early_config_prune": prune},
    use_cuda_graph=True,
)
@triton.heuristics({"EVEN_K": lambda args: args["K"] % args["BK"] == 0})
@triton.jit
def _linear_tanh(
    a, w, bias, c, M, N, K, stride_am, stride_ak, stride_wn, stride_wk,
    HAS_BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    EVEN_K: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    pid_m, pid_n = tl.swizzle2d(pid // tl.cdiv(N, BN), pid % tl.cdiv(N, BN), tl.cdiv(M, BM), tl.cdiv(N, BN), GROUP)
    rm = pid_m * BM + tl.arange(0, BM)
    rn = pid_n * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for k0 in range(0, K, BK):
        rk = k0 + tl.arange(0, BK)
        ma, mw = rm[:, None] < M, rn[None, :] < N
        if not EVEN_K:
            ma, mw = ma & (rk[None, :] < K), mw & (rk[:, None] < K)
        x = tl.load(a + rm[:, None].to(tl.int64) * stride_am + rk[None, :] * stride_ak, mask=ma, other=0.0)
        y = tl.load(w + rn[None, :].to(tl.int64) * stride_wn + rk[:, None] * stride_wk, mask=mw, other=0.0)
        acc = tl.dot(x, y, acc, input_precision="ieee")
    if HAS_BIAS:
        acc += tl.load(bias + rn, mask=rn < N, other=0.0).to(tl.float32)[None, :]
    acc = libdevice.tanh(acc)
    out = c + rm[:, None].to(tl.int64) * N + rn[None, :]
    tl.store(out, acc.to(c.dtype.element_ty), mask=(rm[:, None] < M) & (rn[None, :] < N))


def fused_tanh_linear(input, weight, bias=None):
    (M, K), N = input.shape, weight.shape[0]
    out = torch.empty((M, N), device=input.device, dtype=input.dtype)
    if M == 0 or N == 0:
        return out
    grid = lambda meta: (triton.cdiv(M, meta["BM"]) * triton.cdiv(N, meta["BN"]),)
    b = bias.contiguous() if bias is not None else out
    _linear_tanh[grid](input, weight, b, out, M, N, K, *input.stride(), *weight.stride(), HAS_BIAS=bias is not None)
    return out
