"""The learning example from end to end, very small, with the real grader; ``make test-all`` also sees the reward rise."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kbx_env import jsonl

pytest.importorskip("trl")
pytest.importorskip("omegaconf")
pytest.importorskip("matplotlib")
from experiments.learning_curve import curve  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
PNG = b"\x89PNG"


def _learn(out: Path, *options: str) -> tuple[str, list[dict[str, float]]]:
    """Run the example; return what it prints and its curve."""
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "examples/learn.py", "--out", str(out), *options]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return done.stdout, jsonl.read(out / curve.FILE)


def test_a_very_small_run_from_random_weights_to_the_picture(tmp_path: Path) -> None:
    out = tmp_path / "run"
    printed, lines = _learn(out, "--tasks", "erfc_sqrt", "--sft-steps", "60", "--steps", "2")
    assert [(line["step"], line["answers"]) for line in lines] == [(1, 16), (2, 32)]
    assert all(0 <= line["correct"] <= line["reward"] <= line["compiles"] <= 1 for line in lines), lines
    assert lines[0]["reward"] > 0, "after SFT some kernels compile"
    assert (out / "curve.png").read_bytes().startswith(PNG) and (out / "final/model.safetensors").is_file()
    assert re.search(r"^grpo   2 of 2: reward \d\.\d\d, correct", printed, re.M) and "sft  60 of 60: loss" in printed, printed
    assert printed.splitlines()[-1] == curve.summary(lines)


@pytest.mark.full
def test_the_reward_rises(tmp_path: Path) -> None:
    _, lines = _learn(tmp_path / "run", "--steps", "40")
    start, end = curve.ends(lines, "reward")
    assert 0.1 < start < 0.5 and end > start + 0.2


def _curve(values: list[float | None]) -> list[dict[str, float | None]]:
    return [{"step": k, "answers": 8 * k, "reward": v, "correct": v, "compiles": 1.0} for k, v in enumerate(values, 1)]


def test_both_ends_of_a_curve_and_its_line() -> None:
    lines = _curve([0.25] * 5 + [0.5] * 40 + [1.0] * 5)
    assert curve.ends(lines, "reward") == (0.25, 1.0) and curve.ends(_curve([0.25, None]), "reward") == (0.25, 0.25)
    assert curve.summary(lines) == "reward 0.25 -> 1.00, correct kernels 25 % -> 100 % (first and last twentieth of 400 answers)"


def test_several_runs_in_one_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    jsonl.write(files[0], _curve([0.2, 0.4, None, 0.9]))
    jsonl.write(files[1], _curve([0.1]))
    assert curve.main([*map(str, files), "--out", str(tmp_path / "both.png")]) == 0
    printed = capsys.readouterr().out
    assert "a.jsonl: reward 0.20 -> 0.90" in printed and "b.jsonl: reward 0.10 -> 0.10" in printed
    first = (tmp_path / "both.png").read_bytes()
    assert first.startswith(PNG) and curve.draw(files, tmp_path / "both.png").read_bytes() == first, "equal data, equal bytes"


def test_only_lines_about_a_step_are_printed_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = curve.Curve(tmp_path, 3)
    args, state = SimpleNamespace(generation_batch_size=64, steps_per_generation=2), SimpleNamespace(global_step=2)
    kept.on_train_begin(args, state, None)
    kept.on_log(args, state, None, {"train_runtime": 3.0})
    kept.on_log(args, state, None, {"reward": 0.5, "kernel/correct_rate": 0.25, "kernel/compile_rate": 1.0})
    assert capsys.readouterr().out == "grpo   2 of 3: reward 0.50, correct 0.25, compiles 1.00, 0 s\n"
    assert [line | {"seconds": 0} for line in jsonl.read(tmp_path / curve.FILE)] == [
        {"step": 2, "answers": 64, "seconds": 0, "reward": 0.5, "correct": 0.25, "compiles": 1.0}
    ]
