"""Every grading kept: SQLite, content-addressed, safe with several writers, resumable after a kill."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kbx_env.outcome import Fault, Outcome

_SCHEMA = """
CREATE TABLE IF NOT EXISTS gradings (
    key TEXT PRIMARY KEY, policy TEXT NOT NULL, task TEXT NOT NULL, sample INTEGER NOT NULL, created REAL NOT NULL,
    infra INTEGER NOT NULL, request TEXT NOT NULL, source BLOB, outcome TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS by_policy ON gradings (policy, task, sample);
"""


def request_key(request: Mapping[str, Any], source: bytes | None) -> str:
    """SHA-256 over everything that decides a verdict: task and its fingerprint, source, grading, device, versions."""
    text = json.dumps(dict(request), sort_keys=True, default=str).encode()
    return hashlib.sha256(text + b"\0" + (source if source is not None else b"\0none")).hexdigest()


class Store:
    """Gradings by content. One object may be used by several threads, one file by several processes."""

    def __init__(self, path: str | Path) -> None:
        self._lock = threading.Lock()
        self._db = sqlite3.connect(str(path), timeout=60, check_same_thread=False)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")
        self._db.executescript(_SCHEMA)
        self._db.commit()

    def get(self, key: str) -> Outcome | None:
        """The outcome stored under a key; an infrastructure fault is no answer and is graded again."""
        with self._lock:
            row = self._db.execute("SELECT outcome, infra FROM gradings WHERE key = ?", (key,)).fetchone()
        return Outcome.from_dict(json.loads(row[0])) if row and not row[1] else None

    def put(
        self, key: str, policy: str, sample: int, request: Mapping[str, Any], source: bytes | None, outcome: Outcome
    ) -> None:
        """Keep an outcome; replaces an earlier infrastructure fault under the same key."""
        infra = int(outcome.fault is Fault.INFRA)
        text = json.dumps(dict(request), sort_keys=True, default=str)
        row = (key, policy, outcome.task, sample, time.time(), infra, text, source, outcome.to_json())
        with self._lock, self._db:
            self._db.execute("INSERT OR REPLACE INTO gradings VALUES (?,?,?,?,?,?,?,?,?)", row)

    def rows(self, policy: str | None = None) -> Iterator[tuple[str, str, int, Outcome]]:
        """(policy, task, sample, outcome), sorted."""
        where, values = ("WHERE policy = ?", (policy,)) if policy else ("", ())
        with self._lock:
            found = self._db.execute(
                f"SELECT policy, task, sample, outcome FROM gradings {where} ORDER BY policy, task, sample", values
            ).fetchall()
        for name, task, sample, text in found:
            yield name, task, sample, Outcome.from_dict(json.loads(text))

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._db.close()
