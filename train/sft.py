"""Supervised fine-tuning on demonstrations, before reinforcement learning: the model learns the format of an answer.

    python train/sft.py train/configs/sft.yaml model=CHECKPOINT data=runs/data/demonstrations.parquet out=runs/sft
    python train/sft.py runs/sft/settings.yaml resume=last

The loss is on completions only. ``out/final`` is a checkpoint with tokenizer and chat template, for
``eval/report.py --policy hf:out/final``; ``out/log.jsonl`` has a line for every logged step.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kbx_env.baselines.llm.conversation import Prompting
from kbx_env.train import memory, models, rows
from kbx_env.train.runs import adapter_of, check_hub, checkpoint_of, on_cpu, train, trainer_config, weights_dtype
from kbx_env.train.settings import MISSING, command, save

from kbx_env.errors import UsageError
from kbx_env.extras import install_hint
from kbx_env.spec.catalog import splits

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass
class Settings:
    """Settings of this script."""

    model: str = MISSING
    """Folder of the checkpoint to start from; nothing is fetched from a hub."""
    data: str = MISSING
    """Demonstrations, as train/data.py writes them: a .parquet or .jsonl file, or a folder."""
    out: str = MISSING
    """Folder for checkpoints, log and result; must be new or empty unless resume is given."""
    tasks: str = "*"
    """Glob over task ids, comma-separated: demonstrations of other tasks are left out."""
    category: str | None = None
    """Demonstrations of one category only."""
    curriculum: bool = False
    """Easy tasks first, in this order in every epoch; otherwise shuffled."""
    max_length: int | None = None
    """Tokens of prompt and completion together; null: the model's context. Longer demonstrations are dropped, never cut."""
    dtype: str | None = None
    """Dtype of the weights: float32 or bfloat16. null: float32, and for LoRA on a GPU bfloat16."""
    lora: dict[str, Any] | None = None
    """Fields of peft.LoraConfig, such as {r: 16, lora_alpha: 32}; null: all weights are trained."""
    quantize: str | None = None
    """Quantise the frozen weights under a LoRA adapter (QLoRA): 4bit or 8bit; null: do not."""
    memory_check: bool = True
    """Refuse a model that cannot fit on the GPU before it is loaded."""
    system: str | None = None
    """A system message before every task; give the same to train/grpo.py. The trained checkpoint keeps it for reports."""
    template: str | None = None
    """File of a chat template (Jinja) to use in place of the checkpoint's own."""
    resume: str | None = None
    """A checkpoint folder of an earlier run to continue, or last: the newest complete one in out, if there is any."""
    wandb: bool = False
    """Mirror the log to Weights & Biases; without an account it stays in out/wandb."""
    seed: int = 0
    """Seed of shuffling, dropout and new weights."""
    trainer: dict[str, Any] = field(default_factory=dict)
    """Fields of trl.SFTConfig, unchanged: learning_rate, num_train_epochs, per_device_train_batch_size, save_steps, ..."""


def trainer_of(s: Settings) -> Any:
    """Return the trainer of a run, after all checks and before any step.

    Args:
        s: the settings.

    Returns:
        A ``trl.SFTTrainer``.

    Raises:
        UsageError: settings, model or data that cannot be used.
    """
    data = rows.only(rows.load(s.data), category=s.category, pattern=s.tasks)
    _check_columns(s.data, data)
    models.check_quantised(s.quantize, s.lora is not None, on_cpu(s.trainer))
    # Made before the model is loaded, so that settings which the libraries refuse are reported at once.
    config = _config(s)
    adapter = _adapter(s)
    model, tokenizer = _model(s, config)
    if s.system is not None:
        data = data.map(lambda row: {"prompt": [{"role": "system", "content": s.system}, *row["prompt"]]})
    context = models.context_of(model)
    if s.max_length is not None and context is not None and s.max_length > context:
        raise UsageError(f"max_length is {s.max_length}; {s.model} takes {context} tokens")
    longest = s.max_length or context
    fits = fitting(data, tokenizer, longest)
    if len(fits) < len(data):
        print(f"dropped {len(data) - len(fits)} of {len(data)} demonstrations: longer than {longest} tokens")
    if not len(fits):
        raise UsageError(f"all {len(data)} demonstrations are longer than {longest} tokens; raise max_length or choose others")
    if s.curriculum:
        fits = rows.by_difficulty(fits)
    config.max_length = None  # nothing has to be cut: rows that do not fit are dropped
    if config.packing:
        config.max_length = longest
    from kbx_env.train.logs import JsonlLog
    from trl import SFTTrainer

    try:
        return SFTTrainer(
            model=model, args=config, train_dataset=fits.select_columns(["prompt", "completion"]), processing_class=tokenizer,
            peft_config=adapter, callbacks=[JsonlLog(s.out)],
        )  # fmt: skip
    except ValueError as e:
        raise UsageError(f"the trainer refuses these settings: {str(e)[:600]}") from e


def fitting(data: Dataset, tokenizer: Any, longest: int | None) -> Dataset:
    """Return the rows whose prompt and completion fit.

    Args:
        data: rows with ``prompt`` and ``completion``.
        tokenizer: has the chat template.
        longest: tokens of prompt and completion together; ``None`` for no limit.

    Returns:
        The rows.
    """
    if longest is None:
        return data
    keep = []
    for begin in range(0, len(data), 1000):  # a thousand rows a call: each call of the tokenizer is slow
        some = data[begin : begin + 1000]
        both = zip(some["prompt"], some["completion"], strict=True)
        texts = [tokenizer.apply_chat_template(prompt + completion, tokenize=False) for prompt, completion in both]
        for k, ids in enumerate(tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"], begin):
            if len(ids) <= longest:
                keep.append(k)
    return data if len(keep) == len(data) else data.select(keep)


def run(s: Settings) -> None:
    """Train and write ``out/final``."""
    out, checkpoint = Path(s.out), checkpoint_of(s.out, s.resume)
    trainer = trainer_of(s)
    if trainer.is_world_process_zero():
        save(s, out)
    train(trainer, checkpoint, s, Prompting(s.system))


def _check_columns(path: str, data: Dataset) -> None:
    for column in ("prompt", "completion"):
        if column not in data.column_names:
            raise UsageError(f"{path} holds no demonstrations: no column {column!r}; make them with train/data.py")
    for number, task in enumerate(data["task"], 1):
        if splits()[task] != "train":
            raise UsageError(f"{path}: row {number} is of {task}, a task of the eval split; it would spoil every report")


def _config(s: Settings) -> Any:
    try:
        from trl import SFTConfig
    except ImportError as e:
        raise UsageError(f"training needs TRL: {install_hint('trl')}") from e
    from kbx_env.train.logs import mirrors

    ours = {"output_dir": s.out, "report_to": mirrors(s.wandb, s.out), "seed": s.seed, "completion_only_loss": True,
            "max_length": s.max_length}  # fmt: skip
    if s.curriculum:
        ours["train_sampling_strategy"] = "sequential"
    config = trainer_config(SFTConfig, s.trainer, **ours)
    check_hub(config)
    return config


def _model(s: Settings, config: Any) -> tuple[Any, Any]:
    """Load model and tokenizer, after the check of memory."""
    init, dtype = models.init_of(config, s.dtype, weights_dtype(s))
    sharding = memory.sharding_of(config)
    if warning := memory.still(dtype, s.lora is not None, float(config.learning_rate), sharding):
        print(f"warning: {warning}")
    if s.memory_check and not on_cpu(s.trainer):
        import torch

        free, _ = torch.cuda.mem_get_info(int(os.environ.get("LOCAL_RANK", "0")))
        optimizer = str(getattr(config.optim, "value", config.optim))
        memory.check(s.model, dtype, s.lora is not None, False, free, optimizer=optimizer, sharding=sharding, quantize=s.quantize)
    trusts = bool(config.trust_remote_code)
    return models.load(s.model, dtype=dtype, quantize=s.quantize, trust_remote_code=trusts, template=s.template, init=init)


def _adapter(s: Settings) -> Any:
    return adapter_of(s.lora)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; exit status 0 when trained, 2 on bad usage, 130 when interrupted: continue with ``resume=last``."""
    return command("sft.py", Settings, __doc__, run, argv)


if __name__ == "__main__":
    sys.exit(main())
