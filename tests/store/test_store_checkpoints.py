"""Checkpoints of SQLite files in a thread of their own."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path

import pytest

from kbx_env.store import checkpoints


def test_the_thread_copies_the_log_and_commits_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "_SECONDS", 0.02)
    file = tmp_path / "x.sqlite"
    db = sqlite3.connect(file, isolation_level=None)
    db.execute("PRAGMA journal_mode=WAL")
    checkpoints.leave(db)
    db.execute("CREATE TABLE t (x BLOB)")
    for _ in range(1500):  # more pages than SQLite leaves in the log by itself
        db.execute("INSERT INTO t VALUES (zeroblob(3500))")
    assert file.stat().st_size < 1 << 20
    running = checkpoints.Checkpoints([file])
    end = time.monotonic() + 10
    while file.stat().st_size < 5 << 20 and time.monotonic() < end:
        time.sleep(0.01)
    running.close()
    assert file.stat().st_size > 5 << 20 and db.execute("SELECT count(*) FROM t").fetchone() == (1500,)
    db.close()
