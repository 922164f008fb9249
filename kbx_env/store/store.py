"""Every grading kept: SQLite, content-addressed, safe with several writers, resumable after a kill."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sqlite3
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kbx_env.errors import UsageError
from kbx_env.outcome import Fault, Outcome
from kbx_env.store import schema as schema
from kbx_env.store.schema import canonical, settings_of


def request_key(request: Mapping[str, Any], source: bytes | None) -> str:
    """SHA-256 over everything that decides a verdict: task and its fingerprint, source, grading, device, versions."""
    text = canonical(request).encode()
    return hashlib.sha256(text + b"\0" + (source if source is not None else b"\0none")).hexdigest()


@dataclass(frozen=True)
class Row:
    """One stored grading.

    ``created`` is in seconds since 1970; ``settings`` what was asked for besides policy and sample; ``sha`` the SHA-256
    of the source in hexadecimal, ``None`` where the policy had no answer; ``source`` ``None`` unless asked for.
    """

    policy: str
    task: str
    sample: int
    created: float
    settings: Mapping[str, Any]
    sha: str | None
    source: bytes | None
    outcome: Outcome


class Store:
    """Gradings by content. One object may be used by several threads, one file by several processes.

    A file written by an earlier version is brought up to date when it is opened.

    Raises:
        UsageError: the file cannot be opened, is no database, or one of another program or of a newer version.
    """

    def __init__(self, path: str | Path) -> None:
        if str(path) in ("", ":memory:"):
            raise UsageError(f"cannot keep gradings in {str(path)!r}; give the path of a file")
        self._lock = threading.Lock()
        self._path, self._log_limit = Path(path).absolute(), schema.LOG
        try:
            self._db = schema.connect(self._path)
            try:
                schema.prepare(self._db, Path(path))
            except BaseException:
                self._db.close()
                raise
        except sqlite3.DatabaseError as e:
            raise UsageError(f"cannot keep gradings in {path}: {e}; delete that file or choose another folder") from e

    def get(self, key: str) -> Outcome | None:
        """The outcome stored under a key; an infrastructure fault is no answer and is graded again."""
        return self._one("key = ?", (schema.packed_key(key),))

    def find(self, request: Mapping[str, Any]) -> Outcome | None:
        """The verdict of a request whatever the source was: for policies that never answer alike twice."""
        policy, sample = request["policy"], request["sample"]
        where = "policy = ? AND task = ? AND sample = ? AND settings = (SELECT id FROM settings WHERE text = ?)"
        return self._one(where, (policy, request["task"], sample, settings_of(request, policy, sample)))

    def find_all(self, request: Mapping[str, Any]) -> Iterator[tuple[int, Outcome]]:
        """``find`` for every sample of a policy and task at once: (sample, verdict), in order of samples.

        Outcomes of the same machine and versions share one ``manifest``.
        """
        policy, task = request["policy"], request["task"]
        query = (
            "SELECT sample, outcome FROM gradings INDEXED BY by_policy WHERE policy = ? AND task = ? AND NOT infra "
            "AND settings = (SELECT id FROM settings WHERE text = ?) ORDER BY sample, created"
        )
        manifests: dict[str, Any] = {}
        last = None
        with contextlib.closing(schema.connect(self._path)) as db:  # see records
            for sample, packed in db.execute(query, (policy, task, settings_of(request, policy, request["sample"]))):
                if sample != last:  # the first verdict stands
                    last = sample
                    data = schema.unpack_outcome(packed)
                    made = data.get("manifest", {})
                    yield sample, Outcome.from_dict({**data, "manifest": manifests.setdefault(repr(made), made)})

    def same(self, request: Mapping[str, Any], source: bytes) -> Outcome | None:
        """The verdict of the same source under the same settings, whichever policy and sample it was graded for."""
        text = settings_of(request, request.get("policy"), request.get("sample"))
        where = (
            "source = (SELECT id FROM sources WHERE sha = ?) AND settings = (SELECT id FROM settings WHERE text = ?)"
        )
        return self._one(where, (hashlib.sha256(source).digest(), text))

    def _one(self, where: str, values: tuple[Any, ...]) -> Outcome | None:
        with self._lock:
            row = self._db.execute(
                f"SELECT outcome FROM gradings WHERE {where} AND NOT infra ORDER BY created LIMIT 1", values
            ).fetchone()
        return Outcome.from_dict(schema.unpack_outcome(row[0])) if row else None

    def put(
        self, key: str, policy: str, sample: int, request: Mapping[str, Any], source: bytes | None, outcome: Outcome
    ) -> None:
        """Keep an outcome. The first verdict under a key stands; it replaces an infrastructure fault, never vice versa."""
        self.put_all([(key, policy, sample, request, source, outcome)])

    def put_all(self, rows: Iterable[tuple[str, str, int, Mapping[str, Any], bytes | None, Outcome]]) -> None:
        """``put`` of each of some rows, all or none of them."""
        packed = [
            (
                (schema.packed_key(key), policy, outcome.task, sample, time.time(), int(outcome.fault is Fault.INFRA)),
                str(outcome.verdict), settings_of(request, policy, sample), source, schema.pack_outcome(outcome.to_json()),
            )
            for key, policy, sample, request, source, outcome in rows
        ]  # fmt: skip
        parts = ("created", "infra", "verdict", "settings", "source", "outcome")
        fresh = ", ".join(f"{p}=excluded.{p}" for p in parts)
        with self._lock, _writing(self._db):
            for start, verdict, text, source, data in packed:
                asked, handed_in = schema.keep_settings(self._db, text), schema.keep_source(self._db, source)
                self._db.execute(
                    "INSERT INTO gradings VALUES (NULL,?,?,?,?,?,?,?,?,?,?) "
                    f"ON CONFLICT (key) DO UPDATE SET {fresh} WHERE gradings.infra",
                    (*start, verdict, asked, handed_in, data),
                )
        with self._lock:
            self._log_limit = schema.shorten_log(self._db, self._path, self._log_limit)

    def rows(self, policy: str | None = None) -> Iterator[tuple[str, str, int, Outcome]]:
        """(policy, task, sample, outcome), sorted."""
        for row in self.records(policy=policy or None):
            yield row.policy, row.task, row.sample, row.outcome

    def records(
        self, *, policy: str | None = None, task: str | None = None, verdict: str | None = None,
        limit: int | None = None, sources: bool = False,
    ) -> Iterator[Row]:  # fmt: skip
        """Gradings in full, sorted by policy, task and sample, read as they are needed from one state of the file.

        Args:
            policy: of this policy only.
            task: of tasks that match this glob only, case-sensitive.
            verdict: of this verdict only.
            limit: at most so many.
            sources: read the sources too.
        """
        where, values = _where(policy, task, verdict)
        text = "s.data" if sources else "NULL"
        # By the index: the planner may else sort all packed outcomes first, which takes their size in temporary files.
        query = (
            f"SELECT policy, task, sample, created, settings, s.sha, {text}, outcome FROM gradings INDEXED BY by_policy "
            f"LEFT JOIN sources s ON s.id = source {where} ORDER BY policy, task, sample LIMIT ?"
        )
        settings: dict[int, Mapping[str, Any]] = {}
        # A connection of its own: a long export keeps no other thread waiting and sees one state of the file.
        with contextlib.closing(schema.connect(self._path)) as db:
            for name, on, sample, created, asked, sha, data, outcome in db.execute(
                query, (*values, -1 if limit is None else limit)
            ):
                if asked not in settings:
                    (found,) = db.execute("SELECT text FROM settings WHERE id = ?", (asked,)).fetchone()
                    settings[asked] = json.loads(found)
                yield Row(
                    name, on, sample, created, settings[asked], sha.hex() if sha is not None else None,
                    schema.unpack_source(data) if data is not None else None,
                    Outcome.from_dict(schema.unpack_outcome(outcome)),
                )  # fmt: skip

    def sources(self, policy: str) -> Generator[tuple[str, str, bytes], None, None]:
        """(task, SHA-256 in hexadecimal, packed source) of a policy's gradings, by task and sample, as ``records`` reads them.

        ``store_schema.unpack_source`` unpacks: who wants a few of many spares the others.
        """
        query = (
            "SELECT task, s.sha, s.data FROM gradings INDEXED BY by_policy JOIN sources s ON s.id = source "
            "WHERE policy = ? ORDER BY policy, task, sample"
        )
        with contextlib.closing(schema.connect(self._path)) as db:
            for task, sha, data in db.execute(query, (policy,)):
                yield task, sha.hex(), data

    def counts(
        self, *, policy: str | None = None, task: str | None = None, verdict: str | None = None
    ) -> list[tuple[str, str, int]]:
        """(policy, verdict, gradings), sorted; the arguments are those of ``records``."""
        where, values = _where(policy, task, verdict)
        query = f"SELECT policy, verdict, count(*) FROM gradings INDEXED BY by_policy {where} GROUP BY policy, verdict"
        with self._lock:
            return self._db.execute(query + " ORDER BY policy, verdict", values).fetchall()

    def prune(
        self, *, before: float | None = None, policy: str | None = None, infra: bool = False, dry_run: bool = False
    ) -> int:
        """Delete gradings, and the sources that no other grading needs, and give the room back; returns how many.

        Args:
            before: only what was graded before this time, in seconds since 1970.
            policy: only of this policy.
            infra: only infrastructure faults.
            dry_run: count only.

        Raises:
            UsageError: no argument chooses anything; or another process kept the file from shrinking.
        """
        if before is None and policy is None and not infra:
            raise UsageError(
                "prune needs a choice: an age (--older-than DAYS), a policy or infra; to lose all, delete the file"
            )
        chosen: list[tuple[str, float | str | None]] = [("created < ?", before), ("policy = ?", policy)]
        where = " AND ".join([p for p, v in chosen if v is not None] + ["infra"] * infra)
        values = [v for _, v in chosen if v is not None]
        with self._lock:
            if dry_run:
                return int(self._db.execute(f"SELECT count(*) FROM gradings WHERE {where}", values).fetchone()[0])
            with _writing(self._db):
                gone = self._db.execute(f"DELETE FROM gradings WHERE {where}", values).rowcount
                used = "SELECT source FROM gradings WHERE source IS NOT NULL"
                self._db.execute(f"DELETE FROM sources WHERE id NOT IN ({used})")
                self._db.execute("DELETE FROM settings WHERE id NOT IN (SELECT settings FROM gradings)")
            try:
                self._db.execute("VACUUM")
                self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            except sqlite3.OperationalError as e:
                raise UsageError(
                    f"{gone} gradings are gone, but the file did not shrink: {e}; run it again when nothing else uses it"
                ) from e
        return gone

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._db.close()


def _where(policy: str | None, task: str | None, verdict: str | None) -> tuple[str, list[str]]:
    given = [
        (p, v) for p, v in (("policy = ?", policy), ("task GLOB ?", task), ("verdict = ?", verdict)) if v is not None
    ]
    return ("WHERE " if given else "") + " AND ".join(p for p, _ in given), [v for _, v in given]


@contextlib.contextmanager
def _writing(db: sqlite3.Connection) -> Iterator[None]:
    # IMMEDIATE: a transaction that reads first and then writes would fail at once where another one has written meanwhile.
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        db.execute("ROLLBACK")
        raise
    db.execute("COMMIT")
