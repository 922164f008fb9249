"""Kernels against themselves in the run that reports speedups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kbx_env.eval import calibration, report, timing_quality


def _fake(job: tuple[Any, ...]) -> dict[str, Any]:
    kind, task, size, _, _, k = job
    if k == 3:
        raise RuntimeError("no memory")
    ratio = 1.05 if k == 0 else 0.999
    return {"kind": kind, "task": task, "size": size, "us": 50.0, "ratio": ratio, "low": 0.99 * ratio, "high": 1.01 * ratio,
            "pairs": 30, "alone_seconds": 0.1, "seconds": 1.0}  # fmt: skip


def test_it_counts_what_agrees_and_what_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing_quality, "compared", _fake)
    found = calibration.calibrate(10)
    assert (found["runs"], len(found["failed"]), found["within"], found["holds"]) == (9, 1, 8, 8)
    assert found["worst"] == 1.05
    said = calibration.sentence(found)
    assert "8 of 9 within 1 %" in said and "1.050x" in said and "1 runs failed" in said
    assert "none of 1 runs" in calibration.sentence({"runs": 0, "failed": ["x"]})


@pytest.mark.parametrize(("more", "says"), [(["--aa", "5"], "--backend cuda"), (["--aa", "-1"], "0 or more")])
def test_it_needs_a_run_that_times(more: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = report.main(["--policy", "expert", "--backend", "cpu", "--out", str(tmp_path / "o"), *more])
    assert code == 2 and says in capsys.readouterr().err and not (tmp_path / "o").exists()
