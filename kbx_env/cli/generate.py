"""The command ``kbx generate``."""

from __future__ import annotations

import argparse


def add_parser(sub: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to a parser."""


def command(a: argparse.Namespace) -> int:
    """Run ``generate``.

    Args:
        a: the parsed arguments.

    Returns:
        The exit status, 0.
    """
    return 0
