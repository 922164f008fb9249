"""``kbx store``: what is shown, exported and pruned, and what bad usage is told."""

from __future__ import annotations

import json
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from kbx_env.__main__ import main
from kbx_env.cli import store as store_cli
from kbx_env.extras import install_hint
from kbx_env.outcome import Cases, CaseTime, Fault, Outcome, Stage, Timing, Verdict
from kbx_env.store import Store, request_key

SETTINGS = {"backend": "cuda", "grading": "contract", "torch_ops": "strict", "split": "eval", "fingerprint": "f",
            "device": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0", "kbx_env": "0.1.0"}  # fmt: skip
COLUMNS = {"policy", "task", "sample", "created", "verdict", "stage", "fault", "correct", "cases_passed", "cases_total",
           "speedup", "low", "high", "device", "torch", "triton", "kbx_env", "source_sha256", "message"}  # fmt: skip


def _timing() -> Timing:
    case = CaseTime("big", 20.0, 10.0, 2.0, 1.5, 2.5, 30)
    return Timing(2.0, 1.5, 2.5, None, (case,), "NVIDIA H200")


def _gradings() -> list[tuple[str, str, bytes | None, Outcome]]:
    def outcome(verdict: Verdict, task: str, **more: Any) -> Outcome:
        fault = {Verdict.CORRECT: None, Verdict.INFRA_FAULT: Fault.INFRA}.get(verdict, Fault.POLICY)
        return Outcome(task, verdict, Stage.CORRECT, "cuda", "contract", fault, **more)

    return [
        ("good", "math/cos", b"right", outcome(Verdict.CORRECT, "math/cos", cases=Cases(3, 3), timing=_timing())),
        ("good", "math/sin", b"\xffwrong",
         outcome(Verdict.INCORRECT, "math/sin", cases=Cases(1, 3), message="[red]x \udcff")),
        ("good", "loss/mse_loss", b"lost", outcome(Verdict.INFRA_FAULT, "loss/mse_loss", message="out of memory")),
        ("shy", "math/cos", None, outcome(Verdict.MALFORMED, "math/cos", message="the policy has no answer")),
    ]  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> str:
    store = Store(tmp_path / "gradings.sqlite")
    for policy, task, source, outcome in _gradings():
        request = {"policy": policy, "task": task, "sample": 0, **SETTINGS}
        store.put(request_key(request, source), policy, 0, request, source, outcome)
    store.close()
    return str(tmp_path / "gradings.sqlite")


def test_show_counts_and_lists(path: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["store", "show", path]) == 0
    out = capsys.readouterr().out
    assert "4 gradings" in out and "infra_fault" in out and "2.000" in out and "1/3" in out
    assert "[red]x" in out, "a kernel's words are no markup"
    assert main(["store", "show", path, "--limit", "1"]) == 0
    assert "3 more" in capsys.readouterr().out


def test_show_as_one_object_with_the_filters(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "show", path, "--json", "--policy", "good", "--task", "math/*"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["gradings"] == 2 and {c["verdict"]: c["gradings"] for c in shown["counts"]} == {
        "correct": 1,
        "incorrect": 1,
    }
    assert [(r["task"], r["correct"], r["speedup"]) for r in shown["rows"]] == [
        ("math/cos", True, 2.0), ("math/sin", False, None)]  # fmt: skip
    assert main(["store", "show", path, "--json", "--verdict", "malformed", "--limit", "0"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["gradings"] == 1 and shown["rows"] == []


def test_export_is_flat_and_typed_and_missing_is_null(
    path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(store_cli, "_BATCH", 3)  # more than one row group
    monkeypatch.setattr(store_cli, "_BATCH_BYTES", 8)
    out = tmp_path / "out.parquet"
    assert main(["store", "export", path, str(out)]) == 0 and "4 gradings" in capsys.readouterr().out
    table = pq.read_table(out)
    assert set(table.column_names) >= COLUMNS and "source" not in table.column_names
    rows = {(r["policy"], r["task"]): r for r in table.to_pylist()}
    right, wrong = rows["good", "math/cos"], rows["good", "math/sin"]
    lost, shy = rows["good", "loss/mse_loss"], rows["shy", "math/cos"]
    assert (right["correct"], right["speedup"], right["low"], right["high"]) == (True, 2.0, 1.5, 2.5)
    assert (right["device"], right["torch"], right["cases_passed"]) == ("NVIDIA H200", "2.11.0", 3)
    assert abs((datetime.now(UTC) - right["created"]).total_seconds()) < 300
    assert wrong["correct"] is False and wrong["speedup"] is None and wrong["fault"] == "policy"
    assert lost["correct"] is None and lost["cases_total"] is None and shy["source_sha256"] is None
    assert main(["store", "export", path, str(out)]) == 2 and "--overwrite" in capsys.readouterr().err
    assert main(["store", "export", path, str(out), "--overwrite", "--sources"]) == 0
    assert {r["source"] for r in pq.read_table(out).to_pylist()} == {"right", "\\xffwrong", "lost", None}
    assert sorted(p.name for p in tmp_path.iterdir() if "parquet" in p.name) == ["out.parquet"], (
        "no part is left behind"
    )


def test_export_never_replaces_the_gradings_nor_writes_nowhere(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pyarrow")
    assert main(["store", "export", path, path, "--overwrite"]) == 2 and "itself" in capsys.readouterr().err
    assert main(["store", "export", path, "/nowhere/out.parquet"]) == 2 and "/nowhere" in capsys.readouterr().err
    assert main(["store", "show", path, "--limit", "0"]) == 0


def test_without_pyarrow_export_says_what_to_install(
    path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert main(["store", "export", path, str(tmp_path / "o.parquet")]) == 2
    assert install_hint("parquet") in capsys.readouterr().err and not (tmp_path / "o.parquet").exists()


def test_prune_says_how_many_and_a_dry_run_deletes_none(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "prune", path, "--older-than", "0", "--dry-run"]) == 0
    assert "4 gradings would go" in capsys.readouterr().out
    assert main(["store", "prune", path, "--older-than", "1"]) == 0 and "0 gradings deleted" in capsys.readouterr().out
    assert main(["store", "prune", path, "--infra"]) == 0 and "1 gradings deleted" in capsys.readouterr().out
    assert main(["store", "prune", path, "--policy", "good"]) == 0
    assert [(r.policy, r.task) for r in Store(path).records()] == [("shy", "math/cos")]


def test_age_is_counted_in_days(path: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    monkeypatch.setattr(store_cli.time, "time", lambda: now + 3 * 86400)
    assert main(["store", "prune", path, "--older-than", "4", "--dry-run"]) == 0
    assert main(["store", "prune", path, "--older-than", "2", "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines() == ["0 gradings would go", "4 gradings would go"]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["show", "/nowhere.sqlite"], "/nowhere.sqlite"), (["prune", "PATH"], "--older-than"),
        (["show", "PATH", "--policy", "goood"], "good"), (["show", "PATH", "--verdict", "corect"], "correct"),
        (["show", "PATH", "--limit", "-1"], "--limit"), (["prune", "PATH", "--older-than", "-1"], "--older-than"),
        (["prune", "PATH", "--older-than", "nan"], "--older-than"), (["prune", "PATH", "--policy", "nobody"], "shy"),
        (["show", __file__], "database"),
    ],
)  # fmt: skip
def test_bad_usage_exits_2_with_one_line(
    args: list[str], says: str, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["store", *(path if a == "PATH" else a for a in args)]) == 2
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1
