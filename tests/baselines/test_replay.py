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
