"""The stand-in GPU: what host code may ask of it, and that a compiled kernel's launch is a launch."""

from __future__ import annotations

import pytest

from kbx_env.outcome import Verdict
from kbx_env.sandbox import handle

KERNEL = """
import torch
import triton
import triton.language as tl


@triton.jit
def _abs(x, y, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y + i, tl.abs(tl.load(x + i, mask=i < n)), mask=i < n)


def abs(input_tensor, out=None):
    x = input_tensor.contiguous()
    y, n = torch.empty_like(x), x.numel()
    {}
    return y if out is None else out.copy_(y)
"""
LAUNCH = "if n: _abs[(triton.cdiv(n, 256),)](x, y, n, B=256)"


def _grade(grader, body: str):
    return grader.grade("math/abs", KERNEL.format(body), backend="cpu", targets=(), wall=30.0)


@pytest.mark.parametrize(
    "line",
    [
        "assert torch.cuda.get_device_name() == 'NVIDIA H200' and torch.version.cuda",
        "assert torch.device(0) == x.device and isinstance(x.device, torch.device) and x.get_device() == 0",
        "y = torch.empty(x.shape, dtype=x.dtype, device=0).to(0)",
        "y = x.new_empty(x.shape, device=torch.cuda.current_device())",
        "y = torch.empty(0, device='cuda').resize_(x.shape)",
        "y = torch.empty(0, device='cuda').set_(torch.empty_like(x))",
        "a = torch.zeros(4, device=0); a.resize_(9); a[4:].zero_(); a.resize_(2); assert a[1].item() == 0",
        "assert torch.tensor([3, 4]).pin_memory().to(x.device, non_blocking=True)[1].item() == 4",
        "assert torch.promote_types(torch.float16, x.dtype) == x.dtype and torch.can_cast(x.dtype, x.dtype)",
        "assert torch.cuda.mem_get_info()[1] > 1 << 36 and not torch.cuda.is_current_stream_capturing()",
        "s = torch.cuda.Stream(); s.wait_stream(torch.cuda.current_stream()); x.record_stream(s); s.record_event().wait()",
        "s = torch.cuda.Stream()\n    with torch.cuda.stream(s): assert torch.cuda.current_stream() is s",
        "with torch.cuda._DeviceGuard(0), torch.cuda.device(x.device), torch.cuda.device_of(x): pass",
        "with torch.profiler.record_function('a'), torch.cuda.nvtx.range('b'), torch.inference_mode(): pass",
        "torch.compiler.disable(recursive=False)(print)(); torch.cuda.nvtx.range_push('a')",
        "assert triton.testing.do_bench(lambda: 1 / 0, quantiles=[0.5, 0.2, 0.8]) == [1.0] * 3",
        "assert isinstance(torch.Generator(device='cuda'), torch.Generator)",
    ],
)
def test_host_code_finds_a_gpu(grader, line: str) -> None:
    outcome = _grade(grader, f"{line}\n    {LAUNCH}")
    assert outcome.correct, outcome.message


def test_the_launch_of_a_compiled_kernel_counts(grader) -> None:
    body = (
        "k = _abs.warmup(x, y, n, B=256, grid=(1,))\n    k._init_handles()\n"
        "    assert k.n_regs > 0 and k.n_spills == 0 and k.metadata.num_warps == 4 and 'ptx' in k.asm\n"
        "    k[(triton.cdiv(n, 256), 1, 1)](x, y, n, 256)"
    )
    outcome = _grade(grader, body)
    assert outcome.correct and outcome.evidence.launches > 0, outcome.message


def test_a_compiled_kernel_takes_all_its_arguments(grader) -> None:
    outcome = _grade(grader, "_abs.warmup(x, y, n, B=256, grid=(1,))[(1, 1, 1)](x, y, n)")
    assert outcome.verdict is Verdict.RUNTIME_ERROR and "all its 4 arguments" in outcome.message


def test_warming_up_is_no_launch(grader) -> None:
    assert not _grade(grader, "y.copy_(x); _abs.warmup(x, y, n, B=256, grid=(1,))").correct


def test_launches_of_tritons_own_kernels_are_counted_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class Compiled:
        def __init__(self) -> None:
            self.ran: list[object] = []

        def __getitem__(self, grid: object):
            return self.ran.append

    monkeypatch.setattr(handle, "CompiledKernel", Compiled)
    answers, told = [True, False], []
    handle.watch(lambda kernel: told.append(kernel) is None and answers.pop(0))
    kernel = Compiled()
    kernel[(1, 1, 1)]("first")
    kernel[(1, 1, 1)]("left out")
    assert kernel.ran == ["first"] and told == [kernel, kernel]
