"""Writes answers as tables with one row each: ``tasks.csv``, and ``tasks.parquet`` if pyarrow is installed."""

from __future__ import annotations

import csv
import importlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kbx_env.eval.pages.render import environment
from kbx_env.eval.report_data import PolicyStudy, Row, Study

from kbx_env.errors import UsageError

COLUMNS: Mapping[str, type] = {
    "policy": str, "task": str, "category": str, "difficulty": int, "sample": int, "verdict": str, "masked": bool,
    "compiled": bool, "correct": bool, "speedup": float, "low": float, "high": float, "traffic": float, "launches": int,
    "calls": int, "prompt_tokens": int, "completion_tokens": int, "dollars": float, "gradings": int, "scripts": int,
    "seconds": float, "device": str, "backend": str, "grading": str, "torch_ops": str, "torch": str, "triton": str,
    "kbx_env": str, "source_sha256": str, "message": str, "compiled_speedup": float, "sizes": str,
}  # fmt: skip
"""Name -> type. Names and their order never change, because users' notebooks rely on them; new ones come last.

``compiled`` and ``correct`` are empty for masked answers. ``speedup`` is over eager, with its 95 % interval ``low`` to
``high``, at the timed ``sizes``. ``traffic`` is moved / ideal bytes. ``seconds`` is wall time for the answer and its
grading, without the queue for a grader. ``compiled_speedup`` is over torch.compile, if the run measured it.
"""
MESSAGE = 300
"""Characters of a message in a table."""
_RISKY = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""Spreadsheets read a cell that begins with one of these as a formula, and a formula may send the table elsewhere."""
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def write_tables(study: Study, folder: str | Path) -> list[Path]:
    """Write the tables. Cells without a value are empty, never 0.

    Args:
        study: the answers.
        folder: of the tables, made if it does not exist. An earlier Parquet file that cannot be replaced is removed,
            because its answers would differ from those of the CSV file.

    Returns:
        The files.

    Raises:
        UsageError: the folder cannot be written.
    """
    out = Path(folder)
    try:
        out.mkdir(parents=True, exist_ok=True)
        written = [_csv(study, out / "tasks.csv")]
        (out / "tasks.parquet").unlink(missing_ok=True)
        if (found := _parquet(study, out / "tasks.parquet")) is not None:
            written.append(found)
    except OSError as e:
        raise UsageError(f"cannot write tables to {str(folder)!r}: {e.strerror or e}; choose another folder") from e
    return written


def markdown(cells: Sequence[Mapping[str, str]]) -> str:
    """Return texts as a Markdown table.

    Args:
        cells: a mapping of column to text for each row; at least one.

    Returns:
        The table. Texts are escaped, names of columns are not.
    """
    return str(environment().get_template("cells.md.j2").module.table(cells))  # type: ignore[attr-defined]


def markup(cells: Sequence[Mapping[str, str]], texts: Collection[str]) -> str:
    """Return texts as the rows of an HTML table.

    Args:
        cells: a mapping of column to text for each row; at least one.
        texts: names of columns that hold texts; the others hold numbers and are aligned to the right.

    Returns:
        The ``tr`` elements, everything escaped.
    """
    return str(environment().get_template("cells.html.j2").module.table(cells, texts))  # type: ignore[attr-defined]


def rows(study: Study) -> Iterator[dict[str, Any]]:
    """Yield a mapping for each answer: every column, with its type or ``None``."""
    for p in study.policies:
        for r in p.rows:
            yield {name: _typed(value, COLUMNS[name]) for name, value in _row(p, r).items()}


def _row(p: PolicyStudy, r: Row) -> dict[str, Any]:
    about = {**p.manifest, **(m if isinstance(m := r.raw.get("manifest"), Mapping) else {})}
    timing = r.raw.get("timing") or {}
    found = {
        "policy": p.spec or p.name, "task": r.task, "category": r.category, "difficulty": r.difficulty, "sample": r.sample,
        "verdict": r.verdict, "masked": r.masked, "compiled": None if r.masked else r.compiled,
        "correct": None if r.masked else r.correct, "speedup": r.speedup, "low": r.low, "high": r.high, "traffic": r.traffic,
        "launches": r.launches, "device": timing.get("device") or about.get("device"),
        **{k: r.spent.get(k) for k in ("calls", "prompt_tokens", "completion_tokens", "dollars", "gradings", "scripts", "seconds")},
        **{k: r.raw.get(k) or p.manifest.get(k) for k in ("backend", "grading")},
        **{k: about.get(k) for k in ("torch_ops", "torch", "triton", "kbx_env")},
        "source_sha256": r.raw.get("source_sha256") or None, "message": r.message[:MESSAGE],
        "compiled_speedup": r.compiled_speedup, "sizes": about.get("sizes") or p.sizes,
    }  # fmt: skip
    return {name: found[name] for name in COLUMNS}


def _typed(value: Any, kind: type) -> Any:
    """Return a value as its column's type, or ``None``: one value of another type would change the type of the column."""
    if kind is str:
        return str(value).encode("utf-8", "backslashreplace").decode() if value is not None else None
    if kind is bool:
        return value if isinstance(value, bool) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 2**63:
        return None
    integral = kind is int and value == int(value)
    return float(value) if kind is float else int(value) if integral else None


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, str):
        return repr(value)
    text = _CONTROL.sub(lambda m: f"\\x{ord(m[0]):02x}", value)
    # Spreadsheets skip blanks before a formula.
    return "'" + text if text.lstrip().startswith(_RISKY) else text


def _csv(study: Study, path: Path) -> Path:
    part = path.with_name(path.name + ".new")
    with part.open("w", encoding="utf-8", newline="") as f:
        table = csv.writer(f)
        table.writerow(COLUMNS)
        table.writerows([_cell(v) for v in row.values()] for row in rows(study))
    return part.replace(path)


def _parquet(study: Study, path: Path) -> Path | None:
    try:
        pa, pq = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError:
        return None
    types = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}
    schema = pa.schema([(name, types[kind]) for name, kind in COLUMNS.items()])
    part = path.with_name(path.name + ".new")
    pq.write_table(pa.Table.from_pylist(list(rows(study)), schema), part, compression="zstd")
    return part.replace(path)
