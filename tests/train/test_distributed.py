"""Runs of two processes on a CPU (gloo): each episode gets its own answers, and an adapter is merged whole."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")
pytest.importorskip("peft")
from kbx_env.train import logs, models  # noqa: E402
from test_grpo import QUICK  # noqa: E402

pytestmark = pytest.mark.full
HERE = Path(__file__).parent


def both(out: Path, *argv: str) -> list[Any]:
    """Run ``two_processes.py`` twice at once; what each process wrote."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    around = {**os.environ, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
              "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, str(HERE / "two_processes.py"), argv[0], str(out), *argv[1:]],
            env={**around, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        ) for rank in range(2)
    ]  # fmt: skip
    try:
        told = [rank.communicate(timeout=200)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(told)[-6000:]
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)]


def test_each_episode_gets_its_own_answers_from_one_server(model_folder: Path, tmp_path: Path) -> None:
    """TRL takes a process's share by its own number of prompts; after the first turn these numbers differ."""
    found = both(tmp_path, "server", str(model_folder))
    for rank in found:
        assert rank["rewards"] == [pytest.approx(1.0)] * 3 and rank["lengths"] == [True] * 3
        for name, text in zip(rank["names"], rank["texts"], strict=True):
            answers = [line for line in text.splitlines() if line.startswith(("GOOD", "BAD"))]
            turns = int(name.split("-")[1])
            assert answers == [f"BAD {name}"] * turns + [f"GOOD {name}"], "its own, and no other episode's"
    assert found[0]["sizes"] == [6, 4, 4], "at most one prompt more for each process, to make numbers equal"


def test_a_run_over_several_turns_with_an_adapter(model_folder: Path, tmp_path: Path) -> None:
    more = [a for a in QUICK if "workers" not in a] + [
        "mode=multi", "max_turns=2", "trainer.max_completion_length=300", "trainer.use_cpu=true", "lora.r=2",
        "lora.target_modules=all-linear", "trainer.per_device_train_batch_size=2",
    ]  # fmt: skip
    both(tmp_path, "train", f"model={model_folder}", *more)
    out = tmp_path / "run"
    (line,) = [x for x in logs.read(out) if "train_runtime" not in x]
    assert line["gradings"] >= 4
    models.load(out / "final")
    assert (out / "adapter/adapter_model.safetensors").is_file()
