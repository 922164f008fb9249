"""The command ``kbx generate --count N --seed S --out DIR``."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from kbx_env.errors import UsageError


def add_parser(sub: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to a parser."""
    p = sub.add_parser("generate", help="write a task pack of new tasks, each proven by a kernel that is graded correct")
    p.add_argument("--count", type=int, required=True, help="number of tasks")
    p.add_argument("--seed", type=int, required=True, help="equal seeds give equal packs")
    p.add_argument("--out", required=True, metavar="DIR", help="folder of the pack; an interrupted run goes on there")
    p.add_argument("--difficulty", default="1..5", metavar="LOW..HIGH", help="difficulties, such as 2 or 1..3 (default: 1..5)")
    p.add_argument("--families", default="", metavar="NAME[,NAME]", help="families of tasks (default: all)")
    p.add_argument("--name", default="", help="name of the pack (default: gSEED)")
    p.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes that prove tasks (default: the cores)")


def _levels(text: str) -> tuple[int, ...]:
    """Return the difficulties that a text names."""
    low, _, high = text.partition("..")
    try:
        found = tuple(range(int(low), int(high or low) + 1))
    except ValueError:
        found = ()
    if not found:
        raise UsageError(f"--difficulty {text!r}; a number from 1 to 5, or two: 1..3")
    return found


def command(a: argparse.Namespace) -> int:
    """Run ``generate``.

    Args:
        a: the parsed arguments.

    Returns:
        The exit status, 0.
    """
    from rich.console import Console
    from rich.progress import Progress, TimeElapsedColumn

    from kbx_env.generate import build

    families = tuple(f.strip() for f in a.families.split(",") if f.strip())
    name = a.name or f"g{abs(a.seed)}"
    settings = build.Settings(a.count, a.seed, _levels(a.difficulty), families, name)
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=Console(stderr=True)) as bar:
        row = bar.add_task("proven", total=a.count)

        def tell(proven: int, count: int, dropped: int) -> None:
            bar.update(row, completed=proven, description=f"proven ({dropped} dropped)")

        result = build.build(settings, Path(a.out), a.workers, tell)
    print(build.summary(result.card))
    print(f"{result.seconds:.0f} s; next: python -m kbx_env tasks --tasks-from {a.out}")
    return 0
