"""GRPO with TRL: a model answers tasks of the train split, its kernels are graded, and it learns from their rewards.

    python train/grpo.py train/configs/grpo.yaml model=runs/sft/final out=runs/grpo
    python train/grpo.py runs/grpo/settings.yaml resume=last

``out/final`` is a checkpoint for ``eval/report.py --policy hf:out/final``. ``out/log.jsonl`` has a line for every step,
``out/samples.jsonl`` some of the answers, ``out/gradings.sqlite`` every grading, so that a resumed run grades nothing twice.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kbx_env.train import grpo_setup as setup
from kbx_env.train.runs import checkpoint_of, train
from kbx_env.train.settings import MISSING, command, save

from kbx_env.errors import UsageError

if TYPE_CHECKING:
    from kbx_env.outcome import Outcome


@dataclass
class Settings:
    """Settings of this script."""

    model: str = MISSING
    """Folder of the checkpoint to start from, such as that of train/sft.py; nothing is fetched from a hub."""
    out: str = MISSING
    """Folder for checkpoints, log and result; must be new or empty unless resume is given."""
    tasks: str = "*"
    """Glob over ids of the train split, comma-separated."""
    category: str | None = None
    """One category only."""
    split: str = "train"
    """train; tasks of the eval split are refused."""
    mode: str = "single"
    """single: one answer; multi: answers and feedback in turn; tool: the model calls a tool (TRL's environment_factory)."""
    max_turns: int = 4
    """Submissions of an episode at most, in the modes multi and tool."""
    turn_length: int | None = None
    """Longest answer in mode multi, in tokens; null: what is left of trainer.max_completion_length, which all turns share."""
    episode: str = "best"
    """Which submission of an episode of several turns counts: best or last."""
    per_turn_credit: bool = False
    """In mode multi: each turn learns from the discounted rewards from it on, instead of the episode's reward."""
    gamma: float = 0.4
    """Discount between turns, with per_turn_credit; 0.4 as in Kevin (arXiv 2507.11948)."""
    reward: str = "default"
    """The preset of rewards/presets."""
    backend: str = "auto"
    """Where kernels are graded: cpu, cuda, or auto: cuda where there is a GPU."""
    timing: bool = True
    """Time correct kernels, on a GPU."""
    target: float = 1.0
    """Smallest speedup with which a task is solved, where kernels are timed."""
    torch_ops: str = "strict"
    """strict, or allow: wrappers may compute in torch."""
    targets: str = "sm_90"
    """Ahead-of-time targets of every grading, comma-separated, or none."""
    wall: float = 30.0
    """Seconds for one grading, without timing."""
    workers: int | None = None
    """Gradings at a time; null: as many as cores, on a GPU two fewer, on Ray as many as fit on the cluster."""
    executor: str = "process"
    """process: on this machine; ray: on a Ray cluster."""
    ray_address: str | None = None
    """Address of the cluster: local, auto, or HOST:PORT of its head."""
    per_gpu: int | None = None
    """Gradings that share a GPU of the cluster; null: what its cores allow."""
    grading_seed: int | None = None
    """Fixes the inputs of gradings; null: secret and new for each grading, so that none can be memorized."""
    curriculum: bool = False
    """Easy tasks first, in every epoch; otherwise shuffled."""
    categories: list[str] | None = None
    """Order of categories in a curriculum, before difficulty; categories that are not named come last."""
    dtype: str | None = None
    """Dtype of the weights: float32 or bfloat16. null: float32, and for LoRA on a GPU bfloat16."""
    lora: dict[str, Any] | None = None
    """Fields of peft.LoraConfig, such as {r: 32, lora_alpha: 64}; null: all weights are trained."""
    vllm: str = "auto"
    """Generate with vLLM: auto (where it is installed and there is a GPU), true or false (transformers)."""
    samples: int = 4
    """Answers of each step that samples.jsonl keeps."""
    resume: str | None = None
    """A checkpoint folder of an earlier run to continue, or last: the newest complete one in out, if there is any."""
    wandb: bool = False
    """Mirror the log to Weights & Biases; without an account it stays in out/wandb."""
    store: str | None = None
    """A file of gradings that several runs may share, so that none repeats another's; null: gradings.sqlite in out."""
    seed: int = 0
    """Seed of sampling, shuffling and new weights."""
    trainer: dict[str, Any] = field(default_factory=dict)
    """Fields of trl.GRPOConfig, unchanged: num_generations, learning_rate, max_steps, max_completion_length, ..."""


def trainer_of(s: Settings, stack: contextlib.ExitStack, grade: Callable[..., Outcome] | None = None) -> Any:
    """Return the trainer of a run, after all checks and before any step.

    Args:
        s: the settings.
        stack: closes the grader at its end.
        grade: replaces the real grader in tests.

    Returns:
        The trainer.

    Raises:
        UsageError: settings, model or tasks that cannot be used.
    """
    setup.check(s)
    tasks = setup.tasks_of(s)
    config, adapter = setup.config_of_run(s), setup.adapter_of(s.lora)
    model, tokenizer = setup.load(s, config)
    grader = stack.enter_context(setup.grader_of(s, grade))
    data = setup.rows_of(s, tasks, grader.backend, config, model, tokenizer)
    return setup.assemble(s, config, model, tokenizer, adapter, data, grader)


def run(
    s: Settings, grade: Callable[..., Outcome] | None = None, trainer_of: Callable[..., Any] = trainer_of
) -> None:  # fmt: skip
    """Train and write ``out/final``.

    Args:
        s: the settings.
        grade: replaces the real grader in tests.
        trainer_of: makes the trainer.
    """
    out = Path(s.out)
    # The other processes of a distributed run do not check: the first one may already write to the folder.
    checkpoint = checkpoint_of(s.out, s.resume) if s.resume or os.environ.get("RANK", "0") == "0" else None
    with contextlib.ExitStack() as stack:
        trainer = _checked(s, stack, grade, trainer_of)
        if trainer.is_world_process_zero():
            save(s, out)
        train(trainer, checkpoint, s)


def _checked(
    s: Settings, stack: contextlib.ExitStack, grade: Callable[..., Outcome] | None, trainer_of: Callable[..., Any]
) -> Any:
    """Make the trainer; after a usage error remove the new folder, or the next try would find it not empty."""
    out = Path(s.out)
    fresh = s.resume is None and not (out.is_dir() and any(out.iterdir()))
    try:
        return trainer_of(s, stack, grade)
    except UsageError:
        stack.close()
        if fresh:
            shutil.rmtree(out, ignore_errors=True)
        raise


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; exit status 0 when trained, 2 on bad usage, 130 when interrupted: continue with ``resume=last``."""
    return command("grpo.py", Settings, __doc__, run, argv)


if __name__ == "__main__":
    sys.exit(main())
