"""slime: its ``remote_rm`` posts prompt, response and label; its custom reward function gets samples."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
from fastapi.testclient import TestClient

from kbx_env.integrations import slime

TASK, WRONG = "random/logspace", 0.1 + 0.3 * 0.5


def test_remote_rm(grader: Any) -> None:
    client = TestClient(slime.make_app(grader))
    good, bad, lost = (client.post("/", json={"prompt": "?", "response": word, "label": TASK}) for word in ("GOOD", "BAD", "LOST"))
    assert good.json()["reward"] == 1.0 and bad.json()["reward"] == WRONG and bad.json()["terms"]["cases"] == 0.5
    assert lost.status_code == 503 and "was lost" in lost.json()["detail"], "slime repeats it"
    assert client.post("/", json={"response": "x"}).status_code == 422
    assert client.post("/", json={"response": "x", "label": "math/sofmax"}).status_code == 422


def test_custom_rm(grader: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slime, "shared", lambda **options: grader)
    samples = [SimpleNamespace(response=word, label=TASK, remove_sample=False) for word in ("GOOD", "BAD", "LOST")]
    assert asyncio.run(slime.reward(SimpleNamespace(reward_key=None), samples)) == [1.0, WRONG, 0.0]
    assert [s.remove_sample for s in samples] == [False, False, True]
    assert asyncio.run(slime.reward(SimpleNamespace(reward_key="score"), samples[1]))["score"] == WRONG


def test_the_rows(tmp_path: Path) -> None:
    file = slime.write_rows(tmp_path / "train.jsonl", category="random", backend="cpu")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert TASK in {r["task"] for r in rows} and rows[0]["prompt"][0]["role"] == "user"
