"""Shows the progress of asking policies: answers, calls of the model, tokens, cost, and the last error of its server."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

EVERY = 30.0
"""Seconds between two lines where the output is no terminal, which shows no bars."""


class _Status(ProgressColumn):
    """Shows the status of a policy's calls, and asks for it at every refresh: an answer may take minutes."""

    def render(self, task: Task) -> Text:
        """Return the status; empty for a policy that asks no model."""
        status = task.fields["status"]
        return Text(status() if status else "", style="dim")


class AskingProgress:
    """Bars with one line for each policy; plain lines now and then where the output is no terminal."""

    def __init__(self, progress: Progress, bars: Mapping[str, TaskID]) -> None:
        """Show bars.

        Args:
            progress: the bars.
            bars: by policy.
        """
        self._progress, self._bars = progress, bars

    def advance(self, policy: str) -> None:
        """Count one more graded answer of a policy."""
        self._progress.advance(self._bars[policy])

    def lines(self) -> list[str]:
        """Return a line for each policy that has not ended: graded answers of all answers, and the status of its calls."""
        found = []
        for bar in self._progress.tasks:
            if not bar.finished:
                status = bar.fields["status"]
                more = f"; {status()}" if status else ""
                found.append(f"{bar.description}: {bar.completed:.0f} of {bar.total:.0f} answers graded{more}")
        return found


@contextlib.contextmanager
def asking(
    policies: Mapping[str, tuple[int, Callable[[], str] | None]], console: Console, every: float = EVERY
) -> Iterator[AskingProgress]:  # fmt: skip
    """Show the progress of asking policies.

    Args:
        policies: by name: number of answers, and a function that describes the calls of its model; ``None`` without a model.
        console: where.
        every: seconds between two lines where the console is no terminal.

    Yields:
        The progress.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), _Status())
    ended = threading.Event()
    with Progress(*columns, console=console) as progress:
        bars = {name: progress.add_task(name, total=total, status=status) for name, (total, status) in policies.items()}
        shown = AskingProgress(progress, bars)

        def print_lines() -> None:
            while not ended.wait(every):
                for line in shown.lines():
                    console.print(line, markup=False, highlight=False, soft_wrap=True)

        if not console.is_terminal:
            threading.Thread(target=print_lines, name="progress lines", daemon=True).start()
        try:
            yield shown
        finally:
            ended.set()
