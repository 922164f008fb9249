"""Keeps every grading in SQLite: content-addressed, safe with several writers, resumable after a kill."""

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
from kbx_env.store.checkpoints import leave
from kbx_env.store.schema import canonical, settings_of


def request_key(request: Mapping[str, Any], source: bytes | None) -> str:
    """Return the key of a grading.

    Args:
        request: everything besides the source that decides a verdict: task, fingerprint, grading, device, versions.
        source: ``None`` where the policy had no answer.

    Returns:
        SHA-256 in hexadecimal.
    """
    text = canonical(request).encode()
    return hashlib.sha256(text + b"\0" + (source if source is not None else b"\0none")).hexdigest()


@dataclass(frozen=True)
class Row:
    """One stored grading.

    Attributes:
        policy: name of the policy.
        task: id of the task.
        sample: number of the policy's answer, from 0.
        created: seconds since 1970.
        settings: the request without policy and sample.
        sha: SHA-256 of the source in hexadecimal; ``None`` where the policy had no answer.
        source: ``None`` unless it was requested.
        outcome: the result.
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
    """Gradings by content. Several threads may use one object, several processes one file.

    A file of an earlier version is upgraded when it is opened.

    Args:
        path: the file; it is created if there is none.
        checkpoints: whether writing makes the checkpoints of the file; else ``store.checkpoints.Checkpoints`` must.

    Raises:
        UsageError: the file cannot be opened, is no database, or one of another program or of a newer version.
    """

    def __init__(self, path: str | Path, checkpoints: bool = True) -> None:
        if str(path) in ("", ":memory:"):
            raise UsageError(f"cannot keep gradings in {str(path)!r}; give the path of a file")
        self._lock = threading.Lock()
        self._path, self._log_limit = Path(path).absolute(), schema.LOG
        try:
            self._db = schema.connect(self._path)
            try:
                schema.prepare(self._db, Path(path))
                if not checkpoints:
                    leave(self._db)
            except BaseException:
                self._db.close()
                raise
        except sqlite3.DatabaseError as e:
            raise UsageError(f"cannot keep gradings in {path}: {e}; delete that file or choose another folder") from e

    def get(self, key: str) -> Outcome | None:
        """Return the outcome stored under a key; ``None`` if there is none or it is an infrastructure fault."""
        return self._one("key = ?", (schema.packed_key(key),))

    def find(self, request: Mapping[str, Any]) -> Outcome | None:
        """Return the outcome of a request with any source, for policies whose answers are never the same twice."""
        policy, sample = request["policy"], request["sample"]
        where = "policy = ? AND task = ? AND sample = ? AND settings = (SELECT id FROM settings WHERE text = ?)"
        return self._one(where, (policy, request["task"], sample, settings_of(request, policy, sample)))

    def find_all(self, request: Mapping[str, Any]) -> Iterator[tuple[int, Outcome]]:
        """Do ``find`` for every sample of a policy and task at once.

        Args:
            request: that of any one sample.

        Yields:
            Sample and outcome, in order of samples. Outcomes with equal manifests share one ``manifest`` object.
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
                if sample != last:  # of several outcomes of a sample the first is valid
                    last = sample
                    data = schema.unpack_outcome(packed)
                    made = data.get("manifest", {})
                    yield sample, Outcome.from_dict({**data, "manifest": manifests.setdefault(repr(made), made)})

    def same(self, request: Mapping[str, Any], source: bytes) -> Outcome | None:
        """Find an outcome of the same source under the same settings, for any policy and sample.

        Args:
            request: the settings; its policy and sample are ignored.
            source: the source.

        Returns:
            The first outcome; ``None`` if there is none but infrastructure faults.
        """
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
        """Store an outcome. It replaces an infrastructure fault under the same key, and no other outcome.

        Args:
            key: from ``request_key``.
            policy: name of the policy.
            sample: number of the policy's answer, from 0.
            request: from which the key was made.
            source: ``None`` where the policy had no answer.
            outcome: the result.
        """
        self.put_all([(key, policy, sample, request, source, outcome)])

    def put_all(self, rows: Iterable[tuple[str, str, int, Mapping[str, Any], bytes | None, Outcome]]) -> None:
        """Do ``put`` for several rows in one transaction; the fields of a row are the arguments of ``put``."""
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
                settings_id, source_id = schema.keep_settings(self._db, text), schema.keep_source(self._db, source)
                self._db.execute(
                    "INSERT INTO gradings VALUES (NULL,?,?,?,?,?,?,?,?,?,?) "
                    f"ON CONFLICT (key) DO UPDATE SET {fresh} WHERE gradings.infra",
                    (*start, verdict, settings_id, source_id, data),
                )
        with self._lock:
            self._log_limit = schema.shorten_log(self._db, self._path, self._log_limit)

    def rows(self, policy: str | None = None) -> Iterator[tuple[str, str, int, Outcome]]:
        """Yield policy, task, sample and outcome of all gradings, or of one policy's, sorted."""
        for row in self.records(policy=policy or None):
            yield row.policy, row.task, row.sample, row.outcome

    def records(
        self, *, policy: str | None = None, task: str | None = None, verdict: str | None = None,
        limit: int | None = None, sources: bool = False,
    ) -> Iterator[Row]:  # fmt: skip
        """Read gradings in full, one by one, all from one state of the file.

        Args:
            policy: only this policy; ``None`` for all.
            task: only tasks that match this glob, case-sensitive.
            verdict: only this verdict.
            limit: at most so many.
            sources: also read the sources.

        Yields:
            The gradings, sorted by policy, task and sample.
        """
        where, values = _where(policy, task, verdict)
        text = "s.data" if sources else "NULL"
        # INDEXED BY: otherwise the planner may sort all packed outcomes first, in temporary files of their size.
        query = (
            f"SELECT policy, task, sample, created, settings, s.sha, {text}, outcome FROM gradings INDEXED BY by_policy "
            f"LEFT JOIN sources s ON s.id = source {where} ORDER BY policy, task, sample LIMIT ?"
        )
        settings: dict[int, Mapping[str, Any]] = {}
        # A connection of its own: a long export does not block other threads and sees one state of the file.
        with contextlib.closing(schema.connect(self._path)) as db:
            for name, task_id, sample, created, settings_id, sha, data, outcome in db.execute(
                query, (*values, -1 if limit is None else limit)
            ):
                if settings_id not in settings:
                    (found,) = db.execute("SELECT text FROM settings WHERE id = ?", (settings_id,)).fetchone()
                    settings[settings_id] = json.loads(found)
                yield Row(
                    name, task_id, sample, created, settings[settings_id], sha.hex() if sha is not None else None,
                    schema.unpack_source(data) if data is not None else None,
                    Outcome.from_dict(schema.unpack_outcome(outcome)),
                )  # fmt: skip

    def sources(self, policy: str) -> Generator[tuple[str, str, bytes], None, None]:
        """Read the packed sources of a policy's gradings, as ``records`` does, without unpacking them.

        Args:
            policy: name of the policy.

        Yields:
            Task, SHA-256 in hexadecimal and packed source (for ``store.schema.unpack_source``), by task and sample.
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
        """Count gradings by policy and verdict.

        Args:
            policy: only this policy; ``None`` for all.
            task: only tasks that match this glob, case-sensitive.
            verdict: only this verdict.

        Returns:
            Policy, verdict and number of gradings, sorted.
        """
        where, values = _where(policy, task, verdict)
        query = f"SELECT policy, verdict, count(*) FROM gradings INDEXED BY by_policy {where} GROUP BY policy, verdict"
        with self._lock:
            return self._db.execute(query + " ORDER BY policy, verdict", values).fetchall()

    def prune(
        self, *, before: float | None = None, policy: str | None = None, infra: bool = False, dry_run: bool = False
    ) -> int:
        """Delete gradings, with the sources that no other grading needs, and shrink the file.

        Args:
            before: only gradings before this time, in seconds since 1970.
            policy: only this policy.
            infra: only infrastructure faults.
            dry_run: only count them.

        Returns:
            The number of gradings that match all conditions.

        Raises:
            UsageError: no condition was given; or another process prevented the file from shrinking.
        """
        if before is None and policy is None and not infra:
            raise UsageError(
                "prune needs a condition: an age (--older-than DAYS), a policy or infra; to delete everything, delete the file"
            )
        chosen: list[tuple[str, float | str | None]] = [("created < ?", before), ("policy = ?", policy)]
        where = " AND ".join([p for p, v in chosen if v is not None] + ["infra"] * infra)
        values = [v for _, v in chosen if v is not None]
        with self._lock:
            if dry_run:
                return int(self._db.execute(f"SELECT count(*) FROM gradings WHERE {where}", values).fetchone()[0])
            with _writing(self._db):
                deleted = self._db.execute(f"DELETE FROM gradings WHERE {where}", values).rowcount
                used = "SELECT source FROM gradings WHERE source IS NOT NULL"
                self._db.execute(f"DELETE FROM sources WHERE id NOT IN ({used})")
                self._db.execute("DELETE FROM settings WHERE id NOT IN (SELECT settings FROM gradings)")
            try:
                self._db.execute("VACUUM")
                self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            except sqlite3.OperationalError as e:
                raise UsageError(
                    f"{deleted} gradings deleted, but the file did not shrink: {e}; run it again when nothing else uses it"
                ) from e
        return deleted

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
    # IMMEDIATE: a transaction that reads and then writes would fail at once if another one has written in between.
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        db.execute("ROLLBACK")
        raise
    db.execute("COMMIT")
