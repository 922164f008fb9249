"""Tables: a row an answer, missing is empty, safe to open."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

import pytest
from kbx_env.eval import report_data, tables
from kbx_env.eval.pages.context import Material
from kbx_env.eval.pages.document import unbelieved

from kbx_env.errors import UsageError


def _row(**more: Any) -> dict[str, Any]:
    return {"task": "math/cos", "category": "math", "difficulty": 2, "sample": 0, "verdict": "correct", "correct": True,
            "compiled": True, "backend": "cuda", "grading": "contract", **more}  # fmt: skip


def _write(folder: Path, *rows: dict[str, Any], policy: str = "p", **manifest: Any) -> list[dict[str, str]]:
    report = {"policy": policy, "manifest": manifest, "tasks": list(rows)}
    assert tables.write_tables(report_data.from_reports([report]), folder)[0] == folder / "tasks.csv"
    with (folder / "tasks.csv").open(encoding="utf-8", newline="") as f:
        return list(csv.DictReader(f))


FULL = _row(
    timing={"speedup": 1.5, "low": 1.4, "high": 1.6, "floor_ratio": None, "device": "NVIDIA H200"}, source_sha256="ab",
    evidence={"moved_bytes": 300, "ideal_bytes": 200, "launches": 3}, manifest={"torch": "2.11", "kbx_env": "0.1.0"},
    spent={"calls": 2, "prompt_tokens": 10, "completion_tokens": 5, "dollars": 0.5, "gradings": 1, "scripts": 0, "seconds": 2.5},
)


def test_every_column_in_its_place_and_missing_is_empty(tmp_path: Path) -> None:
    full, bare = _write(tmp_path, FULL, _row(sample=1), torch_ops="strict", torch="9", device="NVIDIA H100")
    assert full["sizes"] == "published" and _write(tmp_path, FULL, sizes="held-out")[0]["sizes"] == "held-out"
    assert list(full) == list(tables.COLUMNS)
    want = {"speedup": "1.5", "low": "1.4", "traffic": "1.5", "launches": "3", "calls": "2", "dollars": "0.5", "scripts": "0",
            "seconds": "2.5", "device": "NVIDIA H200", "torch_ops": "strict", "torch": "2.11",
            "correct": "true", "masked": "false"}  # fmt: skip
    assert {k: full[k] for k in want} == want
    empty = {k for k, v in bare.items() if v == ""}
    assert {"speedup", "low", "high", "traffic", "launches", "calls", "dollars", "seconds", "source_sha256", "triton"} <= empty
    assert bare["device"] == "NVIDIA H100" and "0" not in {bare[k] for k in ("speedup", "calls", "gradings")}


def test_of_a_masked_answer_nobody_knows_whether_it_is_right(tmp_path: Path) -> None:
    (r,) = _write(tmp_path, _row(correct=False, verdict="infra_fault", fault="infra"))
    assert (r["masked"], r["correct"], r["compiled"]) == ("true", "", "")


def test_a_time_that_is_not_believed_counts_in_no_speed_figure_and_is_listed(tmp_path: Path) -> None:
    case = {"case": "n=1", "eager_us": 9.0, "candidate_us": 1.0, "floor_us": 1.01, "void": True}
    timing = {"speedup": 9.0, "low": 8.0, "high": 10.0, "floor_ratio": None, "device": "NVIDIA H200", "cases": [case]}
    (r,) = _write(tmp_path, _row(timing=timing))
    assert r["correct"] == "true" and r["speedup"] == r["low"] == ""
    told = report_data.from_reports([{"policy": "p", "manifest": {"timed": True}, "tasks": [_row(timing=timing), FULL]}])
    listed = str(unbelieved(Material(told)))
    assert "Times that are not believed" in listed and "math/cos: n=1: 1.0 us, eager 9.0 us, floor 1.01 us" in listed
    assert unbelieved(Material(report_data.from_reports([{"policy": "p", "manifest": {}, "tasks": [FULL]}]))) is None


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "  =cmd|' /C calc'!A0", "\n@x", "\uff1d1"])
def test_no_cell_is_a_formula(text: str, tmp_path: Path) -> None:
    (r,) = _write(tmp_path, _row(message=text), policy=text)
    assert r["message"].startswith("'") and r["policy"].startswith("'") and r["message"][1:].strip() == text.strip()


def test_any_text_stays_one_row(tmp_path: Path) -> None:
    message = 'a,"b"\n;\r\nc\x00\x1b[31m \ud800' + "x" * 500
    (r,) = _write(tmp_path, _row(message=message))
    assert r["message"].startswith('a,"b"\n;\\x0d\nc\\x00\\x1b[31m \\ud800x') and r["message"].count("x") < 310


def test_odd_values_are_empty_and_spoil_no_column(tmp_path: Path) -> None:
    timing = {"speedup": float("nan"), "low": "fast", "high": True}
    (r,) = _write(tmp_path, _row(timing=timing, spent={"calls": 1.5, "dollars": float("inf"), "gradings": 10**40}))
    assert {r[k] for k in ("speedup", "low", "high", "calls", "dollars", "gradings")} == {""}


def test_parquet_has_the_same_rows_with_types(tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    _write(tmp_path, FULL, _row(sample=1, message="=1"))
    table = pq.read_table(tmp_path / "tasks.parquet")
    kinds = {"string": str, "int64": int, "double": float, "bool": bool}
    assert {f.name: kinds[str(f.type)] for f in table.schema} == dict(tables.COLUMNS)
    full, bare = table.to_pylist()
    assert (full["speedup"], full["calls"], bare["calls"], bare["message"]) == (1.5, 2, None, "=1")
    _write(tmp_path)
    assert pq.read_table(tmp_path / "tasks.parquet").schema == table.schema, "the same without any row"


def test_without_pyarrow_there_is_the_csv_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tasks.parquet").write_text("of another run")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    _write(tmp_path, FULL)
    assert [p.name for p in tmp_path.iterdir()] == ["tasks.csv"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="choose another folder"):
        tables.write_tables(report_data.from_reports([]), tmp_path / "file")


def test_markdown_and_html_tables_take_texts_as_they_are() -> None:
    cells = [{"policy": "a|b <i>`x`\n[l](http://e)\x1b[31m", "n": "1"}]
    assert tables.markdown(cells).splitlines()[2] == "| a\\|b &lt;i&gt;\\`x\\` \\[l\\](http://e)\\\\x1b\\[31m | 1 |"
    assert '<td class="num">1</td>' in (shown := tables.markup(cells, ("policy",))) and "<i>" not in shown and "\x1b" not in shown
