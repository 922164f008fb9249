"""Shared by the scripts that run a TRL trainer: its configuration, checkpoints to resume from, and the final checkpoint."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from kbx_env.train.settings import config_of

from kbx_env.errors import UsageError

FINAL = "final"
"""Folder of the trained checkpoint, in the folder of a run."""
LAST = "last"
"""Value of ``resume`` for the newest complete checkpoint."""
_STATE = "trainer_state.json"  # the last file that is written: a checkpoint with it is complete
_GPU = ("bf16", "activation_checkpointing", "gradient_checkpointing", "dataloader_pin_memory")
T = TypeVar("T")


def on_cpu(section: Mapping[str, Any]) -> bool:
    """Return whether a trainer with this section ``trainer`` runs on the CPU."""
    import torch

    return bool(section.get("use_cpu")) or not torch.cuda.is_available()


def trainer_config(cls: type[T], section: Mapping[str, Any], **ours: Any) -> T:
    """Make a configuration of TRL; on a CPU without half precision and recomputation, unless the section sets them.

    Args:
        cls: ``trl.SFTConfig``, ``trl.GRPOConfig``, ...
        section: the section ``trainer`` of the settings.
        **ours: fields that the script sets itself.

    Returns:
        The configuration.

    Raises:
        UnknownName: no such field.
        UsageError: the class refuses a value.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    section = dict(section)
    if on_cpu(section):
        names = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
        # transformers renamed one of these, and warns at the old name.
        old = "gradient_checkpointing" if "activation_checkpointing" in names else "activation_checkpointing"
        given = "gradient_checkpointing" in section or "activation_checkpointing" in section
        for name in _GPU:
            if name in names and name != old and not (given and name.endswith("checkpointing")):
                section.setdefault(name, False)
    return config_of(cls, section, **ours)


def checkpoint_of(out: str, resume: str | None) -> Path | None:
    """Return the checkpoint to resume from; ``None`` to start from the beginning.

    Args:
        out: the run's folder.
        resume: ``None``, a checkpoint folder, or ``last``: the newest complete checkpoint in ``out``, where there is one.

    Returns:
        The checkpoint's folder.

    Raises:
        UsageError: the folder is not empty and ``resume`` is ``None``, or there is no such checkpoint.
    """
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"out={out} is a file; give a folder")
    complete = sorted((p.parent for p in folder.glob(f"checkpoint-*/{_STATE}")), key=step_of)
    if resume is None:
        if folder.is_dir() and any(folder.iterdir()):
            raise UsageError(f"out={out} is not empty; resume=last goes on there, or give another folder")
        return None
    if resume == LAST:
        if not complete:
            print(f"no whole checkpoint in {folder} yet: from the beginning")
        return complete[-1] if complete else None
    if not (Path(resume) / _STATE).is_file():
        near = ", ".join(p.name for p in complete) or "none"
        raise UsageError(f"resume={resume} is no checkpoint of a run (it has no {_STATE}); whole ones in {folder}: {near}")
    step_of(Path(resume))
    return Path(resume)


def step_of(checkpoint: Path) -> int:
    """Return the step at which a checkpoint was written.

    Args:
        checkpoint: the checkpoint's folder.

    Returns:
        The step.

    Raises:
        UsageError: the file of its state cannot be read.
    """
    try:
        return int(json.loads((checkpoint / _STATE).read_text())["global_step"])
    except (ValueError, KeyError, TypeError) as e:
        raise UsageError(f"{checkpoint / _STATE} cannot be read; remove that folder and resume from an earlier one") from e


def adapter_of(lora: Mapping[str, Any] | None) -> Any:
    """Return the ``peft.LoraConfig`` of a section ``lora``; ``None`` if there is no such section.

    Args:
        lora: the section.

    Returns:
        The configuration.

    Raises:
        UsageError: peft is not installed, or it refuses the section.
    """
    if lora is None:
        return None
    try:
        from peft import LoraConfig
    except ImportError as e:
        raise UsageError('lora needs peft: pip install "kbx_env[peft]", or lora=null') from e
    return config_of(LoraConfig, lora, "lora", task_type="CAUSAL_LM")


def finish(trainer: Any, folder: Path) -> None:
    """Write the trained model and its tokenizer; an adapter is merged into the weights.

    Args:
        trainer: one of TRL's.
        folder: the folder to write.
    """
    model = trainer.accelerator.unwrap_model(trainer.model)
    merge = getattr(model, "merge_and_unload", None)
    if merge is None:
        trainer.save_model(str(folder))  # by all processes
    elif trainer.is_world_process_zero():
        merge().save_pretrained(folder)
    if trainer.is_world_process_zero():
        trainer.processing_class.save_pretrained(folder)


def finish_from(trainer: Any, checkpoint: Path, folder: Path, *, model: str, lora: bool, dtype: str) -> None:
    """Write the trained model from a checkpoint of the last step, without training.

    Args:
        trainer: one of TRL's.
        checkpoint: the checkpoint.
        folder: the folder to write.
        model: the checkpoint that the run started from.
        lora: whether the checkpoint holds an adapter.
        dtype: dtype of the weights.
    """
    if not trainer.is_world_process_zero():
        return
    from kbx_env.train import models

    if not lora:
        made, _ = models.load(checkpoint, dtype=dtype)
    else:
        from peft import PeftModel

        base, _ = models.load(model, dtype=dtype)
        made = PeftModel.from_pretrained(base, str(checkpoint)).merge_and_unload()
    made.save_pretrained(folder)
    trainer.processing_class.save_pretrained(folder)


def steps_of(trainer: Any) -> int:
    """Return the number of steps of a whole run. A trainer that resumes from its last step would do one more."""
    if trainer.args.max_steps > 0:
        return int(trainer.args.max_steps)
    each = math.ceil(len(trainer.get_train_dataloader()) / trainer.args.gradient_accumulation_steps)
    return math.ceil(trainer.args.num_train_epochs * max(1, each))


def train(trainer: Any, checkpoint: Path | None, s: Any) -> None:
    """Train and write ``out/final``; from a checkpoint of the last step only write it.

    Args:
        trainer: one of TRL's.
        checkpoint: the checkpoint to resume from; ``None`` to start from the beginning.
        s: settings of the script, with ``out``, ``model``, ``lora`` and ``dtype``.
    """
    out = Path(s.out)
    if checkpoint is not None and step_of(checkpoint) >= steps_of(trainer):
        print(f"{checkpoint} is at the end of training; only {out / FINAL} is written")
        finish_from(trainer, checkpoint, out / FINAL, model=s.model, lora=s.lora is not None, dtype=s.dtype or "float32")
    else:
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        finish(trainer, out / FINAL)
    if trainer.is_world_process_zero():
        print(f"checkpoint: {out / FINAL}\nlog: {out / 'log.jsonl'}")
