"""Kernels whose launches are left out are compiled in threads, once each, and host code can look at them meanwhile."""

from __future__ import annotations

import os
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


def _warm(scale: int, block: int = 256) -> Any:
    return _scaled.warmup(torch.float32, torch.float32, 8, SCALE=scale, BLOCK=block, grid=(1,))


def test_kernels_are_compiled_in_threads_and_found_by_later_launches() -> None:
    ahead = CompileAhead(threads=2)
    with ahead.collecting():
        futures = [_warm(scale) for scale in (3, 5, 3, 7)]
    assert threading.active_count() > 1
    assert len(ahead.raw_futures) == 3, "one for each specialisation"
    ahead.settle()
    assert threading.active_count() == 1, "no thread is left beside a measurement"
    made = futures[0].result()
    assert _warm(3) is made and made.asm["cubin"] and _warm(9).asm["cubin"]


def test_the_next_kernels_are_compiled_ahead_too() -> None:
    ahead = CompileAhead(threads=2)
    for scale in (3, 5):
        with ahead.collecting():
            future = _warm(scale)
        ahead.settle()
        assert future.result().asm["ptx"]


def test_errors_wait_for_the_launch_that_matters() -> None:
    ahead = CompileAhead(threads=1)
    with ahead.collecting():
        _broken.warmup(torch.float32, BLOCK=16, grid=(1,))
        _warm(3)
    ahead.settle()
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
    ahead.settle()


def test_threads_give_way_to_others() -> None:
    seen: list[int] = []
    ahead = CompileAhead(threads=1)
    ahead.executor.submit(lambda: seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))).result()
    assert seen == [min(19, os.getpriority(os.PRIO_PROCESS, 0) + compile_ahead.NICENESS)]
    ahead.executor.shutdown()
