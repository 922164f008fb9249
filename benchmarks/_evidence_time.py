"""Time for `train_evidence.py`: its shares, and commands that end when theirs is over."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHARES = {"sft": 0.13, "grpo": 0.39, "report": 0.30, "ppo": 0.18}
"""Of the time; what a step leaves is shared out among those after it, and so is the share of a step that is not asked for."""
GRACE = 20.0
"""Seconds between SIGINT and SIGKILL at most; a step's deadline leaves room for it."""


class Budget:
    """Shares out what is left of the time among the steps that are left."""

    def __init__(self, seconds: float, steps: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._left = clock, list(steps)
        self._began, self._end = clock(), clock() + seconds

    @property
    def elapsed(self) -> float:
        """Seconds so far."""
        return self._clock() - self._began

    def take(self, step: str) -> float:
        """Seconds of a step that begins now."""
        whole = sum(SHARES[s] for s in self._left)
        self._left.remove(step)
        return max(0.0, (self._end - self._clock()) * SHARES[step] / whole)


@dataclasses.dataclass
class Ended:
    """How a command ended; ``stopped``: by us, out of time."""

    status: int
    seconds: float
    stopped: bool
    tail: str


def together(
    commands: Mapping[str, Sequence[str]], seconds: float, folder: Path, *, said: Callable[[], str] = lambda: "",
    grace: float = GRACE, every: float = 15.0, env: Mapping[str, str] | None = None,
) -> dict[str, Ended]:  # fmt: skip
    """Run commands side by side until their time is over.

    Args:
        commands: by name.
        seconds: for all of them; ``grace`` is taken off for the end.
        folder: for what they print.
        said: how far they are, asked ``every`` so many seconds.
        grace: seconds after SIGINT.
        every: see ``said``.
        env: beside ours.
    """
    began, children, ended = time.monotonic(), {}, dict[str, Ended]()
    soft = began + max(seconds - min(grace, seconds / 4), 0.0)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        for name, command in commands.items():
            with (folder / f"{name}.txt").open("ab") as file:
                children[name] = subprocess.Popen(
                    command, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
                    env={**os.environ, **(env or {})}, cwd=ROOT,
                )  # fmt: skip
        told, stopped = began, set[str]()
        while len(ended) < len(children):
            now = time.monotonic()
            for name, child in children.items():
                if name not in ended and child.poll() is not None:
                    text = (folder / f"{name}.txt").read_text(errors="replace")
                    ended[name] = Ended(child.returncode, round(now - began, 1), name in stopped, text[-2000:])
                elif name not in ended and now > soft and name not in stopped:
                    stopped.add(name)
                    child.send_signal(signal.SIGINT)
                    say(f"{name}: out of time, SIGINT after {now - began:.0f} s")
                elif name not in ended and now > soft + grace:
                    _kill(child)
            if now - told > every:
                told = now
                say(said())
            time.sleep(0.1)
    finally:
        for child in children.values():
            _kill(child)  # what it started too
    return ended


def _kill(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


_BEGAN = time.monotonic()


def say(text: str) -> None:
    """Print a line with the seconds so far; nothing for an empty one."""
    if text:
        print(f"[{time.monotonic() - _BEGAN:6.1f} s] {text}", flush=True)
