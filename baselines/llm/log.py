"""Records every call of a model in SQLite as it ends, for resumed runs and for readers of a run."""

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

from kbx_env.baselines.llm.chat import CallFailed, ChatRequest, Finish, Reply

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
class CallId:
    """Identifies a call within a run.

    Attributes:
        policy: name of the policy.
        task: id of the task.
        sample: number of the answer, from 0.
        label: unique within one answer to one task, such as ``round 1, slot 0, generate``.
    """

    policy: str
    task: str
    sample: int
    label: str


@dataclass(frozen=True)
class Usage:
    """Usage of calls. Tokens and dollars are sums over the calls for which the server reports them.

    Attributes:
        calls: number of calls.
        prompt_tokens: sum.
        completion_tokens: sum, thinking included.
        dollars: sum; ``None`` where no call has a known cost.
        seconds: wall time, summed over calls.
        untold: number of calls for which the server reports no tokens.
        scripts: number of scripts that the policy ran in the sandbox.
    """

    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    dollars: float | None = None
    seconds: float = 0.0
    untold: int = 0
    scripts: int = 0

    def __add__(self, other: Usage) -> Usage:
        unknown = self.dollars is None and other.dollars is None
        return Usage(
            self.calls + other.calls, self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            None if unknown else (self.dollars or 0.0) + (other.dollars or 0.0), self.seconds + other.seconds,
            self.untold + other.untold, self.scripts + other.scripts,
        )  # fmt: skip

    @property
    def tokens(self) -> int:
        """Number of prompt and completion tokens together."""
        return self.prompt_tokens + self.completion_tokens

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON types."""
        return dict(vars(self))


def usage_of(reply: Reply) -> Usage:
    """Return the usage of one call."""
    untold = int(reply.prompt_tokens is None or reply.completion_tokens is None)
    return Usage(
        1, reply.prompt_tokens or 0, reply.completion_tokens or 0, reply.dollars, reply.seconds or 0.0, untold
    )


def key_of(call: CallId, model: str, request: ChatRequest) -> str:
    """Return the key of a call in the record.

    Args:
        call: identifies the call within the run.
        model: name of the model.
        request: the request.

    Returns:
        SHA-256 in hexadecimal, over all three. The server's address is left out: it may change between two runs.
    """
    text = json.dumps([call.policy, call.task, call.sample, call.label, model, request.to_dict()], sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


class CallLog:
    """A record of calls: an SQLite file with a row for each reply, failed attempt and script.

    Several threads may use one record.
    """

    def __init__(self, path: str | Path) -> None:
        """Open or create a record.

        Args:
            path: the file; ``:memory:`` for a record that ends with this process.

        Raises:
            UsageError: the file cannot be opened, or belongs to another program.
        """
        self._lock = threading.Lock()
        try:
            self._db = sqlite3.connect(str(path), check_same_thread=False, timeout=30, isolation_level=None)
            (application,) = self._db.execute("PRAGMA application_id").fetchone()
            (tables,) = self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()
            if application != _ID and tables:
                raise UsageError(f"{path} is a database of another kind; give another folder")
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.executescript(_SCHEMA)
            self._db.execute(f"PRAGMA application_id = {_ID}")
        except sqlite3.DatabaseError as e:
            raise UsageError(f"cannot keep calls in {path}: {e}; delete that file or choose another folder") from e

    def find(self, key: str) -> Reply | None:
        """Return the recorded reply to a call; ``None`` where there is none."""
        columns = "text, finish, thinking, prompt_tokens, completion_tokens, dollars, model, seconds"
        with self._lock:
            row = self._db.execute(f"SELECT {columns} FROM calls WHERE key = ?", (key,)).fetchone()
        return Reply(row[0], Finish(row[1]), *row[2:]) if row else None

    def keep(
        self, key: str, call: CallId, asked_of: str, request: ChatRequest, reply: Reply, attempts: int
    ) -> None:
        """Record a reply. When this returns, the reply survives a kill of this process.

        Args:
            key: of the record (``key_of``).
            call: identifies the call within the run.
            asked_of: name of the model that was asked.
            request: the request.
            reply: the reply.
            attempts: number of attempts, the successful one included.
        """
        row = (
            key, call.policy, call.task, call.sample, call.label, time.time(), asked_of,
            _storable(json.dumps(request.to_dict())), _storable(reply.text), _storable(reply.thinking),
            str(reply.finish), reply.prompt_tokens, reply.completion_tokens, reply.dollars, reply.model, reply.seconds,
            attempts,
        )  # fmt: skip
        with self._lock:
            self._db.execute(f"INSERT OR REPLACE INTO calls VALUES ({','.join('?' * len(row))})", row)

    def fail(self, call: CallId, attempt: int, failure: CallFailed, text: str, seconds: float) -> None:
        """Record a failed attempt.

        Args:
            call: identifies the call within the run.
            attempt: number of the attempt, from 1.
            failure: the failure.
            text: its text, without secrets.
            seconds: wall time of the attempt.
        """
        row = (
            call.policy, call.task, call.sample, call.label, time.time(), attempt, failure.kind, _storable(text),
            seconds,
        )  # fmt: skip
        with self._lock:
            self._db.execute("INSERT INTO failures VALUES (?,?,?,?,?,?,?,?,?)", row)

    def find_script(self, key: str) -> ScriptResult | None:
        """Return the recorded result of a script; ``None`` where there is none."""
        with self._lock:
            query = "SELECT status, stdout, stderr, seconds FROM scripts WHERE key = ?"
            row = self._db.execute(query, (key,)).fetchone()
        return ScriptResult(*row) if row else None

    def keep_script(self, key: str, call: CallId, files: Mapping[str, str], result: ScriptResult) -> None:
        """Record the result of a script: later prompts contain its output, which may differ in a second run.

        Args:
            key: of the record.
            call: identifies the run of the script, like a call of the model.
            files: the script's files, text by name.
            result: its exit status and output.
        """
        row = (
            key, call.policy, call.task, call.sample, call.label, time.time(), _storable(json.dumps(dict(files))),
            result.status, _storable(result.stdout), _storable(result.stderr), result.seconds,
        )  # fmt: skip
        with self._lock:
            self._db.execute(f"INSERT OR REPLACE INTO scripts VALUES ({','.join('?' * len(row))})", row)

    def total(self) -> Usage:
        """Return the usage of all calls in the record; ``scripts`` is 0."""
        columns = (
            "count(*), coalesce(sum(prompt_tokens), 0), coalesce(sum(completion_tokens), 0), sum(dollars), "
            "coalesce(sum(seconds), 0.0), coalesce(sum(prompt_tokens IS NULL OR completion_tokens IS NULL), 0)"
        )
        with self._lock:
            return Usage(*self._db.execute(f"SELECT {columns} FROM calls").fetchone())

    def rows(self) -> Iterator[Mapping[str, Any]]:
        """Yield the calls in the order in which they ended: values by column, ``request`` as JSON types."""
        yield from ({**r, "request": json.loads(r["request"])} for r in self._all("calls"))

    def failures(self) -> Iterator[Mapping[str, Any]]:
        """Yield the failed attempts in order: values by column."""
        yield from self._all("failures")

    def _all(self, table: str) -> list[dict[str, Any]]:
        query = f"SELECT * FROM {table} ORDER BY created, rowid"
        with self._lock, contextlib.closing(self._db.execute(query)) as cursor:
            names = [d[0] for d in cursor.description]
            return [dict(zip(names, row)) for row in cursor]

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._db.close()


def _storable(text: str) -> str:
    """Replace lone surrogates, which JSON may contain and SQLite does not accept."""
    return text.encode("utf-8", "replace").decode()
