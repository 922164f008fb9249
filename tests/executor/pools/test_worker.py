"""A worker process."""

from __future__ import annotations

from pathlib import Path

import pytest

from kbx_env.executor.pools.process import ProcessPool, Request, WorkerLost

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
