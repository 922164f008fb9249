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

from kbx_env.errors import UsageError
from kbx_env.outcome import Fault, Outcome

_SCHEMA = """
CREATE TABLE IF NOT EXISTS gradings (
    key TEXT PRIMARY KEY, policy TEXT NOT NULL, task TEXT NOT NULL, sample INTEGER NOT NULL, created REAL NOT NULL,
    infra INTEGER NOT NULL, request TEXT NOT NULL, source BLOB, outcome TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS by_policy ON gradings (policy, task, sample);
"""


def canonical(request: Mapping[str, Any]) -> str:
    """The one spelling of a request: sorted keys, tuples as lists."""
    return json.dumps(dict(request), sort_keys=True, default=str)


def request_key(request: Mapping[str, Any], source: bytes | None) -> str:
    """SHA-256 over everything that decides a verdict: task and its fingerprint, source, grading, device, versions."""
    text = canonical(request).encode()
    return hashlib.sha256(text + b"\0" + (source if source is not None else b"\0none")).hexdigest()


class Store:
    """Gradings by content. One object may be used by several threads, one file by several processes.

    Raises:
        UsageError: the file cannot be opened, or is no database.
    """

    def __init__(self, path: str | Path) -> None:
        self._lock = threading.Lock()
        try:
            self._db = sqlite3.connect(str(path), timeout=60, check_same_thread=False)
            _patiently(self._db, "PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.executescript(_SCHEMA)
            self._db.commit()
        except sqlite3.DatabaseError as e:
            raise UsageError(f"cannot keep gradings in {path}: {e}; delete that file or choose another folder") from e

    def get(self, key: str) -> Outcome | None:
        """The outcome stored under a key; an infrastructure fault is no answer and is graded again."""
        with self._lock:
            row = self._db.execute("SELECT outcome, infra FROM gradings WHERE key = ?", (key,)).fetchone()
        return Outcome.from_dict(json.loads(row[0])) if row and not row[1] else None

    def find(self, request: Mapping[str, Any]) -> Outcome | None:
        """The verdict of a request whatever the source was: for policies that never answer alike twice."""
        where = "policy = ? AND task = ? AND sample = ? AND request = ? AND NOT infra"
        values = (request["policy"], request["task"], request["sample"], canonical(request))
        with self._lock:
            row = self._db.execute(
                f"SELECT outcome FROM gradings WHERE {where} ORDER BY created LIMIT 1", values
            ).fetchone()
        return Outcome.from_dict(json.loads(row[0])) if row else None

    def put(
        self, key: str, policy: str, sample: int, request: Mapping[str, Any], source: bytes | None, outcome: Outcome
    ) -> None:
        """Keep an outcome. The first verdict under a key stands; it replaces an infrastructure fault, never vice versa."""
        infra = int(outcome.fault is Fault.INFRA)
        row = (key, policy, outcome.task, sample, time.time(), infra, canonical(request), source, outcome.to_json())
        fresh = "created=excluded.created, infra=excluded.infra, request=excluded.request, outcome=excluded.outcome"
        with self._lock, self._db:
            self._db.execute(
                "INSERT INTO gradings VALUES (?,?,?,?,?,?,?,?,?) "
                f"ON CONFLICT (key) DO UPDATE SET {fresh} WHERE gradings.infra",
                row,
            )

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


def _patiently(db: sqlite3.Connection, statement: str) -> None:
    # Switching a new file to WAL needs it alone for a moment, and there SQLite does not honour the busy timeout.
    for _ in range(200):
        try:
            db.execute(statement)
            return
        except sqlite3.OperationalError as e:
            if "locked" not in str(e):
                raise
            time.sleep(0.05)
    db.execute(statement)
