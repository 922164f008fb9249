"""The scripts of ``eval/`` and ``train/`` as commands: ``kbx report``, ``kbx check-report``, ``kbx export``,
``kbx eval NAME`` and ``kbx train NAME``.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from kbx_env.errors import UnknownName

FOLDERS = ("eval", "train")
"""Commands that run a script of the folder of the same name."""
DIRECT = ("report", "check-report", "export")
"""Scripts of ``eval/`` that are commands themselves."""
COMMANDS = (*DIRECT, *FOLDERS)
"""The commands of this module."""


def add_parsers(sub: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands to the help of ``kbx``; ``run`` reads their arguments.

    Args:
        sub: the commands of ``kbx``.
    """
    sub.add_parser("report", help="grade policies and write a report (eval/report.py)", add_help=False)
    sub.add_parser("check-report", help="grade a sample of a report again (eval/check_report.py)", add_help=False)
    sub.add_parser("export", help="write the benchmark as a Hugging Face dataset (eval/export.py)", add_help=False)
    sub.add_parser("eval", help="run a script of eval/, such as leaderboard, zoo or throughput", add_help=False)
    sub.add_parser("train", help="run a script of train/, such as grpo, sft, ppo or data", add_help=False)


def scripts(folder: str) -> dict[str, str]:
    """Find the scripts of a folder.

    Args:
        folder: ``eval`` or ``train``.

    Returns:
        By name, with hyphens for underscores, the first sentence of each; nothing is imported.
    """
    found = {}
    for path in sorted(Path(next(iter(importlib.import_module(f"kbx_env.{folder}").__path__))).glob("*.py")):
        module = ast.parse(path.read_text())
        if any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in module.body):
            found[path.stem.replace("_", "-")] = (ast.get_docstring(module) or "").split("\n\n")[0].replace("\n", " ")
    return found


def run(argv: Sequence[str]) -> int:
    """Run a command of ``COMMANDS``.

    Args:
        argv: the command and its arguments.

    Returns:
        The exit status of the script; 0 for a list of scripts, and 2 where none was named.

    Raises:
        UnknownName: no such script.
    """
    folder, *rest = argv
    name = folder
    if folder in DIRECT:
        folder = "eval"
    else:
        known = scripts(folder)
        if not rest or rest[0] in ("-h", "--help"):
            print(f"usage: kbx {folder} NAME ...    (kbx {folder} NAME --help says more)\n", file=sys.stderr if not rest else None)
            for script, about in known.items():
                print(f"  {script:18s} {about[:100]}", file=sys.stderr if not rest else None)
            return 0 if rest else 2
        name, *rest = rest
        name = name.removesuffix(".py").replace("_", "-")
        if name not in known:
            raise UnknownName(f"script of {folder}", name, known)
    module = importlib.import_module(f"kbx_env.{folder}.{name.replace('-', '_')}")
    before, sys.argv = sys.argv, [f"kbx {argv[0]}" if argv[0] in DIRECT else f"kbx {folder} {name}", *rest]
    try:
        return int(module.main() or 0)
    finally:
        sys.argv = before
