"""A worker process."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kbx_env.executor.pools.process import ProcessPool, Request, WorkerLost

NAMES_ITS_PROCESS = """
import os
import time

from kbx_env.outcome import Fault, Outcome, Stage, Verdict

class Grader:
    def grade(self, task, source, **options):
        if source == b"die":
            os._exit(3)
        time.sleep(float(source))
        return Outcome(str(os.getpid()), Verdict.MALFORMED, Stage.SCREEN, "cpu", "contract", Fault.POLICY)

    def close(self):
        pass
"""
CRASHES = """
import ctypes

class Grader:
    def grade(self, task, source, **options):
        ctypes.string_at(0)

    def close(self):
        pass
"""


def test_a_crash_names_the_code_that_caused_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "crashes.py").write_text(CRASHES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    pool = ProcessPool(1, "crashes:Grader")
    try:
        with pytest.raises(WorkerLost, match="exit -11"):
            pool.grade(Request("t", b""), 60.0)
    finally:
        pool.close()
    said = capfd.readouterr().err
    assert "Segmentation fault" in said and "crashes.py" in said


def test_few_requests_go_to_the_worker_that_has_graded_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks for one verdict after the other met another worker each time, which had loaded nothing yet."""
    (tmp_path / "names.py").write_text(NAMES_ITS_PROCESS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    pool = ProcessPool(3, "names:Grader")

    def graded(source: bytes) -> str:
        return pool.grade(Request("t", source), 60.0).task

    try:
        assert pool.ready(60.0)
        one = graded(b"0")
        assert {graded(b"0") for _ in range(4)} == {one}
        with ThreadPoolExecutor(3) as threads:  # all work where there is work for all
            first_three = set(threads.map(graded, [b"0.5"] * 3))
        assert len(first_three) == 3
        last = graded(b"0")
        with pytest.raises(WorkerLost):
            pool.grade(Request("t", b"die"), 60.0)
        # The one in its place is not warm yet, so that it comes last.
        again = graded(b"0")
        assert again != last and graded(b"0") == again
        os.kill(int(again), signal.SIGKILL)
        while any(w is not None and str(w._pid) == again and w.alive for w in pool._idle):
            time.sleep(0.01)
        third = graded(b"0")
        assert third in first_three - {last, again}, "a warm worker is used before a dead one is replaced"
    finally:
        pool.close()
