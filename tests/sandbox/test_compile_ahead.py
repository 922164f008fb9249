"""Kernels whose launches are left out are compiled in threads, once each, and host code can look at them meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from kbx_env.sandbox import compile_ahead
from kbx_env.sandbox.compile_ahead import CompileAhead, Pending
from kbx_env.sandbox.fake_cuda.driver import TARGETS, StandInDriver


@triton.jit
def _scaled(x, y, n, SCALE: tl.constexpr, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + o, tl.load(x + o, mask=o < n) * SCALE, mask=o < n)


@triton.jit
def _broken(x, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK), no_such_name)  # noqa: F821


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[None]:
    """A target without a GPU, and an empty cache."""
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    before = triton.runtime.driver._active
    triton.runtime.driver.set_active(StandInDriver(TARGETS["sm_90"]))
    for fn in (_scaled, _broken):
        fn.device_caches.clear()
    yield
    triton.runtime.driver._active = before


def _compilers() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("compile")]


def _warm(scale: int, block: int = 256) -> Any:
    return _scaled.warmup(torch.float32, torch.float32, 8, SCALE=scale, BLOCK=block, grid=(1,))


def test_kernels_are_compiled_in_threads_and_found_by_later_launches() -> None:
    ahead = CompileAhead(threads=2)
    with ahead.collecting():
        futures = [_warm(scale) for scale in (3, 5, 3, 7)]
    assert ahead.busy and _compilers()
    assert len(ahead.future_kernels) == 3, "one for each specialisation"
    ahead.finish()
    assert not ahead.busy and not _compilers(), "no thread is left beside a measurement"
    made = futures[0].result()
    assert _warm(3) is made and made.asm["cubin"] and _warm(9).asm["cubin"]


def test_the_next_kernels_are_compiled_ahead_too() -> None:
    ahead = CompileAhead(threads=2)
    for scale in (3, 5):
        with ahead.collecting():
            future = _warm(scale)
        ahead.finish()
        assert future.result().asm["ptx"]


def test_errors_wait_for_the_launch_that_matters() -> None:
    ahead = CompileAhead(threads=1)
    with ahead.collecting():
        _broken.warmup(torch.float32, BLOCK=16, grid=(1,))
        _warm(3)
    ahead.finish()
    with pytest.raises(triton.CompilationError, match="no_such_name"):
        found = _broken.warmup(torch.float32, BLOCK=16, grid=(1,))
        found.result()
    assert _warm(3).asm["cubin"]


def test_host_code_that_looks_at_a_kernel_waits_for_it() -> None:
    ahead = CompileAhead(threads=1)
    with ahead.collecting():
        pending = Pending(_warm(3, 512))
    assert pending.metadata.num_warps == 4 and "ptx" in pending.asm
    with pytest.raises(AttributeError):
        pending.no_such_attribute  # noqa: B018
    ahead.finish()


def test_a_kernel_that_failed_in_a_thread_is_compiled_again_by_the_launch() -> None:
    """A full disk or a killed ptxas is over by the time of the launch."""
    failures, ahead = [OSError("no space left")], CompileAhead(threads=1)

    def compiled() -> str:
        if failures:
            raise failures.pop()
        return "kernel"

    kept: list[str] = []
    future = ahead.submit("key", compiled, kept.append)
    ahead.finish()
    assert not kept and future.result() == "kernel" and kept == ["kernel"]


@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
def test_whatever_a_thread_raises_nothing_is_left_behind(error: type[BaseException]) -> None:
    ahead = CompileAhead(threads=1)

    def ends() -> None:
        raise error("enough")

    ahead.submit("key", ends, lambda kernel: None)
    before = ahead.executor
    ahead.finish()
    assert not ahead.busy and ahead.executor is not before


def test_threads_give_way_to_others() -> None:
    seen: list[int] = []
    ahead = CompileAhead(threads=1)
    ahead.executor.submit(lambda: seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))).result()
    assert seen == [min(19, os.getpriority(os.PRIO_PROCESS, 0) + compile_ahead.NICENESS)]
    ahead.executor.shutdown()


ARMED = """
import sys, tempfile, torch, triton, triton.language as tl
from kbx_env.sandbox import firewall, limits
from kbx_env.sandbox.compile_ahead import CompileAhead
from kbx_env.sandbox.fake_cuda.driver import TARGETS, StandInDriver

@triton.jit
def scaled(x, n, SCALE: tl.constexpr):
    o = tl.arange(0, 128)
    tl.store(x + o, tl.load(x + o, mask=o < n) * SCALE, mask=o < n)

triton.knobs.cache.dir = tempfile.tempdir = sys.argv[1]
triton.runtime.driver.set_active(StandInDriver(TARGETS["sm_90"]))
log = firewall.Log()
limits.watch(log, sys.argv[1], lambda: True)
ahead = CompileAhead(threads=2)
with ahead.collecting():
    found = [scaled.warmup(torch.float32, 8, SCALE=k, grid=(1,)) for k in (3, 5)]
ahead.finish()
print(log.denied, all(kernel.result().asm["cubin"] for kernel in found))
"""


def test_threads_compile_while_the_audit_hook_is_armed(tmp_path: Any) -> None:
    """Functions on constants are the submission's code, and run in the compiler's threads."""
    script, folder = tmp_path / "armed.py", tmp_path / "own"
    script.write_text(ARMED)
    folder.mkdir()
    ended = subprocess.run([sys.executable, str(script), str(folder)], capture_output=True, text=True, timeout=120)
    assert ended.stdout.strip() == "[] True", ended.stderr[-2000:]
