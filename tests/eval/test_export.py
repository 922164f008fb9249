"""The dataset: what is in it, what stays out, and that it loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from kbx_env.eval import export, report

from kbx_env import versions
from kbx_env.errors import UsageError
from kbx_env.grading.sizes import held_out
from kbx_env.outcome import Cases, Fault, Outcome, Stage, Timing, Verdict
from kbx_env.spec.catalog import expert_source, load_task, load_tasks, splits


def _rows(folder: Path, config: str) -> list[dict[str, Any]]:
    return [r for file in sorted((folder / config).glob("*.parquet")) for r in pq.read_table(file).to_pylist()]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("export") / "d"
    right = Outcome("math/softmax", Verdict.CORRECT, Stage.TIME, "cuda", "contract", cases=Cases(2, 2),
                    timing=Timing(2.0, 1.9, 2.1, None, (), "H200"), manifest={"device": "H200", "torch": "2"})  # fmt: skip
    wrong = Outcome("activation/gelu_int8", Verdict.INCORRECT, Stage.CORRECT, "cuda", "contract", Fault.POLICY, "off", Cases(1, 2))
    export.export(out, outcomes={o.task: o for o in (right, wrong)})
    return out


def test_rows_hold_what_a_model_sees_and_nothing_that_is_held_out(made: Path) -> None:
    assert {c: len(_rows(made, c)) for c in export.CONFIGS} == {"prompts": 176, "tasks": 176, "experts": 176, "verdicts": 2}
    assert {r["task"] for r in pq.read_table(made / "prompts/train.parquet").to_pylist()} == {
        t for t, split in splits().items() if split == "train"
    }
    rows = {r["task"]: r for r in _rows(made, "tasks")}
    for t in load_tasks():
        row = rows[t.id]
        assert len(row["cases"]) == sum(not c.held for c in t.cases) < len(t.cases) and row["contract"] == t.spec
        assert row["timed"] == [c.label() for c in t.timed]
    sizes = {c.label() for c in held_out(load_task("math/softmax"))}
    assert sizes and not sizes & set(rows["math/softmax"]["timed"])
    (prompt,) = [r["prompt"] for r in _rows(made, "prompts") if r["task"] == "math/softmax"]
    assert "softmax(input, dim, dtype=None)" in prompt
    (source,) = [r["source"] for r in _rows(made, "experts") if r["task"] == "math/softmax"]
    assert source == expert_source("math/softmax")


def test_the_canary_is_in_every_row_and_in_the_card_and_the_docs(made: Path) -> None:
    assert all(r["canary"] == export.CANARY for c in export.CONFIGS for r in _rows(made, c))
    card = (made / "README.md").read_text()
    guid = "90cb1154-1c49-42eb-9e45-a8c573404bbc"
    docs = Path(__file__).resolve().parents[2] / "docs/dataset.md"
    assert guid in export.CANARY and export.CANARY in card and guid in docs.read_text()
    assert versions.TASK_SET_HASH in card and "left out" not in card and "config_name: verdicts" in card


def test_missing_speedups_stay_missing(made: Path) -> None:
    found = {r["task"]: r for r in _rows(made, "verdicts")}
    assert found["math/softmax"]["speedup"] == 2.0 and found["math/softmax"]["device"] == "H200"
    assert found["activation/gelu_int8"]["speedup"] is None and found["activation/gelu_int8"]["verdict"] == "incorrect"


@pytest.mark.full
def test_the_datasets_library_loads_every_config(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    for config, columns in export.CONFIGS.items():
        found = datasets.load_dataset(str(made), config, cache_dir=str(tmp_path))
        assert set(found) == {"train", "eval"} and set(found["train"].column_names) == {*columns, "canary"}
    assert len(datasets.load_dataset(str(made), "prompts", cache_dir=str(tmp_path))["train"]) == 120


def test_verdicts_come_from_a_report_of_these_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def grade(task: str, source: bytes, **options: Any) -> Outcome:
        import hashlib

        sha = hashlib.sha256(source).hexdigest()
        return Outcome(task, Verdict.CORRECT, Stage.CORRECT, "cpu", "contract", cases=Cases(2, 2), source_sha256=sha)

    argv = ["--policy", "expert", "--backend", "cpu", "--tasks", "softmax,argmax", "--out", str(tmp_path / "r")]
    out = report.run(report.parser().parse_args(argv), grade=grade)
    assert export.export(tmp_path / "d", report=out).rows["verdicts"] == 2
    assert {r["verdict"] for r in _rows(tmp_path / "d", "verdicts")} == {"correct"}
    data = json.loads((out / "report.json").read_text())
    data["tasks"][0]["source_sha256"] = "0" * 64
    (out / "report.json").write_text(json.dumps(data))
    with pytest.raises(UsageError, match="other expert kernels of math/softmax"):
        export.export(tmp_path / "e", report=out)
    data["policy"] = "zeros"
    (out / "report.json").write_text(json.dumps(data))
    with pytest.raises(UsageError, match="no policy 'expert' \\(it has: zeros\\)"):
        export.export(tmp_path / "e", report=out)


def test_bad_usage_and_overwriting(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    two = [load_task("math/softmax"), load_task("reduce/argmax")]
    monkeypatch.setattr(export, "load_tasks", lambda: two)
    out = tmp_path / "d"
    assert export.main([str(out)]) == 0 and "no verdicts: add --report DIR or --grade" in capsys.readouterr().out
    assert "left out" in (out / "README.md").read_text() and not (out / "verdicts").exists()
    for argv, says in (
        ([str(out)], "not empty"), ([str(out), "--backend", "gpu"], "cuda"), ([str(out), "--grade", "--report", "x"], "exclude"),
        ([str(out), "--report", str(tmp_path), "--overwrite"], "report.json"),
    ):  # fmt: skip
        assert export.main(argv) == 2 and says in capsys.readouterr().err
    (out / "mine.txt").write_text("kept")
    assert export.main([str(out), "--overwrite"]) == 0 and (out / "mine.txt").is_file()
    (out / "README.md").write_text("my own")
    assert export.main([str(out), "--overwrite"]) == 2 and "not the card" in capsys.readouterr().err


def test_experts_are_graded_on_demand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def grade_many(pairs: list[tuple[str, str]], **options: Any) -> list[Outcome]:
        assert options == {"workers": 2, "backend": "cpu", "targets": ("sm_90",)}
        return [Outcome(t, Verdict.CORRECT, Stage.CORRECT, "cpu", "contract", cases=Cases(2, 2)) for t, _ in pairs]

    monkeypatch.setattr(export, "load_tasks", lambda: [load_task("math/softmax")])
    monkeypatch.setattr(export, "grade_many", grade_many)
    assert export.main([str(tmp_path / "d"), "--grade", "--workers", "2"]) == 0
    assert [r["verdict"] for r in _rows(tmp_path / "d", "verdicts")] == ["correct"]
