# task: activation/gelu_fp16
# shows: a kernel with several autotune configurations, heuristics, aliased imports and a closure constant
# family: autotuning

import torch as th
import triton as tr
from triton import language as lang
from triton.language import arange, constexpr, load, program_id, store


def make():
    root_half: constexpr = constexpr(0.7071067811865476)

    @tr.autotune(
        configs=[tr.Config({"BLOCK": 256}, num_warps=2), tr.Config({"BLOCK": 1024}, num_warps=4)],
        key=["n"],
    )
    @tr.heuristics({"EVEN": lambda a: a["n"] % a["BLOCK"] == 0})
    @tr.jit
    def kernel(x, y, n, TANH: constexpr, BLOCK: constexpr, EVEN: constexpr):
        o = program_id(0) * BLOCK + arange(0, BLOCK)
        if EVEN:
            v = load(x + o).to(lang.float32)
        else:
            v = load(x + o, mask=o < n, other=0).to(lang.float32)
        if TANH:
            r = v * lang.sigmoid(1.5957691216057308 * (v + 0.044715 * v * v * v))
        else:
            r = 0.5 * v * (1 + lang.erf(v * root_half))
        store(y + o, r, mask=o < n)

    return kernel


_kernel = make()


def gelu_fp16(input, approximate="none"):
    x = input.contiguous()
    y = th.empty_like(x)
    n = x.numel()
    if n > 0:
        _kernel[lambda meta: (tr.cdiv(n, meta["BLOCK"]),)](x, y, n, TANH=approximate == "tanh")
    return y
