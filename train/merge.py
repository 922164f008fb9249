"""Merge a LoRA adapter into the model that it was trained on, on the CPU.

    python train/merge.py model=CHECKPOINT adapter=runs/grpo/adapter out=runs/grpo/final

The weights are merged in float32 and written in the dtype of the settings. ``train/grpo.py`` and ``train/sft.py`` do this at the
end of a run; the processes of a distributed run leave it to this script, which holds the model once and whole.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kbx_env.train import models
from kbx_env.train.settings import MISSING, command

from kbx_env.errors import UsageError
from kbx_env.extras import install_hint

_DISTRIBUTED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")
_PREFIXES = ("ACCELERATE_", "FSDP_", "TORCHELASTIC_", "PARALLELISM_CONFIG_")


@dataclass
class Settings:
    """Settings of this script."""

    model: str = MISSING
    """Folder of the checkpoint that the adapter was trained on."""
    adapter: str = MISSING
    """Folder of the adapter."""
    out: str = MISSING
    """Folder for the merged model."""
    dtype: str = "float32"
    """Dtype of the weights that are written: float32, bfloat16 or float16."""
    trust_remote_code: bool = False
    """Run Python code of the checkpoint."""


def run(s: Settings) -> None:
    """Merge and write the model; the tokenizer of the checkpoint is written beside it.

    Args:
        s: the settings.

    Raises:
        UsageError: peft is not installed, or a folder cannot be loaded.
    """
    try:
        from peft import PeftModel
    except ImportError as e:
        raise UsageError(f"an adapter needs peft: {install_hint('peft')}") from e
    import torch

    if s.dtype not in models.DTYPES:
        raise UsageError(f"dtype is {s.dtype!r}; one of {', '.join(models.DTYPES)}")
    base, tokenizer = models.load(s.model, dtype="float32", trust_remote_code=s.trust_remote_code)
    try:
        merged = PeftModel.from_pretrained(base, s.adapter).merge_and_unload()
    except (OSError, ValueError, RuntimeError) as e:
        raise UsageError(f"{s.adapter} cannot be merged into {s.model}: {type(e).__name__}: {str(e)[:300]}") from e
    merged.to(getattr(torch, s.dtype)).save_pretrained(s.out)
    tokenizer.save_pretrained(s.out)


def merge_apart(s: Settings) -> None:
    """Merge in a process of its own, outside of a distributed run and without a GPU.

    Args:
        s: the settings.

    Raises:
        UsageError: the process failed.
    """
    env = {k: v for k, v in os.environ.items() if k not in _DISTRIBUTED and not k.startswith(_PREFIXES)}
    env["CUDA_VISIBLE_DEVICES"] = ""
    given = [f"{name}={value}" for name, value in vars(s).items()]
    done = subprocess.run([sys.executable, str(Path(__file__).resolve()), *given], env=env, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UsageError(f"the adapter in {s.adapter} is whole, but was not merged: {last[:300]}; try again with train/merge.py")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; exit status 0 when merged, 2 on bad usage, 130 when interrupted."""
    return command("merge.py", Settings, __doc__, run, argv)


if __name__ == "__main__":
    sys.exit(main())
