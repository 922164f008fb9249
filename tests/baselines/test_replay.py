"""Replay files: both formats, fences, and broken rows named by their line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kbx_env.baselines.policy import make_policy
from kbx_env.baselines.replay import strip_fences


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("x = 1\n", "x = 1\n"),
        ("Sure!\n```python\nx = 1\n```\nDone.", "x = 1\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("```bash\npip install triton now\n```\n```python\nx = 1\ny = 2\n```", "x = 1\ny = 2\n"),
        ("```python\nx = 1\n", "x = 1\n"),
        ("```python\ndef broken(:\n```", "def broken(:\n"),
    ],
)
def test_fences(text: str, source: str) -> None:
    assert strip_fences(text) == source


def test_rows_of_both_formats_and_broken_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        json.dumps({"task": "math/softmax", "predict": "```python\na = 1\n```"}),
        "{not json",
        json.dumps({"file": "Activation/gelu_fp16.py", "predict": "b = 1"}),
        json.dumps({"predict": "no task"}),
        json.dumps({"file": "AdamW.py", "predict": "c = 1", "entry": "adamw_step", "entry_in_source": "AdamW"}),
        json.dumps({"task": "math/softmax", "predict": "second sample"}),
        json.dumps({"task": "math/softmax"}),
    ]
    path = tmp_path / "answers.jsonl"
    path.write_text("\n".join(rows) + "\n")
    policy = make_policy(f"replay:{path}")
    said = capsys.readouterr().err
    assert "line 2" in said and "line 4" in said and "line 7" in said and "line 1:" not in said
    assert policy.act({"task": "math/softmax"}) == "a = 1\n"
    assert policy.act({"task": "math/softmax", "turn": 1}) == "second sample"
    assert policy.act({"task": "activation/gelu_fp16"}) == "b = 1"
    assert policy.act({"task": "optimizer/AdamW"}).endswith("adamw_step = AdamW\n")
    assert policy.act({"task": "random/rand"}) is None


def test_samples_in_order(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text("".join(json.dumps({"task": "softmax", "predict": f"x = {i}"}) + "\n" for i in range(3)))
    policy = make_policy(f"replay:{path}")
    assert policy.samples("math/softmax") == 3 and policy.samples("random/rand") == 1
    assert [policy.act({"task": "math/softmax", "sample": i}) for i in range(4)] == ["x = 0", "x = 1", "x = 2", None]


def test_line_separators_inside_a_string_and_a_byte_order_mark(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "answers.jsonl"
    row = json.dumps({"task": "math/softmax", "predict": "# a\u2028b\x0c\nx = 1"}, ensure_ascii=False)
    path.write_text("\ufeff" + row + "\r\n", encoding="utf-8", newline="")
    assert "x = 1" in (make_policy(f"replay:{path}").act({"task": "math/softmax"}) or "")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", ["Loss/softmax.py", "", "Math/nothing.py", "/"])
def test_a_name_that_is_no_task(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text(json.dumps({"file": name, "predict": "x"}) + "\n" + json.dumps({"task": "svd", "predict": "y"}))
    assert make_policy(f"replay:{path}").act({"task": "linearalgebra/svd"}) == "y"
    assert "line 1" in capsys.readouterr().err


def test_the_sample_file_reads_without_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    sample = Path(__file__).resolve().parents[2] / "baselines/samples/replay.jsonl"
    policy = make_policy(f"replay:{sample}")
    assert len(policy.sources) >= 12 and capsys.readouterr().err == ""
