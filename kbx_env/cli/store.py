"""The command ``kbx store show | export | prune``: prints, exports or deletes stored gradings."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kbx_env.errors import UnknownName, UsageError
from kbx_env.extras import install_hint
from kbx_env.outcome import Fault, Verdict
from kbx_env.store import Row, Store

_BATCH, _BATCH_BYTES = 5_000, 32 << 20
"""Rows, and bytes of their sources, of a Parquet row group: an export holds one in memory."""


def add_parser(sub: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command ``store`` to a parser."""
    store = sub.add_parser("store", help="show, export to Parquet or prune a file of gradings (gradings.sqlite)")
    what = store.add_subparsers(dest="action", required=True)
    s = what.add_parser("show", help="count gradings by policy and verdict, then list them")
    s.add_argument("path", help="the file, such as runs/report/gradings.sqlite")
    s.add_argument("--policy", help="only gradings of this policy")
    s.add_argument("--task", help="only gradings of tasks that match this glob, such as 'math/*'")
    s.add_argument("--verdict", help="only gradings with this verdict: " + ", ".join(Verdict))
    s.add_argument("--limit", type=int, default=20, help="list at most so many gradings (default 20; 0: counts only)")
    s.add_argument("--json", action="store_true", help="print one JSON object")
    e = what.add_parser("export", help="write a Parquet file, one row a grading (needs pyarrow)")
    e.add_argument("path", help="the file of gradings")
    e.add_argument("out", help="the Parquet file to write")
    e.add_argument("--sources", action="store_true", help="with the text of every source")
    e.add_argument("--overwrite", action="store_true", help="replace an earlier export")
    p = what.add_parser("prune", help="delete gradings that match every condition given, and shrink the file")
    p.add_argument("path", help="the file of gradings")
    p.add_argument("--older-than", type=float, metavar="DAYS", help="only gradings more than so many days old")
    p.add_argument("--policy", help="only gradings of this policy")
    p.add_argument("--infra", action="store_true", help="only infrastructure faults")
    p.add_argument("--dry-run", action="store_true", help="only print how many would be deleted")


def command(a: argparse.Namespace) -> int:
    """Run ``store``.

    Args:
        a: the parsed arguments.

    Returns:
        The exit status, 0.

    Raises:
        UsageError: no such file, no store, an unknown name, or a missing condition.
    """
    if not Path(a.path).is_file():
        raise UsageError(
            f"no file {a.path!r}; give the gradings.sqlite of a report, such as runs/report/gradings.sqlite"
        )
    with contextlib.closing(Store(a.path)) as store:
        {"show": _show, "export": _export, "prune": _prune}[a.action](store, a)
    return 0


def _known_policy(store: Store, name: str | None) -> None:
    known = {policy for policy, _, _ in store.counts()} if name is not None else set()
    if name is not None and name not in known:
        raise UnknownName("policy", name, known, "" if known else "the file holds no gradings")


def _show(store: Store, a: argparse.Namespace) -> None:
    _known_policy(store, a.policy)
    if a.verdict is not None and a.verdict not in list(Verdict):
        raise UnknownName("verdict", a.verdict, Verdict)
    if a.limit < 0:
        raise UsageError(f"--limit is {a.limit}; a whole number, 0 for the counts only")
    counts = store.counts(policy=a.policy, task=a.task, verdict=a.verdict)
    total = sum(n for _, _, n in counts)
    rows = store.records(policy=a.policy, task=a.task, verdict=a.verdict, limit=a.limit) if a.limit else iter(())
    if a.json:
        listed = [{**flat(row), "created": row.created} for row in rows]
        shown = [{"policy": policy, "verdict": verdict, "gradings": n} for policy, verdict, n in counts]
        print(json.dumps({"path": a.path, "gradings": total, "counts": shown, "rows": listed}))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    console.print(f"{a.path}: {total:,} gradings", markup=False, soft_wrap=True)
    table = Table("policy", "verdict", "gradings", box=None)
    for policy, verdict, n in counts:
        table.add_row(Text(policy), verdict, Text(f"{n:,}", justify="right"))
    if total:
        console.print(table)
    if not total or not a.limit:
        return
    table = Table("policy", "task", "sample", "graded (UTC)", "verdict", "cases", "speedup", "message", box=None)
    for row in rows:
        f = _clean(flat(row))
        cases = "-" if f["cases_total"] is None else f"{f['cases_passed']}/{f['cases_total']}"
        speedup = "-" if f["speedup"] is None else f"{f['speedup']:.3f}"
        cells = (row.policy, row.task, str(row.sample), f"{f['created']:%Y-%m-%d %H:%M}", f["verdict"], cases, speedup)
        table.add_row(*map(Text, cells), Text(f["message"][:100]))  # Text: a message of a kernel must not be read as markup
    console.print(table)
    if total > a.limit:
        console.print(f"{total - a.limit:,} more; see --limit, --policy, --task, --verdict", style="dim")


def flat(row: Row) -> dict[str, Any]:
    """Return a grading in flat columns.

    Args:
        row: the grading.

    Returns:
        Values by column. Unknown values are ``None``: ``correct`` after an infrastructure fault, cases that were not
        run, times that were not measured. ``low`` and ``high`` are the 95 % interval of the speedup over eager.
    """
    o = row.outcome
    context = {**row.settings, **o.manifest}
    return {
        "policy": row.policy, "task": row.task, "sample": row.sample, "created": datetime.fromtimestamp(row.created, UTC),
        "verdict": str(o.verdict), "stage": str(o.stage), "fault": str(o.fault) if o.fault else None,
        "correct": None if o.fault is Fault.INFRA else o.correct,
        "cases_passed": o.cases.passed if o.cases else None, "cases_total": o.cases.total if o.cases else None,
        "speedup": o.speedup, "low": o.timing.low if o.timing else None, "high": o.timing.high if o.timing else None,
        "backend": o.backend, "grading": o.grading,
        **{name: context.get(name) for name in ("torch_ops", "split", "device", "torch", "triton", "kbx_env")},
        "source_sha256": row.sha, "message": o.message, "sizes": context.get("sizes") or "published",
    }  # fmt: skip


def _schema(pa: Any, sources: bool) -> Any:
    types = {
        "sample": pa.int64(), "created": pa.timestamp("ms", "UTC"), "correct": pa.bool_(), "cases_passed": pa.int64(),
        "cases_total": pa.int64(), "speedup": pa.float64(), "low": pa.float64(), "high": pa.float64(),
    }  # fmt: skip
    names = (
        "policy task sample created verdict stage fault correct cases_passed cases_total speedup low high backend grading "
        "torch_ops split device torch triton kbx_env source_sha256 message sizes"
    ).split()
    return pa.schema([(name, types.get(name, pa.string())) for name in names + ["source"] * sources])


def export(store: Store, out: Path, *, sources: bool = False) -> int:
    """Write a Parquet file, some thousand rows at a time.

    Args:
        store: the gradings.
        out: the file; it appears under this name when it is complete.
        sources: add the text of the source; bytes that are not UTF-8 are written as \\xNN.

    Returns:
        The number of rows.

    Raises:
        UsageError: pyarrow is not installed, or the file cannot be written.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as e:
        raise UsageError(f"export needs pyarrow, which is not installed; {install_hint('parquet')}") from e
    schema, count = _schema(pa, sources), 0
    part = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        with pq.ParquetWriter(part, schema, compression="zstd") as writer:
            for batch in _batches(store, sources):
                writer.write_table(pa.Table.from_pylist(batch, schema))
                count += len(batch)
        part.replace(out)
    except OSError as e:
        raise UsageError(f"cannot write {str(out)!r}: {e.strerror or e}; choose another file") from e
    finally:
        part.unlink(missing_ok=True)
    return count


def _batches(store: Store, sources: bool) -> Iterator[list[dict[str, Any]]]:
    batch: list[dict[str, Any]] = []
    size = 0
    for row in store.records(sources=sources):
        batch.append(_clean(flat(row) | ({"source": row.source} if sources else {})))
        size += len(row.source or b"")
        if len(batch) >= _BATCH or size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _clean(columns: dict[str, Any]) -> dict[str, Any]:
    # A source may be any bytes, and a message may quote its lone surrogates.
    texts = {k: v.encode("utf-8", "surrogatepass") if isinstance(v, str) else v for k, v in columns.items()}
    return {k: v.decode("utf-8", "backslashreplace") if isinstance(v, bytes) else v for k, v in texts.items()}


def _export(store: Store, a: argparse.Namespace) -> None:
    if Path(a.out).exists() and not a.overwrite:
        raise UsageError(f"{a.out!r} exists; use --overwrite to replace it, or choose another file")
    if Path(a.out).resolve() == Path(a.path).resolve():
        raise UsageError(f"{a.out!r} is the file of gradings itself; choose another file")
    print(f"{export(store, Path(a.out), sources=a.sources):,} gradings written to {a.out}")


def _prune(store: Store, a: argparse.Namespace) -> None:
    if a.older_than is not None and not (math.isfinite(a.older_than) and a.older_than >= 0):
        raise UsageError(f"--older-than is {a.older_than}; days, a number of at least 0")
    _known_policy(store, a.policy)
    before = None if a.older_than is None else time.time() - 86400 * a.older_than
    count = store.prune(before=before, policy=a.policy, infra=a.infra, dry_run=a.dry_run)
    print(f"{count:,} gradings would go" if a.dry_run else f"{count:,} gradings deleted")
