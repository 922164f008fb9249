"""Autotuners beside the clock: nothing is measured in a timed call."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import triton
from triton.runtime.autotuner import Autotuner

from kbx_env.device.autotuners import Autotuners


@pytest.fixture
def tuners() -> Autotuners:
    return Autotuners()


def _tuner(launched: list[int]) -> Autotuner:
    def kernel(x: Any, n: Any, B: Any) -> None: ...

    fn = SimpleNamespace(fn=kernel, run=lambda *a, **k: launched.append(k["B"]))
    configs = [triton.Config({"B": b}) for b in (16, 32)]
    # The second is the faster one.
    times = iter([2.0, 1.0] * 100)
    return Autotuner(fn, ["x", "n", "B"], configs, ["n"], None, None, do_bench=lambda *a, **k: [next(times)] * 3)


def test_a_key_that_comes_late_takes_what_was_found(tuners: Autotuners) -> None:
    launched: list[int] = []
    tuner = _tuner(launched)
    tuner.run("x", 5)
    tuners.frozen = True
    tuner.run("x", 5)
    tuner.run("x", 6)
    assert launched == [32, 32, 32] and tuners.late == 0 and list(tuner.cache) == [(5,)]
    tuners.frozen = False
    tuner.run("x", 6)
    assert list(tuner.cache) == [(5,), (6,)]


def test_tuning_in_a_timed_call_is_counted(tuners: Autotuners) -> None:
    launched: list[int] = []
    tuners.frozen = True
    _tuner(launched).run("x", 5)
    assert tuners.late == 2
