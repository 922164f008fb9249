"""What gradings do while they hold a GPU alone."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from benchmarks import hold_steps


def test_means_of_all_holds() -> None:
    rows = [{"steps": {"in all": [0.3, 0, 40, 0.02, 60, 0.04], "warm": [0.1, 2, 0, 0, 4, 0.01]}},
            {"steps": {"in all": [0.5, 0, 0, 0.0, 20, 0.0]}}]  # fmt: skip
    found = hold_steps.means(rows)
    assert list(found) == ["in all", "warm"]
    assert found["in all"] == {"ms": 400, "runs": 0, "grader_requests": 20, "grader_requests_ms": 10, "runner_requests": 40,
                               "runner_requests_ms": 20}  # fmt: skip
    assert found["warm"]["ms"] == 50 and found["warm"]["runs"] == 1


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_workers_of_a_pool_are_watched(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The command runs as ever, and where no GPU was held that is said."""
    code = f"""
import sys
sys.orig_argv.append("{hold_steps.WORKERS}")
sys.path.append({str(hold_steps.ROOT)!r})
import hold_steps
hold_steps.install()
import kbx_env.grading.grader
from kbx_env.grading.timing import gpu_lock
print("watched by", gpu_lock.GpuHold.alone.__wrapped__.__module__)
"""
    out = tmp_path / "out.json"
    assert hold_steps.main([str(out), "--", sys.executable, "-c", code]) == 2
    shown = capfd.readouterr()
    assert "watched by hold_steps" in shown.out and "no grading has held a GPU alone" in shown.err and not out.exists()


def test_a_command_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert hold_steps.main(["out.json"]) == 2 and "python benchmarks/hold_steps.py" in capsys.readouterr().err


def test_requests_of_a_process_that_made_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(hold_steps.COUNTS, str(tmp_path))
    assert hold_steps._requests(1) == (0, 0.0)
    (tmp_path / "1").write_bytes(b"\x02" + bytes(7) + (10**9).to_bytes(8, "little") + bytes(16))
    assert hold_steps._requests(1) == (2, 1.0)
    assert json.dumps(hold_steps.means([{"steps": {}}])) == "{}"
