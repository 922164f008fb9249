"""The recipes for several GPUs are accepted, fit together, and say what they need; one is run by two processes on a CPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

pytest.importorskip("trl")
from kbx_env.train import grpo, grpo_setup, logs, memory  # noqa: E402
from kbx_env.train.settings import read  # noqa: E402

RECIPES = Path(grpo.__file__).parent / "recipes"
NAMES = sorted(p.stem for p in RECIPES.glob("*.yaml"))


def header(name: str) -> str:
    """The comment above a recipe's settings."""
    lines = (RECIPES / f"{name}.yaml").read_text().splitlines()
    return "\n".join(line for line in lines[: next(i for i, x in enumerate(lines) if not x.startswith("#"))])


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_accepted(name: str, tmp_path: Path) -> None:
    more = ["trainer.use_cpu=true"]
    more += ["grader=http://127.0.0.1:8300"] if "grader=" in header(name) else []
    s = read(grpo.Settings, [str(RECIPES / f"{name}.yaml"), "model=m", f"out={tmp_path}", *more])
    grpo_setup.check(s)
    config = grpo_setup.config_of_run(s)
    assert grpo_setup.tasks_of(s) and memory.still(s.dtype or "float32", s.lora is not None, config.learning_rate) == ""
    text = header(name)
    assert "Needs:" in text or "checks that" in text
    launch = RECIPES.parent.parent / (m.group(1) if (m := re.search(r"--config_file (\S+)", text)) else "")
    processes = yaml.safe_load(launch.read_text())["num_processes"] if m else 1
    found = re.search(r"--num_processes (\d+)", text) or re.search(r"--nproc_per_node (\d+)", text)
    processes = int(found.group(1)) if found else processes
    each = config.per_device_train_batch_size * config.gradient_accumulation_steps
    assert processes * each % config.num_generations == 0, "groups are whole"
    for gpu in s.grade_gpus or ():
        training = re.search(r"CUDA_VISIBLE_DEVICES=(\S+) accelerate", text)
        assert training and str(gpu) not in training.group(1).split(","), "no process trains where kernels are timed"


@pytest.mark.parametrize("name", sorted(p.stem for p in (RECIPES / "accelerate").glob("*.yaml")))
def test_accelerate_reads_its_file(name: str) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(RECIPES / f"accelerate/{name}.yaml"))
    assert config.num_processes == 8 * config.num_machines and not config.use_cpu
    assert any(f"accelerate/{name}.yaml" in header(r) for r in NAMES), "a recipe uses it"


@pytest.mark.full
def test_two_processes_on_a_cpu(model_folder: Path, tmp_path: Path) -> None:
    argv = ["--nproc_per_node", "2", "--master_port", "0", "--rdzv_backend", "c10d", "--rdzv_endpoint", "127.0.0.1:0"]
    script = [str(Path(grpo.__file__)), str(RECIPES / "two-cpus.yaml"), f"model={model_folder}", f"out={tmp_path / 'run'}"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *argv, *script], timeout=250, capture_output=True, text=True,
        env={**os.environ, "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [x for x in logs.read(tmp_path / "run") if "train_runtime" not in x]
    assert line["gradings"] >= 4 and (tmp_path / "run/final/model.safetensors").is_file(), "two answers of each process"
