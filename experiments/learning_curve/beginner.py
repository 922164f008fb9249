"""A tiny model that half knows some kernels: what ``examples/learn.py`` trains.

It has 0.1 million random weights and is taught by SFT on our own kernels, in which each of some places is faulty in a share
``odds`` of the demonstrations. So most of its kernels compile, and few of them are right.
"""

from __future__ import annotations

from pathlib import Path

from kbx_env.baselines.llm.conversation import Prompting
from kbx_env.train import runs, sft

from experiments.learning_curve.curve import Printer, only_ours
from experiments.noisy_demonstrations import data
from experiments.small_models import build_model

TASKS = "erfc_sqrt,fused_cos_signbit,signbit_bitwise_and,logspace"
"""The train tasks with the shortest kernels: at most 26 lines without comments."""


def beginner(
    out: str | Path, seed: int = 0, *, tasks: str = TASKS, places: int = 3, odds: float = 0.5, rows: int = 400, steps: int = 300,
    workers: int = 2,
) -> Path:  # fmt: skip
    """Make demonstrations, a model with random weights and its tokenizer, and teach the model the demonstrations.

    Args:
        out: folder for all of that; must be new or empty.
        seed: seed of the faults, the weights and the order of the demonstrations.
        tasks: glob over ids of the train split, comma-separated.
        places: places of each kernel that may be faulty.
        odds: probability of each fault.
        rows: demonstrations of each task.
        steps: steps of SFT.
        workers: gradings at a time, which find the places where a fault makes a kernel wrong.

    Returns:
        The folder of the trained checkpoint.

    Raises:
        UsageError: a folder that is not empty, or a task without so many places.
    """
    out = Path(out)
    data.run(data.Settings(str(out / "data"), tasks, workers=workers, seed=seed, places=places, odds=odds, rows=rows))
    return taught(out, out / "data/demonstrations.parquet", seed, steps)


def taught(out: Path, demonstrations: Path, seed: int, steps: int) -> Path:
    """Make a model with random weights and its tokenizer, and teach it demonstrations by SFT.

    Args:
        out: folder for both.
        demonstrations: file of the demonstrations; their lines become the tokens.
        seed: seed of the weights and of the order.
        steps: steps of SFT.

    Returns:
        The folder of the trained checkpoint.
    """
    shown = str(demonstrations)
    build_model.run(build_model.Build(
        str(out / "random"), hidden=64, layers=2, heads=4, vocab=4096, context=512, seed=seed, tokens="lines", prompt="short",
        data=shown,
    ))  # fmt: skip
    settings = sft.Settings(model=str(out / "random"), data=shown, out=str(out / "sft"), seed=seed, trainer={
        "max_steps": steps, "learning_rate": 5e-3, "lr_scheduler_type": "cosine", "warmup_steps": min(30, steps),
        "per_device_train_batch_size": 16, "adam_beta2": 0.98, "max_grad_norm": 1.0, "logging_steps": max(1, steps // 6),
        "save_strategy": "no", "disable_tqdm": True, "use_cpu": True,
    })  # fmt: skip
    trainer = sft.trainer_of(settings)
    only_ours(trainer, Printer("sft", steps, {"loss": "loss"}))
    runs.train(trainer, None, settings, Prompting(None))
    return out / "sft" / runs.FINAL
