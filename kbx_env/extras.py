"""The command that installs the packages of an extra, for messages about a missing package.

Every message names an extra by ``install_hint``: kbx_env is in no package index, so a clone and an installed
distribution need different commands.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

Extra = Literal[
    "client", "deepspeed", "dev", "docs", "llm", "model-server", "openenv", "parquet", "peft", "quantize", "report", "rllib",
    "serve", "skyrl", "trl", "verifiers", "verl", "wandb",
]  # fmt: skip
"""The extras of ``pyproject.toml``."""


def install_hint(*extras: Extra, package: Path = Path(__file__).resolve().parent) -> str:
    """Return the shell command that installs extras.

    Args:
        extras: at least one.
        package: the folder ``kbx_env``, as it is imported.

    Returns:
        ``pip install -e "CLONE[a,b]"`` in a clone, with ``.`` for the working folder; ``pip install "kbx_env[a,b]"`` for an
        installed distribution. pip then finds kbx_env installed, and fetches only the packages of the extras.

    Raises:
        ValueError: none, or an unknown one, is named: a mistake of the caller, no user's.
    """
    if not extras or not set(extras) <= set(get_args(Extra)):
        raise ValueError(f"extras are {extras}; name some of {', '.join(get_args(Extra))}")
    root = package.parent
    if not ((root / "pyproject.toml").is_file() and (root / "tasks").is_dir()):
        return f'pip install "kbx_env[{",".join(extras)}]"'
    return f'pip install -e "{"." if root == Path.cwd() else root}[{",".join(extras)}]"'
