# task: pooling/avg_pool1d
# shows: a plan class whose private fields are called _N, _C and _L, and a benchmark in the file that nobody runs
# family: words

import torch
import triton
import triton.language as tl


@triton.jit
def _pool(x, y, total, L, L_out, inv, K: tl.constexpr, S: tl.constexpr, P: tl.constexpr, B: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    row, j = i // L_out, i % L_out
    acc = tl.zeros((B,), tl.float32)
    for k in range(K):
        at = j * S - P + k
        acc += tl.load(x + row * L + at, mask=(i < total) & (at >= 0) & (at < L), other=0.0)
    tl.store(y + i, acc * inv, mask=i < total)


class _Plan:
    __slots__ = ("_C", "_L", "_N", "_k", "_p", "_s")

    def __init__(self, x, kernel_size, stride, padding):
        self._N, self._C, self._L = x.shape if x.dim() == 3 else (1, *x.shape)
        self._k, self._s, self._p = kernel_size, stride or kernel_size, padding

    @property
    def length(self):
        return (self._L + 2 * self._p - self._k) // self._s + 1

    def __call__(self, x):
        y = x.new_empty((*x.shape[:-1], self.length))
        total = self._N * self._C * self.length
        if total:
            grid = (triton.cdiv(total, 256),)
            _pool[grid](x, y, total, self._L, self.length, 1.0 / self._k, K=self._k, S=self._s, P=self._p, B=256)
        return y


def avg_pool1d(input, kernel_size, stride=None, padding=0):
    one = lambda v: v[0] if isinstance(v, (tuple, list)) else v
    return _Plan(input, one(kernel_size), one(stride), one(padding))(input.contiguous())


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["L"], x_vals=[2**i for i in range(10, 20)], line_arg="provider", line_vals=["triton", "torch"],
        line_names=["Triton", "Torch"], ylabel="GB/s", plot_name="avg-pool", args={"C": 64},
    )
)  # fmt: skip
def benchmark(L, C, provider):
    x = torch.randn(8, C, L, device="cuda")
    f = avg_pool1d if provider == "triton" else torch.nn.functional.avg_pool1d
    return 2 * x.nbytes * 1e-6 / triton.testing.do_bench(lambda: f(x, 3, 1, 1))


if __name__ == "__main__":
    torch.testing.assert_close(avg_pool1d(torch.ones(1, 1, 8, device="cuda"), 2), torch.ones(1, 1, 4, device="cuda"))
    benchmark.run(print_data=True)
