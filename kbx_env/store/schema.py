"""The store's file format: its tables, the compression of texts, and the upgrade of older files."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from kbx_env.errors import UsageError

VERSION = 1
"""Version of the tables, in ``PRAGMA user_version``. Version 0 has one table and compresses nothing."""
APPLICATION = 0x6B627831
"""``PRAGMA application_id``: distinguishes a store from other SQLite files."""
LOG = 64 << 20
"""Size in bytes of the write-ahead log at which a writer empties it."""

_TABLES = """
CREATE TABLE sources (id INTEGER PRIMARY KEY, sha BLOB NOT NULL UNIQUE, data BLOB NOT NULL);
CREATE TABLE settings (id INTEGER PRIMARY KEY, text TEXT NOT NULL UNIQUE);
CREATE TABLE gradings (
    id INTEGER PRIMARY KEY, key BLOB NOT NULL UNIQUE, policy TEXT NOT NULL, task TEXT NOT NULL, sample INTEGER NOT NULL,
    created REAL NOT NULL, infra INTEGER NOT NULL, verdict TEXT NOT NULL, settings INTEGER NOT NULL REFERENCES settings,
    source INTEGER REFERENCES sources, outcome BLOB NOT NULL
);
CREATE INDEX by_policy ON gradings (policy, task, sample, verdict);
CREATE INDEX by_source ON gradings (source, settings);
"""
_NAMES = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
_FIRST = ["key", "policy", "task", "sample", "created", "infra", "request", "source", "outcome"]

# A dictionary for zlib with texts that many outcomes contain: it halves a packed outcome. Existing files were packed with
# it, so that not one letter of it may change.
_COMMON = (
    b'{"kind": "out_of_bounds", "kernel": "write_conflict", "line": 1, "file": "uninitialised_read", "program": [0, 0, 0], '
    b'"tensor": "x", "index": null, "by": null, "detail": "", "access": "load"}, {"device": "NVIDIA H200", "before": null, '
    b'"after": null, "notes": [], "eager_us": 1.0, "candidate_us": 1.0, "speedup": 1.0, "low": 1.0, "high": 1.0, "pairs": 30, '
    b'"floor_ratio": 1.0, "floor_us": null, "method": "events", "disturbed": false, "void": false}, {"case": "", "reason": '
    b'"wrong values: element differs by more than the tolerance"}, "violations": [{"rule": "forbidden_name", "detail": "line '
    b'is not allowed in a submission"}], "cases": null, "compile": [], "evidence": null, "verdict": "incorrect", "stage": '
    b'"correct", "verdict": "rejected", "stage": "screen", "verdict": "compile_error", "stage": "compile", "verdict": '
    b'"runtime_error", "verdict": "timeout", "malformed", "infra_fault", "fault": "infra", "fault": "policy", "message": "the '
    b"submission raised TypeError: unexpected AttributeError: module 'triton.language' has no attribute\""
    b'{"task": "fusion/fused_linearalgebra", "verdict": "correct", "stage": "evidence", "backend": "cpu", "grading": '
    b'"contract", "fault": null, "message": "", "cases": {"passed": 19, "total": 19, "failures": [], "telling_passed": 18, '
    b'"telling": 18}, "violations": [], "compile": [{"kernel": "_kernel", "target": "sm_90", "ok": true, "error": null, '
    b'"registers": 32, "spills": 0, "shared": 0, "shared_limit": 232448, "seconds": 0.2915}], "timing": null, "evidence": '
    b'{"launches": 18, "ablation": null, "denied_ops": [], "moved_bytes": 1000000, "ideal_bytes": 1000000, "dots": [], '
    b'"findings": [], "sector_bytes": 1000000, "reread_bytes": 0, "flops": {"fp32": 1000000, "int": 1000000}, "stored_share": '
    b'1.0, "depends_on": ["input"], "kernels": [{"kernel": "_kernel", "launches": 18, "programs": 300, "moved_bytes": 1000000, '
    b'"sector_bytes": 1000000, "reread_bytes": 0, "tensors": {"x": [1000000, 0, 0], "y": [0, 1000000, 0]}, "flops": {"int": '
    b'1000000, "fp32": 1000000}}]}, "estimate": null, "seconds": {"screen": 0.028, "compile": 0.307, "correct": 1.3325, '
    b'"evidence": 0.0, "total": 1.7648}, "manifest": {"kbx_env": "0.1.0", "python": "3.12.3", "torch": "2.13.0+cpu", "triton": '
    b'"3.7.1", "device": "cpu", "machine": "x86_64", "cores": 2, "task_fingerprint": "0123456789abcdef", "split": "eval", '
    b'"seed_policy": "secret, fresh for every grading", "attempt": 1, "torch_ops": "strict"}, "source_sha256": '
    b'"0123456789abcdef", "correct": true, "speedup": null}'
)

T = TypeVar("T")


def pack_outcome(text: str) -> bytes:
    """Compress an outcome's JSON for the file."""
    packer = zlib.compressobj(3, zdict=_COMMON)
    return packer.compress(text.encode()) + packer.flush()


def unpack_outcome(data: bytes) -> dict[str, Any]:
    """Decompress and parse an outcome: the inverse of ``pack_outcome``.

    Args:
        data: a value of the column ``outcome``.

    Returns:
        The argument of ``Outcome.from_dict``.

    Raises:
        UsageError: the file is damaged here.
    """
    unpacker = zlib.decompressobj(zdict=_COMMON)
    try:
        found: dict[str, Any] = json.loads(unpacker.decompress(data) + unpacker.flush())
    except (zlib.error, ValueError) as e:
        raise UsageError(f"a stored outcome cannot be read ({e}): the file is damaged; restore it from a copy") from e
    return found


def pack_source(source: bytes) -> bytes:
    """Compress a source for the file."""
    return zlib.compress(source, 3)


def unpack_source(data: bytes) -> bytes:
    """Decompress a source: the inverse of ``pack_source``.

    Args:
        data: a value of the column ``data``.

    Returns:
        The source.

    Raises:
        UsageError: the file is damaged here.
    """
    try:
        return zlib.decompress(data)
    except zlib.error as e:
        raise UsageError(f"a stored source cannot be read ({e}): the file is damaged; restore it from a copy") from e


def packed_key(key: str) -> bytes:
    """Return a key in the form of the file: SHA-256 in hexadecimal as bytes, half as long; any other text unchanged."""
    try:
        data = bytes.fromhex(key) if len(key) == 64 else b""
    except ValueError:
        data = b""
    return data if data.hex() == key else key.encode()


def canonical(request: Mapping[str, Any]) -> str:
    """Return the one JSON text for a request: sorted keys, tuples as lists."""
    return json.dumps(dict(request), sort_keys=True, default=str)


def settings_of(request: Mapping[str, Any], policy: object, sample: object) -> str:
    """Return the part of a request that does not depend on the policy: the same for thousands of rows.

    Args:
        request: the whole request.
        policy: left out of it.
        sample: left out of it.

    Returns:
        JSON text.
    """
    left_out = {"policy": policy, "sample": sample}
    return canonical({k: v for k, v in request.items() if k not in left_out or v != left_out[k]})


def id_of(db: sqlite3.Connection, table: str, column: str, value: str | bytes) -> int | None:
    """Find a source (by ``sha``) or settings (by ``text``).

    Args:
        db: the file.
        table: ``sources`` or ``settings``.
        column: ``sha`` or ``text``.
        value: of this column.

    Returns:
        The row's id, or ``None`` if there is none.
    """
    row = db.execute(f"SELECT id FROM {table} WHERE {column} = ?", (value,)).fetchone()
    return row[0] if row else None


def keep_settings(db: sqlite3.Connection, text: str) -> int:
    """Return the id of settings, and insert them if they are new; to be called in a writing transaction.

    Args:
        db: the file.
        text: from ``settings_of``.

    Returns:
        The row's id.
    """
    found = id_of(db, "settings", "text", text)
    return found or int(db.execute("INSERT INTO settings (text) VALUES (?) RETURNING id", (text,)).fetchone()[0])


def keep_source(db: sqlite3.Connection, source: bytes | None) -> int | None:
    """Return the id of a source, and insert it if it is new; to be called in a writing transaction.

    Args:
        db: the file.
        source: ``None`` where the policy had no answer.

    Returns:
        The row's id; ``None`` for ``None``.
    """
    if source is None:
        return None
    sha = hashlib.sha256(source).digest()
    found = id_of(db, "sources", "sha", sha)
    if found is not None:
        return found
    row = db.execute(
        "INSERT INTO sources (sha, data) VALUES (?, ?) RETURNING id", (sha, pack_source(source))
    ).fetchone()
    return int(row[0])


def connect(path: Path) -> sqlite3.Connection:
    """Open a file; statements wait up to 60 s for other writers. The caller begins transactions explicitly."""
    return sqlite3.connect(str(path), timeout=60, check_same_thread=False, isolation_level=None)


def prepare(db: sqlite3.Connection, path: Path) -> None:
    """Create the tables of a new file, upgrade an older file, refuse a file that is no store.

    Several processes may call it at once.

    Args:
        db: the file, opened.
        path: for error messages.

    Raises:
        UsageError: a database of another program, or of a newer kbx_env.
        sqlite3.DatabaseError: no database at all, or it cannot be written.
    """
    _retry_while_locked(lambda: _version(db, path))
    _retry_while_locked(lambda: db.execute("PRAGMA journal_mode=WAL"))
    db.execute("PRAGMA synchronous=NORMAL")
    if _retry_while_locked(lambda: _version(db, path)) == VERSION:
        return
    db.execute("BEGIN IMMEDIATE")  # one of several processes is first; the others then find a current version
    try:
        if _version(db, path) < VERSION:
            first = bool(_columns(db))
            if first:
                db.execute("ALTER TABLE gradings RENAME TO first_gradings")
                db.execute("DROP INDEX IF EXISTS by_policy")
            for statement in filter(str.strip, _TABLES.split(";")):
                db.execute(statement)
            if first:
                _upgrade(db)
            db.execute(f"PRAGMA application_id = {APPLICATION}")
            db.execute(f"PRAGMA user_version = {VERSION}")
        db.execute("COMMIT")
    except BaseException:
        db.execute("ROLLBACK")
        raise


def shorten_log(db: sqlite3.Connection, path: Path, limit: int) -> int:
    """Empty the write-ahead log if it is too long.

    With many busy writers it would grow for ever: SQLite starts it again only when all of it has been copied to the file, and
    in the meantime another process has written.

    Args:
        db: the file, opened.
        path: the file.
        limit: in bytes.

    Returns:
        The limit for the next call: twice the size if the log was in use, else ``LOG``.
    """
    try:
        size = path.with_name(path.name + "-wal").stat().st_size
    except OSError:
        return LOG
    if size <= limit:
        return limit
    db.execute("PRAGMA busy_timeout = 1000")  # a long export may be reading it: do not wait for that
    try:
        busy = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
    except sqlite3.OperationalError:
        busy = 1
    finally:
        db.execute("PRAGMA busy_timeout = 60000")
    return 2 * size if busy else LOG


def _version(db: sqlite3.Connection, path: Path) -> int:
    """Return the version of a file, read in one transaction: another process may be creating its tables."""
    if db.in_transaction:
        return _version_now(db, path)
    db.execute("BEGIN")
    try:
        return _version_now(db, path)
    finally:
        db.execute("ROLLBACK")


def _version_now(db: sqlite3.Connection, path: Path) -> int:
    version = int(db.execute("PRAGMA user_version").fetchone()[0])
    known = db.execute("PRAGMA application_id").fetchone()[0] == APPLICATION
    if known and version > VERSION:
        raise UsageError(f"{path} was written by a newer kbx_env (format {version}, this one reads up to {VERSION}); "
                         "update kbx_env or choose another file")  # fmt: skip
    tables = {name for (name,) in db.execute(_NAMES)}
    if not known and (version or tables - {"gradings"} or (tables and _columns(db) != _FIRST)):
        raise UsageError(f"{path} is a database of another program, no store of gradings; choose another file")
    return version


def _columns(db: sqlite3.Connection) -> list[str]:
    return [row[1] for row in db.execute("PRAGMA table_info(gradings)")]


def _upgrade(db: sqlite3.Connection) -> None:
    fields = ", ".join(_FIRST)
    old = db.execute(f"SELECT {fields} FROM first_gradings")
    for key, policy, task, sample, created, infra, request, source, outcome in old:
        settings = keep_settings(db, settings_of(json.loads(request), policy, sample))
        db.execute(
            "INSERT INTO gradings VALUES (NULL,?,?,?,?,?,?,?,?,?,?)",
            (packed_key(key), policy, task, sample, created, infra, json.loads(outcome)["verdict"], settings,
             keep_source(db, source), pack_outcome(outcome)),
        )  # fmt: skip
    db.execute("DROP TABLE first_gradings")


def _retry_while_locked(act: Callable[[], T]) -> T:
    # Switching a new file to WAL needs exclusive access for a moment, for which SQLite ignores the busy timeout.
    for _ in range(200):
        try:
            return act()
        except sqlite3.OperationalError as e:
            if "locked" not in str(e):
                raise
            time.sleep(0.05)
    return act()
