"""One policy on several devices."""

from __future__ import annotations

import pytest
from kbx_env.eval.devices import across
from kbx_env.eval.report_data import from_reports, joined


def _report(device: str, speedups: dict[str, float | None], policy: str = "p", **more: str) -> dict:
    def row(task: str, s: float | None) -> dict:
        timing = None if s is None else {"speedup": s, "low": s, "high": s, "floor_ratio": None, "cases": []}
        return {"task": task, "category": task.split("/")[0], "difficulty": 1, "sample": 0, "compiled": True, "fault": None,
                "verdict": "correct" if s else "incorrect", "correct": bool(s), "timing": timing}  # fmt: skip

    manifest = {"timed": True, "device": device, **more}
    return {"policy": policy, "manifest": manifest, "tasks": [row(t, s) for t, s in speedups.items()]}


def test_the_ratio_over_devices_of_tasks_that_all_solve() -> None:
    one = from_reports([_report("H200", {"a/x": 2.0, "a/y": 1.0, "a/z": 3.0})], "one")
    two = from_reports([_report("L20", {"a/x": 0.5, "a/y": 1.1, "a/z": None})], "two")
    (found,) = across(joined([one, two]))
    assert found.policy == "p" and found.devices == ("H200", "L20") and found.tasks == 2
    assert found.worst == pytest.approx(4.0) and found.worst_task == "a/x" and found.median == pytest.approx(2.55)
    assert found.mixed == 1 and found.geometric_means["H200"] == pytest.approx(2**0.5)


def test_one_device_or_no_common_task_says_nothing() -> None:
    one, same = _report("H200", {"a/x": 2.0}), _report("H200", {"a/x": 3.0})
    other = _report("L20", {"a/y": 2.0})
    assert across(joined([from_reports([one], "1"), from_reports([same], "2")])) == []
    assert across(joined([from_reports([one], "1"), from_reports([other], "2")])) == []
    held, said = (_report("L20", {"a/x": 3.0}, sizes=s) for s in ("held-out", "published"))
    assert across(joined([from_reports([one], "1"), from_reports([held], "2")])) == [], "other sizes are no other device"
    assert len(across(joined([from_reports([one], "1"), from_reports([said], "2")]))) == 1
