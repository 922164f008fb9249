"""Measure the store of gradings with many rows: inserts, look-ups, the report's query, export, the file's size.

python benchmarks/store_scale.py OUT.json [--rows 1000000] [--measured 20000] [--writers 4] [--folder DIR]

Rows are variations of real gradings of experts (some broken on purpose) on the CPU backend; every fifth one has a source that is
already there. Each measured insert is a transaction, as in a report. In between, rows and sources are copied within SQLite, each
under a random key. Rates include the time to make the rows, times of single inserts do not.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import json
import multiprocessing
import os
import platform
import random
import resource
import sqlite3
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kbx_env import versions
from kbx_env.outcome import Outcome
from kbx_env.spec.catalog import expert_source, load_task, task_ids
from kbx_env.store import Store, request_key

POLICIES = ("expert", "replay:answers.jsonl", "python:policies.one:Policy", "python:policies.two:Policy")
LOOKS = 20_000
OPTIONS = {"backend": "cpu", "targets": ["sm_90"], "grading": "contract", "seed": None, "timing": True, "split": "eval",
           "torch_ops": "strict"}  # fmt: skip

Pattern = tuple[str, bytes, Outcome]


def patterns(count: int = 16) -> list[Pattern]:
    """Return graded sources: half of them correct, the others broken in several ways."""
    from kbx_env.grading.grader import Grader

    ways: Sequence[Callable[[str], str]] = (
        lambda s: s.replace("tl.store", "tl.stor", 1),
        lambda s: s.replace(" + ", " - "),
        lambda s: s + "\nimport os\n",
    )
    found = []
    with Grader() as grader:
        for i, task in enumerate(random.Random(1).sample(sorted(task_ids()), count)):
            source = expert_source(load_task(task).id)
            if i % 2:
                source = ways[i // 2 % len(ways)](source)
            found.append((task, source.encode(), grader.grade(task, source, backend="cpu", targets=["sm_90"])))
    return found


class Maker:
    """Makes the n-th row, the same in every process."""

    def __init__(self, found: Sequence[Pattern], environment: dict[str, str]) -> None:
        self._found, self._environment = found, environment
        self._tasks = sorted(task_ids())

    def row(self, n: int) -> tuple[str, str, int, dict[str, Any], bytes, Outcome]:
        """Return key, policy, sample, request, source and outcome of row ``n``."""
        _, source, outcome = self._found[n % len(self._found)]
        policy = POLICIES[n // 7 % len(POLICIES)]
        task = self._tasks[n // 11 % len(self._tasks)]
        shown = n - len(self._found) * 50 if n % 5 == 0 and n > 1000 else n  # every fifth source is an earlier one
        data = source + b"\n# attempt %d\n" % shown
        fingerprint = hashlib.sha256(task.encode()).hexdigest()
        request = {
            "policy": policy,
            "sample": n,
            "task": task,
            **OPTIONS,
            **self._environment,
            "fingerprint": fingerprint,
        }
        seconds = {k: round(v * (1 + n % 97 / 97), 4) for k, v in outcome.seconds.items()}
        outcome = dataclasses.replace(
            outcome, task=task, seconds=seconds, source_sha256=hashlib.sha256(data).hexdigest(),
            manifest={**outcome.manifest, "task_fingerprint": fingerprint},
        )  # fmt: skip
        return request_key(request, data), policy, n, request, data, outcome


def insert(path: Path, maker: Maker, numbers: range) -> tuple[list[float], float, float, float]:
    """Insert rows, each in a transaction.

    Args:
        path: the file.
        maker: makes the rows.
        numbers: numbers of the rows.

    Returns:
        Seconds of every ``put``, processor seconds of all of them, start of the first and end of the last one.
    """
    store, took, used = Store(path), [], 0.0
    begun = time.time()
    for n in numbers:
        row = maker.row(n)
        cpu, start = time.thread_time(), time.perf_counter()
        store.put(*row)
        took.append(time.perf_counter() - start)
        used += time.thread_time() - cpu
    ended = time.time()
    store.close()
    return took, used, begun, ended


def multiply(path: Path, rows: int) -> int:
    """Copy all rows and sources until there are about ``rows``; return their number."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("PRAGMA synchronous=OFF")
        have, sources = (db.execute(f"SELECT max(id) FROM {t}").fetchone()[0] for t in ("gradings", "sources"))
        for k in range(1, round(rows / have)):
            db.execute("BEGIN IMMEDIATE")
            db.execute("INSERT INTO sources SELECT id + ?, randomblob(32), data FROM sources WHERE id <= ?",
                       (k * sources, sources))  # fmt: skip
            db.execute(
                "INSERT INTO gradings SELECT id + ?, randomblob(32), policy, task, sample + ?, created, infra, verdict, "
                "settings, source + ?, outcome FROM gradings WHERE id <= ?", (k * have, k * have, k * sources, have),
            )  # fmt: skip
            db.execute("COMMIT")
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return int(db.execute("SELECT count(*) FROM gradings").fetchone()[0])


def spread(took: Sequence[float]) -> dict[str, float]:
    """Return median, 99th percentile and maximum of some seconds, in milliseconds."""
    ordered = sorted(took)
    at = {"p50_ms": 0.5, "p99_ms": 0.99, "max_ms": 1.0}
    return {k: round(1000 * ordered[min(len(ordered) - 1, int(q * len(ordered)))], 4) for k, q in at.items()}


def timed(act: Callable[[Any], Any], over: Sequence[Any]) -> dict[str, float]:
    """Call a function for each value and return the ``spread`` of its times."""
    took = []
    for item in over:
        start = time.perf_counter()
        act(item)
        took.append(time.perf_counter() - start)
    return spread(took)


def fill(path: Path, maker: Maker, rows: int, measured: int, writers: int) -> dict[str, Any]:
    """Fill a new file: single rows, many copies of them, single rows again, by one process and by several.

    Args:
        path: the file.
        maker: makes the rows.
        rows: number of rows in all.
        measured: number of inserts that are measured.
        writers: number of processes.

    Returns:
        The figures.
    """
    measured = min(measured, rows // 3)
    result: dict[str, Any] = {"new_file_one_writer": _inserts([insert(path, maker, range(measured))])}
    start = time.perf_counter()
    filled = multiply(path, rows - 2 * measured)
    result["filled"] = {"rows": filled, "seconds": round(time.perf_counter() - start, 1)}
    result["full_file_one_writer"] = _inserts([insert(path, maker, range(filled, filled + measured))])
    with multiprocessing.get_context("spawn").Pool(writers) as pool:
        parts = [range(filled + measured + k, filled + 2 * measured, writers) for k in range(writers)]
        result["full_file_several_writers"] = _inserts(pool.starmap(insert, [(path, maker, p) for p in parts], 1))
    return result


def _inserts(parts: Sequence[tuple[list[float], float, float, float]]) -> dict[str, Any]:
    took = [s for part in parts for s in part[0]]
    wall = max(p[3] for p in parts) - min(p[2] for p in parts)
    return {
        "processes": len(parts), "rows": len(took), "inserts_per_s": round(len(took) / wall), **spread(took),
        "processor_ms_each": round(1000 * sum(p[1] for p in parts) / len(took), 3), "load_average": os.getloadavg()[0],
    }  # fmt: skip


def looks(path: Path, maker: Maker, measured: int) -> dict[str, Any]:
    """Measure look-ups in the full file: by key for random rows, the others for rows that are no copies.

    Args:
        path: the file.
        maker: makes the rows.
        measured: number of look-ups.

    Returns:
        The figures.
    """
    store, chosen = Store(path), random.Random(2)
    there = [maker.row(chosen.randrange(measured)) for _ in range(min(LOOKS, measured))]
    with contextlib.closing(sqlite3.connect(path)) as db:
        last = db.execute("SELECT max(id) FROM gradings").fetchone()[0]
        ids = [(chosen.randrange(last) + 1,) for _ in there]
        hits = [key.hex() for i in ids for (key,) in db.execute("SELECT key FROM gradings WHERE id = ?", i)]
    missing = [hashlib.sha256(k.encode()).hexdigest() for k in hits]
    absent = [(r[3], r[4] + b"#") for r in there]
    assert all(store.get(r[0]) == r[5] for r in there[:500]), "a stored outcome came back changed"
    assert not any(store.get(k) for k in missing[:500])
    result = {
        "hit": timed(store.get, hits), "miss": timed(store.get, missing),
        "same_source_hit": timed(lambda r: store.same(r[3], r[4]), there),
        "same_source_miss": timed(lambda r: store.same(*r), absent),
        "find_hit": timed(lambda r: store.find(r[3]), there),
    }  # fmt: skip
    store.close()
    return result


def queries(path: Path) -> dict[str, Any]:
    """Measure the report's query and the overview; peak memory is that of this process so far."""
    store = Store(path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    found = store.rows(POLICIES[0])
    next(found)
    first = time.perf_counter() - start
    count = 1 + sum(1 for _ in found)
    rows = time.perf_counter() - start
    start = time.perf_counter()
    counts = store.counts()
    overview = time.perf_counter() - start
    store.close()
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "rows_of_one_policy": {"rows": count, "seconds": round(rows, 2), "first_row_ms": round(1000 * first, 2),
                               "rows_per_s": round(count / rows), "memory_grew_mb": round((after - before) / 1024, 1)},
        "counts": {"rows": sum(n for _, _, n in counts), "seconds": round(overview, 3)},
    }  # fmt: skip


def upkeep(path: Path) -> dict[str, Any]:
    """Measure an export to Parquet and the pruning of one policy; ``None`` without pyarrow."""
    from kbx_env.cli.store import export
    from kbx_env.errors import UsageError

    store, out, result = Store(path), path.with_suffix(".parquet"), {}
    start = time.perf_counter()
    try:
        count = export(store, out)
        result["export"] = {"rows": count, "seconds": round(time.perf_counter() - start, 1), "mb": _mb(out)}
    except UsageError:
        result["export"] = None
    start = time.perf_counter()
    gone = store.prune(policy=POLICIES[0])
    result["prune_one_policy"] = {"rows": gone, "seconds": round(time.perf_counter() - start, 1), "mb_after": _mb(path)}
    store.close()
    return result


def _mb(path: Path) -> float:
    return round(path.stat().st_size / 1e6, 1)


def main() -> None:
    """Run the command: measure, write JSON and print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--measured", type=int, default=20_000, help="rows of each measurement of inserts")
    parser.add_argument("--writers", type=int, default=4)
    parser.add_argument("--folder", help="where the temporary file goes (2 GB for 1,000,000 rows)")
    options = parser.parse_args()
    environment = versions.environment("cpu")
    found = patterns()
    result: dict[str, Any] = {
        "cores": os.cpu_count(), "sqlite": sqlite3.sqlite_version, **environment,
        "python": platform.python_version(), "verdicts_of_patterns": sorted(str(o.verdict) for _, _, o in found),
        "mean_source_bytes": round(sum(len(s) for _, s, _ in found) / len(found)),
        "mean_outcome_bytes": round(sum(len(o.to_json()) for _, _, o in found) / len(found)),
    }  # fmt: skip
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path, maker = Path(folder) / "gradings.sqlite", Maker(found, environment)
        result["insert"] = fill(path, maker, options.rows, options.measured, options.writers)
        result["file_mb"] = _mb(path)
        result["look_up"] = looks(path, maker, min(options.measured, options.rows // 3))
        result["query"] = queries(path)
        result["upkeep"] = upkeep(path)
    options.out.write_text(json.dumps(result, indent=1))
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
