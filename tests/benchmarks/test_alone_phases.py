"""The phases of the exclusive time, measured without a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
from benchmarks.alone_phases import Phases
from kbx_env.grading.timing.gpu_lock import GpuHold
phases = Phases()
phases.watch_all()
for quiet in (True, False):
    with GpuHold(None).alone(quiet=quiet):
        pass
assert phases.take()["in all"]["seconds"] >= 0
"""


@pytest.mark.full  # it replaces functions of the grader, so it needs a process of its own
def test_the_lock_is_held_as_the_grader_asks_for() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
