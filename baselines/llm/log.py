"""Every call of a model, kept as it ends: a run that was killed asks nothing twice, and anybody can read what was said."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kbx_env.baselines.llm.chat import Ask, CallFailed, Finish, Reply

from kbx_env.errors import UsageError
from kbx_env.grading.runtime.policy_script import ScriptResult

_SCHEMA = """
CREATE TABLE IF NOT EXISTS calls (
    key TEXT PRIMARY KEY, policy TEXT NOT NULL, task TEXT NOT NULL, sample INTEGER NOT NULL, label TEXT NOT NULL,
    created REAL NOT NULL, asked_of TEXT NOT NULL, request TEXT NOT NULL, text TEXT NOT NULL, thinking TEXT NOT NULL,
    finish TEXT NOT NULL, prompt_tokens INTEGER, completion_tokens INTEGER, dollars REAL, model TEXT, seconds REAL,
    attempts INTEGER NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS failures (
    policy TEXT NOT NULL, task TEXT NOT NULL, sample INTEGER NOT NULL, label TEXT NOT NULL, created REAL NOT NULL,
    attempt INTEGER NOT NULL, kind TEXT NOT NULL, text TEXT NOT NULL, seconds REAL NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS scripts (
    key TEXT PRIMARY KEY, policy TEXT NOT NULL, task TEXT NOT NULL, sample INTEGER NOT NULL, label TEXT NOT NULL,
    created REAL NOT NULL, files TEXT NOT NULL, status INTEGER, stdout TEXT NOT NULL, stderr TEXT NOT NULL,
    seconds REAL NOT NULL
) STRICT;
"""
_ID = 0x6B627843
"""SQLite's application id of these files."""


@dataclass(frozen=True)
class Place:
    """Where in a run a call belongs; ``label`` is unique within one answer to one task."""

    policy: str
    task: str
    sample: int
    label: str


@dataclass(frozen=True)
class Spent:
    """What answers took. Tokens and dollars count what the server told; ``untold`` is the number of calls without tokens."""

    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    dollars: float | None = None
    seconds: float = 0.0
    untold: int = 0
    scripts: int = 0
    """Scripts of its own that the policy ran in the sandbox."""

    def __add__(self, other: Spent) -> Spent:
        dollars = None if self.dollars is None and other.dollars is None else (self.dollars or 0.0) + (other.dollars or 0.0)
        return Spent(
            self.calls + other.calls, self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens, dollars, self.seconds + other.seconds, self.untold + other.untold,
            self.scripts + other.scripts,
        )  # fmt: skip

    @property
    def tokens(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return dict(vars(self))


def spent_on(reply: Reply) -> Spent:
    """What one answer took."""
    untold = int(reply.prompt_tokens is None or reply.completion_tokens is None)
    return Spent(
        1, reply.prompt_tokens or 0, reply.completion_tokens or 0, reply.dollars, reply.seconds or 0.0, untold
    )  # fmt: skip


def key_of(place: Place, model: str, ask: Ask) -> str:
    """SHA-256 over what decides an answer. Not the address: a server may move between two runs."""
    text = json.dumps([place.policy, place.task, place.sample, place.label, model, ask.to_dict()], sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


class CallLog:
    """SQLite, one row a call that was answered, one row an attempt that failed. Threads may share it."""

    def __init__(self, path: str | Path) -> None:
        """Open or begin a log; ``:memory:`` keeps it for this process only.

        Raises:
            UsageError: the file cannot be opened, or is another program's.
        """
        self._lock = threading.Lock()
        try:
            self._db = sqlite3.connect(str(path), check_same_thread=False, timeout=30, isolation_level=None)
            (mark,) = self._db.execute("PRAGMA application_id").fetchone()
            (tables,) = self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()
            if mark != _ID and tables:
                raise UsageError(f"{path} is a database of another kind; give another folder")
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.executescript(_SCHEMA)
            self._db.execute(f"PRAGMA application_id = {_ID}")
        except sqlite3.DatabaseError as e:
            raise UsageError(f"cannot keep calls in {path}: {e}; delete that file or choose another folder") from e

    def find(self, key: str) -> Reply | None:
        """The answer to a call that has ended."""
        columns = "text, finish, thinking, prompt_tokens, completion_tokens, dollars, model, seconds"
        with self._lock:
            row = self._db.execute(f"SELECT {columns} FROM calls WHERE key = ?", (key,)).fetchone()
        return Reply(row[0], Finish(row[1]), *row[2:]) if row else None

    def keep(self, key: str, place: Place, asked_of: str, ask: Ask, reply: Reply, attempts: int) -> None:
        """Keep an answer; on return it survives a kill of this process."""
        row = (
            key, place.policy, place.task, place.sample, place.label, time.time(), asked_of, _text(json.dumps(ask.to_dict())),
            _text(reply.text), _text(reply.thinking), str(reply.finish), reply.prompt_tokens, reply.completion_tokens,
            reply.dollars, reply.model, reply.seconds, attempts,
        )  # fmt: skip
        with self._lock:
            self._db.execute(f"INSERT OR REPLACE INTO calls VALUES ({','.join('?' * len(row))})", row)

    def fail(self, place: Place, attempt: int, failure: CallFailed, text: str, seconds: float) -> None:
        """Keep an attempt that failed; ``text`` is the failure's, without secrets."""
        row = (place.policy, place.task, place.sample, place.label, time.time(), attempt, failure.kind, _text(text), seconds)
        with self._lock:
            self._db.execute("INSERT INTO failures VALUES (?,?,?,?,?,?,?,?,?)", row)

    def find_script(self, key: str) -> ScriptResult | None:
        """How a script ended that has ended."""
        with self._lock:
            row = self._db.execute("SELECT status, stdout, stderr, seconds FROM scripts WHERE key = ?", (key,)).fetchone()
        return ScriptResult(*row) if row else None

    def keep_script(self, key: str, place: Place, files: Mapping[str, str], result: ScriptResult) -> None:
        """Keep how a script ended: its output goes into later prompts, and need not be the same a second time."""
        row = (
            key, place.policy, place.task, place.sample, place.label, time.time(), _text(json.dumps(dict(files))),
            result.status, _text(result.stdout), _text(result.stderr), result.seconds,
        )  # fmt: skip
        with self._lock:
            self._db.execute(f"INSERT OR REPLACE INTO scripts VALUES ({','.join('?' * len(row))})", row)

    def total(self) -> Spent:
        """What all calls in the file took."""
        counted = (
            "count(*), coalesce(sum(prompt_tokens), 0), coalesce(sum(completion_tokens), 0), sum(dollars), "
            "coalesce(sum(seconds), 0.0), coalesce(sum(prompt_tokens IS NULL OR completion_tokens IS NULL), 0)"
        )
        with self._lock:
            return Spent(*self._db.execute(f"SELECT {counted} FROM calls").fetchone())

    def rows(self) -> Iterator[Mapping[str, Any]]:
        """The calls in the order in which they ended, with ``request`` as JSON types."""
        yield from ({**r, "request": json.loads(r["request"])} for r in self._all("calls"))

    def failures(self) -> Iterator[Mapping[str, Any]]:
        """The attempts that failed, in order."""
        yield from self._all("failures")

    def _all(self, table: str) -> list[dict[str, Any]]:
        with self._lock, contextlib.closing(self._db.execute(f"SELECT * FROM {table} ORDER BY created, rowid")) as cursor:
            names = [d[0] for d in cursor.description]
            return [dict(zip(names, row)) for row in cursor]

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._db.close()


def _text(text: str) -> str:
    # Half a surrogate pair, which JSON can carry and SQLite's text cannot.
    return text.encode("utf-8", "replace").decode()
