"""Long work that shares a GPU does not keep those waiting that want to measure alone."""

from __future__ import annotations

import threading
import time

from kbx_env.grading import gpu_turns
from kbx_env.grading.timing.gpu_lock import LEAST_SHARED_SECONDS, GpuHold, GpuLock


def _measuring(folder) -> tuple[threading.Event, threading.Event]:
    """Start a grading that wants the GPU alone; returns whether it got it, and what ends it."""
    got, end = threading.Event(), threading.Event()

    def measure() -> None:
        with GpuLock("g", folder).alone():
            got.set()
            end.wait(10)

    threading.Thread(target=measure, daemon=True).start()
    return got, end


def test_a_judge_lets_a_measurement_pass_and_goes_on_after_it(tmp_path) -> None:
    hold = GpuHold(GpuLock("g", tmp_path))
    with hold.using():
        got, end = _measuring(tmp_path)
        assert not got.wait(2 * LEAST_SHARED_SECONDS)
        threading.Timer(0.3, end.set).start()
        gpu_turns.yield_gpu()  # returns once the measurement is over
        assert got.is_set() and end.is_set()
        assert hold.waited >= 0.25 and hold.spent["shared"] >= 2 * LEAST_SHARED_SECONDS
        again, end = _measuring(tmp_path)
        assert not again.wait(0.2), "the judge has the GPU again"
    assert again.wait(5)
    end.set()
    assert hold.spent["alone"] == 0.0


def test_nobody_gives_way_who_measures_or_has_just_begun_or_has_no_gpu(tmp_path) -> None:
    gpu_turns.yield_gpu()
    nothing = GpuHold(None)
    with nothing.using():
        gpu_turns.yield_gpu()
    hold = GpuHold(GpuLock("g", tmp_path))
    for kind in (hold.alone, hold.using):
        with kind():
            got, end = _measuring(tmp_path)
            began = time.monotonic()
            gpu_turns.yield_gpu()
            assert time.monotonic() - began < LEAST_SHARED_SECONDS
            assert not got.wait(0.05)
        assert got.wait(5)
        end.set()
        time.sleep(0.05)
