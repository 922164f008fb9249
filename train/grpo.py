"""GRPO with TRL: a model answers tasks of the train split, its kernels are graded, better ones are made likelier.

    python train/grpo.py train/configs/grpo.yaml model=runs/sft/final out=runs/grpo
    python train/grpo.py runs/grpo/settings.yaml resume=last

``out/final`` is a checkpoint that ``eval/report.py --policy hf:out/final`` takes. ``out/log.jsonl`` has a line for every step,
``out/samples.jsonl`` some of the answers, ``out/gradings.sqlite`` every grading: a killed run repeats none.
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

if __package__ in (None, ""):  # run as a script from a clone
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kbx_env.train import grpo_setup as setup
from kbx_env.train.runs import checkpoint_of, train
from kbx_env.train.settings import MISSING, command, save

from kbx_env.errors import UsageError

if TYPE_CHECKING:
    from kbx_env.outcome import Outcome


@dataclass
class Settings:
    """Of this script."""

    model: str = MISSING
    """Folder of the checkpoint to begin with, such as that of train/sft.py; nothing is fetched from a hub."""
    out: str = MISSING
    """Folder for checkpoints, log and result; must be new or empty unless resume is given."""
    tasks: str = "*"
    """Glob over ids of the train split, comma-separated."""
    category: str | None = None
    """One category only."""
    split: str = "train"
    """train; evaluated tasks are refused."""
    mode: str = "single"
    """single: one answer; multi: answers and verdicts by turns; tool: the model calls a tool (TRL's environment_factory)."""
    max_turns: int = 4
    """Submissions of an episode, in the modes multi and tool."""
    turn_length: int | None = None
    """Tokens of one answer in mode multi; null: what is left of trainer.max_completion_length, which all turns share."""
    episode: str = "best"
    """Which submission of an episode of several turns counts: best or last."""
    per_turn_credit: bool = False
    """In mode multi: every turn is paid the discounted rewards from it on, instead of the episode's reward."""
    gamma: float = 0.4
    """The discount between turns, with per_turn_credit; 0.4 as in Kevin (arXiv 2507.11948)."""
    reward: str = "default"
    """The preset of rewards/presets."""
    backend: str = "auto"
    """Where kernels are graded: cpu, cuda, or auto: cuda where there is a GPU."""
    timing: bool = True
    """Time correct kernels, on a GPU."""
    target: float = 1.0
    """Speedup from which a task is solved, where kernels are timed."""
    torch_ops: str = "strict"
    """strict, or allow: wrappers may compute in torch."""
    targets: str = "sm_90"
    """Ahead-of-time targets of every grading, comma-separated, or none."""
    wall: float = 30.0
    """Seconds for one grading, timing aside."""
    workers: int | None = None
    """Gradings at a time; null: the cores, on a GPU two fewer (timing has it alone), on Ray what there is room for."""
    executor: str = "process"
    """process: on this machine; ray: on a Ray cluster."""
    ray_address: str | None = None
    """Of the cluster: local, auto, or HOST:PORT of its head."""
    per_gpu: int | None = None
    """Gradings that share a GPU of the cluster; null: what its cores allow."""
    grading_seed: int | None = None
    """Fixes the inputs of gradings; null: secret and fresh for each, so that none can be learnt by heart."""
    curriculum: bool = False
    """Easy tasks first, in every epoch; otherwise shuffled."""
    categories: list[str] | None = None
    """Order of categories in a curriculum, before difficulty; what is not named comes last."""
    dtype: str | None = None
    """Of the weights: float32 or bfloat16. null: float32, and for LoRA on a GPU bfloat16."""
    lora: dict[str, Any] | None = None
    """Fields of peft.LoraConfig, such as {r: 32, lora_alpha: 64}; null: all weights are trained."""
    vllm: str = "auto"
    """Generate with vLLM: auto (where it is installed and there is a GPU), true or false (transformers)."""
    samples: int = 4
    """Answers of every step that samples.jsonl keeps."""
    resume: str | None = None
    """A checkpoint folder of an earlier run to go on from, or last: the newest whole one in out, if there is any."""
    wandb: bool = False
    """Mirror the log to Weights & Biases; without an account it stays in out/wandb."""
    store: str | None = None
    """A file of gradings that several runs may share: what one has graded the others know; null: gradings.sqlite in out."""
    seed: int = 0
    """Of sampling, shuffling and new weights."""
    trainer: dict[str, Any] = field(default_factory=dict)
    """Fields of trl.GRPOConfig, unchanged: num_generations, learning_rate, max_steps, max_completion_length, ..."""


def trainer_of(s: Settings, stack: contextlib.ExitStack, grade: Callable[..., Outcome] | None = None) -> Any:
    """The trainer of a run, all checks done and nothing begun; ``stack`` ends its graders. ``grade`` is for tests.

    Raises:
        UsageError: whatever is wrong with model, tasks or settings.
    """
    setup.check(s)
    tasks = setup.tasks_of(s)
    config, adapter = setup.config_of_run(s), setup.adapter_of(s.lora)
    model, tokenizer = setup.load(s, config)
    judge = stack.enter_context(setup.judge_of(s, grade))
    data = setup.rows_of(s, tasks, judge.backend, config, model, tokenizer)
    return setup.assemble(s, config, model, tokenizer, adapter, data, judge)


def run(s: Settings, grade: Callable[..., Outcome] | None = None) -> None:
    """Train and write ``out/final``."""
    out = Path(s.out)
    # Another process of the same run may have begun to write there.
    checkpoint = checkpoint_of(s.out, s.resume) if s.resume or os.environ.get("RANK", "0") == "0" else None
    with contextlib.ExitStack() as stack:
        trainer = _checked(s, stack, grade)
        if trainer.is_world_process_zero():
            save(s, out)
        train(trainer, checkpoint, s)


def _checked(s: Settings, stack: contextlib.ExitStack, grade: Callable[..., Outcome] | None) -> Any:
    """``trainer_of``; a mistake leaves no folder behind, or the next try would find it not empty."""
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
    """Exit 0 when trained, 2 on bad usage, 130 when interrupted: go on with ``resume=last``."""
    return command("grpo.py", Settings, __doc__, run, argv)


if __name__ == "__main__":
    sys.exit(main())
