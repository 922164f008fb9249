"""The journal of the grading service: which requests it has accepted, so that a killed service takes them up again.

The verdicts themselves are in the store. The journal is a second SQLite file beside it. One thread writes it, and
commits all that has arrived meanwhile at once: 500 clients need no 500 commits. Another one makes the checkpoints.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import queue
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kbx_env.errors import UsageError
from kbx_env.store.checkpoints import leave
from kbx_env.store.schema import pack_source, unpack_source

ENDED = 100_000
"""Ids of ended gradings that stay known; older ones are deleted. About 150 bytes each."""
_TRIM = 1_000
"""Ended gradings between two deletions."""
_GROUP = 2_000
"""Most statements of one commit."""
_TABLE = """
CREATE TABLE IF NOT EXISTS gradings (
    number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, key TEXT NOT NULL, task TEXT NOT NULL, state TEXT NOT NULL,
    created REAL NOT NULL, settings TEXT, source BLOB, outcome TEXT
)
"""
_INDEX = "CREATE INDEX IF NOT EXISTS by_state ON gradings (state, number)"


@dataclass(frozen=True)
class Entry:
    """One accepted request.

    Attributes:
        id: of the request.
        key: of its grading in the store.
        task: id of the task.
        state: ``waiting``, ``done`` or ``cancelled``; ``waiting`` also for one that ran when the service ended.
        created: seconds since 1970.
        settings: options, priority and deadline; empty for an ended one.
        source: ``None`` for an ended one.
        outcome: JSON of an outcome that the store does not return (an infrastructure fault).
    """

    id: str
    key: str
    task: str
    state: str
    created: float
    settings: Mapping[str, Any]
    source: bytes | None = None
    outcome: str | None = None


_Write = tuple[str, tuple[Any, ...]]


class Journal:
    """The file. Thread-safe; one process at a time may use it.

    Args:
        path: the file; it is created if there is none.

    Raises:
        UsageError: another process uses it, or it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._ended = path, 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._guard = path.with_name(path.name + ".lock").open("w")
            try:
                fcntl.flock(self._guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as e:
                self._guard.close()
                raise UsageError(f"another kbx serve uses {path}; stop it, or choose another --store") from e
            with contextlib.closing(self._connect()) as db:
                db.execute("PRAGMA journal_mode=WAL")
                db.execute(_TABLE)
                db.execute(_INDEX)
        except (sqlite3.DatabaseError, OSError) as e:
            raise UsageError(f"cannot keep the queue in {path}: {e}; choose another --store") from e
        self._todo: queue.SimpleQueue[tuple[list[_Write], Future[None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="journal", daemon=True)
        self._thread.start()

    def add(self, entries: Iterable[Entry]) -> Future[None]:
        """Record accepted requests.

        Args:
            entries: the requests; one with a known id replaces the ended one.

        Returns:
            Done when they are in the file: after that, a kill does not lose them.
        """
        sql = "INSERT OR REPLACE INTO gradings VALUES (NULL,?,?,?,?,?,?,?,?)"
        return self._put([
            (sql, (e.id, e.key, e.task, e.state, e.created, json.dumps(dict(e.settings)),
                   None if e.source is None else pack_source(e.source), e.outcome))
            for e in entries
        ])  # fmt: skip

    def end(self, id: str, state: str, outcome: str | None = None) -> Future[None]:
        """Record that a request has ended: from now on it is not taken up again.

        Args:
            id: of the request.
            state: ``done`` or ``cancelled``.
            outcome: JSON of an outcome that the store does not return.

        Returns:
            Done when it is in the file.
        """
        sql = "UPDATE gradings SET state = ?, settings = NULL, source = NULL, outcome = ? WHERE id = ?"
        writes: list[_Write] = [(sql, (state, outcome, id))]
        self._ended += 1
        if self._ended % _TRIM == 0:
            old = "SELECT number FROM gradings WHERE state != 'waiting' ORDER BY number DESC LIMIT 1 OFFSET ?"
            writes.append((f"DELETE FROM gradings WHERE state != 'waiting' AND number <= ({old})", (ENDED,)))
        return self._put(writes)

    def find(self, id: str) -> Entry | None:
        """Return a request by its id; ``None`` if it is not known."""
        with contextlib.closing(self._connect()) as db:
            row = db.execute("SELECT * FROM gradings WHERE id = ?", (id,)).fetchone()
        return _entry(row) if row else None

    def waiting(self) -> Iterator[Entry]:
        """Yield the requests without an outcome, in the order in which they were accepted."""
        with contextlib.closing(self._connect()) as db:
            for row in db.execute("SELECT * FROM gradings WHERE state = 'waiting' ORDER BY number"):
                yield _entry(row)

    def close(self) -> None:
        """Write what is left and close the file."""
        self._todo.put(None)
        self._thread.join()
        self._guard.close()

    def _connect(self) -> sqlite3.Connection:
        db = sqlite3.connect(self._path, timeout=60, isolation_level=None)
        # After a kill of this process the file is complete. A crash of the machine may lose the last seconds.
        db.execute("PRAGMA synchronous=NORMAL")
        leave(db)
        return db

    def _put(self, writes: list[_Write]) -> Future[None]:
        done: Future[None] = Future()
        self._todo.put((writes, done))
        return done

    def _write(self) -> None:
        db = self._connect()
        last = False
        while not last:
            group, size = list[tuple[list[_Write], Future[None]]](), 0
            item = self._todo.get()
            while item is not None:
                group.append(item)
                size += len(item[0])
                if size >= _GROUP:
                    break
                try:
                    item = self._todo.get_nowait()
                except queue.Empty:
                    break
            last = item is None
            self._commit(db, group)
        db.close()

    def _commit(self, db: sqlite3.Connection, group: list[tuple[list[_Write], Future[None]]]) -> None:
        try:
            db.execute("BEGIN IMMEDIATE")
            try:
                for writes, _ in group:
                    for sql, values in writes:
                        db.execute(sql, values)
                db.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    db.execute("ROLLBACK")
                raise
        except Exception as e:  # a full disk: whoever waits is told, and the thread goes on
            for _, done in group:
                done.set_exception(e)
            time.sleep(0.1)
            return
        for _, done in group:
            done.set_result(None)


def _entry(row: tuple[Any, ...]) -> Entry:
    _, id, key, task, state, created, settings, source, outcome = row
    return Entry(
        id, key, task, state, created, json.loads(settings) if settings else {},
        None if source is None else unpack_source(source), outcome,
    )  # fmt: skip
