"""Shared by the scripts that run a TRL trainer: its configuration, checkpoints to resume from, and the final checkpoint."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from kbx_env.baselines.llm.conversation import Prompting
from kbx_env.train.batch_grader import STORE
from kbx_env.train.settings import config_of

from kbx_env.errors import UsageError
from kbx_env.extras import install_hint

FINAL = "final"
"""Folder of the trained checkpoint, in the folder of a run."""
ADAPTER = "adapter"
"""Folder of a trained LoRA adapter, in the folder of a run; ``FINAL`` has it merged."""
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

    A folder with nothing but gradings is that of a run that was ended while its model was read; the next one may use them.

    Args:
        out: the run's folder.
        resume: ``None``, a checkpoint folder, or ``last``: the newest complete checkpoint in ``out``, where there is one.

    Returns:
        The checkpoint's folder.

    Raises:
        UsageError: a run has begun in the folder and ``resume`` is ``None``, or there is no such checkpoint.
    """
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"out={out} is a file; give a folder")
    complete = sorted((p.parent for p in folder.glob(f"checkpoint-*/{_STATE}")), key=step_of)
    if resume is None:
        if folder.is_dir() and any(not p.name.startswith(STORE) for p in folder.iterdir()):
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


def check_hub(config: Any) -> None:
    """Check that a run which will push to a hub can do so, before anything slow starts.

    Args:
        config: the trainer's configuration.

    Raises:
        UsageError: there is no account, or the hub cannot be reached.
    """
    if not config.push_to_hub:
        return
    from huggingface_hub import HfApi, constants

    instead = "leave out trainer.push_to_hub and upload the folder 'final' later"
    if constants.HF_HUB_OFFLINE:
        raise UsageError(f"trainer.push_to_hub=true, and HF_HUB_OFFLINE is set: unset it, or {instead}")
    try:
        HfApi().whoami(token=config.hub_token)
    except Exception as e:  # no common base: of httpx, of the hub, or of the operating system
        why = " ".join(str(e).split())[:200] or type(e).__name__
        raise UsageError(f"trainer.push_to_hub=true, and the hub refuses or cannot be reached ({why}); log in, or {instead}") from e


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
        raise UsageError(f"lora needs peft: {install_hint('peft')}, or lora=null") from e
    return config_of(LoraConfig, lora, "lora", task_type="CAUSAL_LM")


def finish(trainer: Any, folder: Path, s: Any = None, prompting: Prompting | None = None) -> None:
    """Write the trained model and its tokenizer. An adapter is kept in ``adapter`` beside, and ``folder`` has merged weights.

    All processes of a run call this: where weights are divided among them (FSDP, ZeRO-3), each sends its part.

    Args:
        trainer: one of TRL's.
        folder: the folder to write.
        s: settings of the script, with ``model``, ``dtype`` and ``trainer``; needed for an adapter alone.
        prompting: how the model was asked.
    """
    adapter = hasattr(trainer.accelerator.unwrap_model(trainer.model), "merge_and_unload")
    if trainer.is_fsdp_enabled:  # otherwise the trainer would write no weights
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    trainer.save_model(str(folder.parent / ADAPTER if adapter else folder))  # by all processes
    trainer.accelerator.wait_for_everyone()
    if trainer.is_world_process_zero():
        if adapter:
            _merge(trainer, folder.parent / ADAPTER, folder, s)
        trainer.processing_class.save_pretrained(folder)
        if prompting is not None:
            prompting.save(folder)


def _merge(trainer: Any, adapter: Path, folder: Path, s: Any) -> None:
    from kbx_env.train import merge

    trusts = bool(s.trainer.get("trust_remote_code", False))
    settings = merge.Settings(str(s.model), str(adapter), str(folder), weights_dtype(s), trusts)
    if trainer.accelerator.num_processes > 1:
        merge.merge_apart(settings)
    else:
        merge.run(settings)


def weights_dtype(s: Any) -> str:
    """Return the dtype in which a run's weights are loaded.

    Args:
        s: settings of the script, with ``dtype``, ``lora`` and ``trainer``.

    Returns:
        The setting, or by default float32; for an adapter on a GPU bfloat16.
    """
    given = s.dtype or (s.trainer.get("model_init_kwargs") or {}).get("dtype")
    return str(given or ("bfloat16" if s.lora is not None and not on_cpu(s.trainer) else "float32"))


def finish_from(trainer: Any, checkpoint: Path, folder: Path, s: Any, prompting: Prompting | None = None) -> None:
    """Write the trained model from a checkpoint of the last step, without training.

    Args:
        trainer: one of TRL's.
        checkpoint: the checkpoint.
        folder: the folder to write.
        s: settings of the script, with ``model``, ``lora``, ``dtype`` and ``trainer``.
        prompting: how the model was asked.

    Raises:
        UsageError: the checkpoint has no whole weights: it was written in parts (FSDP, ZeRO-3).
    """
    if not trainer.is_world_process_zero():
        return
    from kbx_env.train import models

    if not any(checkpoint.glob("*.safetensors")):
        raise UsageError(
            f"{checkpoint} has its weights in parts, one for each process; resume from an earlier checkpoint, or merge the parts: "
            "accelerate merge-weights (FSDP), zero_to_fp32.py (ZeRO-3)"
        )
    if s.lora is not None:
        _merge(trainer, checkpoint, folder, s)
    else:
        made, _ = models.load(checkpoint, dtype=weights_dtype(s), trust_remote_code=bool(s.trainer.get("trust_remote_code", False)))
        made.save_pretrained(folder)
    trainer.processing_class.save_pretrained(folder)
    if prompting is not None:
        prompting.save(folder)


def steps_of(trainer: Any) -> int:
    """Return the number of steps of a whole run. A trainer that resumes from its last step would do one more."""
    if trainer.args.max_steps > 0:
        return int(trainer.args.max_steps)
    each = math.ceil(len(trainer.get_train_dataloader()) / trainer.args.gradient_accumulation_steps)
    return math.ceil(trainer.args.num_train_epochs * max(1, each))


def train(trainer: Any, checkpoint: Path | None, s: Any, prompting: Prompting | None = None) -> None:
    """Train and write ``out/final``; from a checkpoint of the last step only write it.

    Args:
        trainer: one of TRL's.
        checkpoint: the checkpoint to resume from; ``None`` to start from the beginning.
        s: settings of the script, with ``out``, ``model``, ``lora``, ``dtype`` and ``trainer``.
        prompting: how the model is asked; kept with the trained model.
    """
    out = Path(s.out)
    if checkpoint is not None and step_of(checkpoint) >= steps_of(trainer):
        print(f"{checkpoint} is at the end of training; only {out / FINAL} is written")
        finish_from(trainer, checkpoint, out / FINAL, s, prompting)
    else:
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        finish(trainer, out / FINAL, s, prompting)
    if trainer.is_world_process_zero():
        print(f"checkpoint: {out / FINAL}\nlog: {out / 'log.jsonl'}")
