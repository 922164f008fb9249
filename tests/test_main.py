"""The command line: exit statuses, one JSON object, errors in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kbx_env import versions
from kbx_env.__main__ import _show, main, spent
from kbx_env.outcome import CaseFailure, Cases, Fault, Outcome, Stage, Verdict
from kbx_env.spec.catalog import expert_source

KEYS = {"task", "verdict", "correct", "fault", "stage", "reward", "speedup", "cases", "violations", "compile", "timing",
        "evidence", "seconds", "manifest"}  # fmt: skip


def _source(tmp_path: Path, text: str | bytes) -> str:
    path = tmp_path / "kernel.py"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return str(path)


def test_a_correct_kernel_exits_0_with_one_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = _source(tmp_path, expert_source("activation/gelu_fp16") or "")
    code = main(["grade", "activation/gelu_fp16", file, "--backend", "cpu", "--targets", "sm_90", "--json"])
    got = json.loads(capsys.readouterr().out)
    assert code == 0 and set(got) >= KEYS
    assert got["correct"] and got["fault"] is None and got["reward"] == pytest.approx(1.0) and got["speedup"] is None
    assert set(got["evidence"]) >= {"launches", "ablation", "denied_ops", "moved_bytes", "ideal_bytes"}
    assert set(got["cases"]) >= {"passed", "total"} and got["seconds"]["total"] > 0


@pytest.mark.parametrize("text", ["", b"\x00\x01\x02", b"\xff\xfe", "def f(:\n", "x = 1\n", b"#" * (10 << 20)])
def test_malformed_sources_exit_1(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | bytes) -> None:
    code = main(["grade", "math/softmax", _source(tmp_path, text), "--backend", "cpu", "--targets", "none", "--json"])
    got = json.loads(capsys.readouterr().out)
    assert code == 1 and got["verdict"] == "malformed" and got["reward"] == 0.0 and got["message"]


def test_people_read_what_failed_and_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = _source(
        tmp_path, "import torch\n\n\ndef softmax(input, dim, dtype=None):\n    return torch.softmax(input, dim)\n"
    )
    assert main(["grade", "softmax", file, "--backend", "cpu", "--targets", "none"]) == 1
    said = capsys.readouterr().out
    assert "rejected" in said and "line 5" in said and "Triton kernel" in said and "to do: " in said


def test_a_crash_after_a_failed_case_is_still_told(capsys: pytest.CaptureFixture[str]) -> None:
    common = ("math/softmax", Verdict.RUNTIME_ERROR, Stage.CORRECT, "cpu", "contract", Fault.POLICY)
    _show(Outcome(*common, "line 9: IndexError", cases=Cases(1, 3, (CaseFailure("M=3", "off by 12"),))), 0.1)
    said = capsys.readouterr().out
    assert "line 9: IndexError" in said and said.count("off by 12") == 1


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["grade", "math/sofmax", "x.py"], "math/softmax"),
        (["grade", "math/softmax", "missing.py", "--backend", "cpu"], "missing.py"),
        (["grade", "math/softmax", __file__, "--backend", "gpu"], "cuda"),
        (["grade", "math/softmax", __file__, "--backend", "cpu", "--grading", "papers"], "paper"),
        (["grade", "math/softmax", __file__, "--backend", "cpu", "--sizes", "heldout"], "held-out, published"),
        (["grade", "math/softmax", __file__, "--backend", "cpu", "--targets", "sm_99"], "sm_90"),
        (["grade", "math/softmax", __file__, "--backend", "cpu", "--reward", "defalt"], "default"),
        (["tasks", "--category", "mth"], "math"),
        (["tasks", "--split", "test"], "train"),
        (["prompt", "nothing/here"], "nothing/here"),
        (["prompt", "math/softmax", "--backend", "gpu"], "cuda"),
    ],
)
def test_bad_usage_exits_2_in_one_line(
    argv: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if argv[:2] == ["grade", "math/sofmax"]:
        argv = ["grade", "math/sofmax", __file__, "--backend", "cpu"]
    assert main(argv) == 2
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1


def test_no_gpu_names_the_cpu_backend(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert main(["grade", "math/softmax", __file__, "--backend", "cuda"]) == 2
    assert "--backend cpu" in capsys.readouterr().err


def test_tasks_prompt_and_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tasks", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) >= 15
    assert main(["prompt", "math/softmax"]) == 0
    assert "softmax(input, dim, dtype=None)" in capsys.readouterr().out
    assert main(["doctor", "--json"]) == 0
    rows = {r["name"]: r for r in json.loads(capsys.readouterr().out)}
    assert {"torch", "triton", "cpu backend"} <= set(rows) and versions.TASK_SET_HASH in rows["task set"]["found"]


def test_the_module_runs() -> None:
    done = subprocess.run([sys.executable, "-m", "kbx_env", "tasks"], capture_output=True, text=True)
    assert done.returncode == 0 and "math/softmax" in done.stdout


def test_an_answer_in_markdown_is_graded_by_its_block(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = _source(tmp_path, f"The kernel:\n\n```python\n{expert_source('activation/gelu_fp16')}```\n")
    assert main(["grade", "activation/gelu_fp16", file, "--backend", "cpu", "--targets", "sm_90"]) == 0
    said = capsys.readouterr().out
    assert "Markdown block" in said and "built for: x *fp16" in said
    line = next(row for row in said.splitlines() if row.startswith("seconds: "))
    parts, _, total = line.removeprefix("seconds: ").partition("; in all ")
    named = {name: float(value) for name, value in (part.split(" ") for part in parts.split(", "))}
    assert sum(named.values()) == pytest.approx(float(total), abs=0.011)
    assert {"imports", "compile", "correct"} <= set(named) and abs(named.get("other", 0.0)) < 0.5


def test_seconds_add_up_and_holds_of_the_gpu_are_no_part_of_them() -> None:
    common = ("math/softmax", Verdict.RUNTIME_ERROR, Stage.CORRECT, "cuda", "contract", Fault.POLICY)
    seconds = {"screen": 0.1, "proof": 2.0, "correct": 1.0, "waited": 3.0, "shared": 0.5, "alone": 0.25, "total": 6.2}
    text = spent(Outcome(*common, "line 9: IndexError", seconds=seconds), {"imports": 1.5, "exit": 0.1})
    assert text == (
        "imports 1.50, screen 0.10, proof 2.00, correct 1.00, waited 3.00, exit 0.10, other 0.10; in all 7.80"
        " (the GPU was held: shared 0.50, alone 0.25)"
    )
    merged = {"proof": 2.0, "correct": 1.5, "start": 0.5, "total": 2.0}
    text = spent(Outcome(*common, "executed on the CPU tier: line 9", seconds=merged), {})
    assert text == "correct 1.50, start 0.50; in all 2.00"
