"""Results of timed calls are judged where it is cheap."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kbx_env.grading.timing import case_work, measuring, ratio, timed_results
from kbx_env.grading.timing.roofline import physical_limits
from kbx_env.spec.catalog import load_task


@pytest.mark.parametrize("us, hosted", [(50.0, False), (90_000.0, True)])
def test_a_judge_on_the_host_asks_for_no_memory_of_the_gpu(monkeypatch: pytest.MonkeyPatch, us: float, hosted: bool) -> None:
    steps = list[str]()

    @contextlib.contextmanager
    def using() -> Iterator[None]:
        steps.append("shared")
        yield
        steps.append("left")

    case, session = load_task("activation/gelu_fp16").timed[0], SimpleNamespace(gpu=SimpleNamespace(using=using))
    candidate = SimpleNamespace(session=session, case=case)
    work = case_work.CaseWork(1 << 20, 1 << 20, 2 << 20, 0, 2 << 20)
    paired = ratio.Paired(us, 40.0, 0.1, 0.0, 0.2, 3, us)
    one = measuring.Measured(candidate, paired, work, False, [], None, host_bound=hosted)  # type: ignore[arg-type]
    monkeypatch.setattr(timed_results, "_judge", lambda *_: steps.append("judged"))
    device: Any = SimpleNamespace(roofline=physical_limits("none", 0, 0, 0), notes=[])
    draw: Any = lambda: steps.append("drawn")  # noqa: E731
    timed_results.case_time(load_task("activation/gelu_fp16"), one, draw, device, lambda: steps.append("allocated"))
    assert steps == ["shared", *["allocated"] * (not hosted), "drawn", "left", "judged", "judged"]
    assert ["wait for the host" in note for note in device.notes] == [True] * hosted
