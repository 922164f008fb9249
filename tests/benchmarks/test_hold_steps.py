"""What gradings do while they hold a GPU alone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import hold_steps

ASKS = """
import fcntl, os

def ask(request):
    try:
        fcntl.ioctl(0, request, bytes(32))
    except OSError:  # no file of a driver
        pass

for request in (0xC020462A, 0xC020462A, 0xC020462B, 33, 0x5401):  # two controls, an allocation, memory, and of a terminal
    ask(request)
if os.fork() == 0:
    ask(0xC0204629)
    os._exit(0)
os.wait()
print(os.getpid())
"""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_requests_are_counted_in_each_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library, counts = tmp_path / "requests.so", tmp_path / "counts"
    counts.mkdir()
    source = hold_steps.ROOT / "driver_requests.c"
    subprocess.run(["gcc", "-Wall", "-Werror", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    environment = {**os.environ, hold_steps.COUNTS: str(counts), "LD_PRELOAD": str(library)}
    done = subprocess.run([sys.executable, "-c", ASKS], env=environment, capture_output=True, text=True, check=True)
    monkeypatch.setenv(hold_steps.COUNTS, str(counts))
    made, seconds = hold_steps._requests(int(done.stdout))
    assert made == 4 and 0 < seconds < 1
    assert hold_steps._of_all(counts)[0] == 5, "with that of the fork"


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
