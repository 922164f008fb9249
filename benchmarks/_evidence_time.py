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
SHARES = {"sft": 0.12, "grpo": 0.30, "shaping": 0.20, "report": 0.23, "ppo": 0.15}
"""Of the time; what a step leaves is shared out among those after it, and so is the share of a step that is not asked for."""
GRACE = 20.0
"""Seconds between SIGINT and SIGKILL at most; a step's deadline leaves room for it."""
HURRY = 5.0
"""Seconds that children have to write what they have when this script itself is stopped."""


class Budget:
    """Shares out what is left of the time among the steps that are left."""

    def __init__(self, seconds: float, steps: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._left = clock, list(steps)
        self._began, self._end = clock(), clock() + seconds

    @property
    def elapsed(self) -> float:
        """Seconds so far."""
        return self._clock() - self._began

    def take(self, step: str, seconds: float | None = None) -> float:
        """Seconds of a step that begins now: its share, or as many as are asked for and left."""
        left, whole = max(0.0, self._end - self._clock()), sum(SHARES[s] for s in self._left)
        self._left.remove(step)
        return left * SHARES[step] / whole if seconds is None else min(seconds, left)


@dataclasses.dataclass
class Ended:
    """How a command ended; ``stopped``: by us, out of time."""

    status: int
    seconds: float
    stopped: bool
    tail: str


def together(
    commands: Mapping[str, Sequence[str]], seconds: float, folder: Path, *, said: Callable[[], str] = lambda: "",
    heard: Callable[[str, Ended], None] = lambda name, end: None, grace: float = GRACE, every: float = 15.0,
    env: Mapping[str, str] | None = None, gpus: Sequence[str] = (),
) -> dict[str, Ended]:  # fmt: skip
    """Run commands side by side until their time is over. None outlives the call, however it ends.

    Args:
        commands: by name.
        seconds: for all of them; ``grace`` is taken off for the end.
        folder: for what they print.
        said: how far they are, asked ``every`` so many seconds.
        heard: told how each ended, also where this call is interrupted.
        grace: seconds after SIGINT.
        every: see ``said``.
        env: beside ours.
        gpus: of several each command sees one, in turn.
    """
    began, children, ended, stopped = time.monotonic(), dict[str, subprocess.Popen[bytes]](), dict[str, Ended](), set[str]()
    soft = began + max(seconds - min(grace, seconds / 4), 0.0)
    folder.mkdir(parents=True, exist_ok=True)

    def over(name: str) -> None:
        text = (folder / f"{name}.txt").read_text(errors="replace")
        took = round(time.monotonic() - began, 1)
        ended[name] = Ended(children[name].returncode, took, name in stopped, text[-2000:])
        heard(name, ended[name])

    def stop(name: str) -> None:
        stopped.add(name)
        children[name].send_signal(signal.SIGINT)

    try:
        for k, (name, command) in enumerate(commands.items()):
            mine = {"CUDA_VISIBLE_DEVICES": gpus[k % len(gpus)]} if len(gpus) > 1 else {}
            with (folder / f"{name}.txt").open("ab") as file:
                children[name] = subprocess.Popen(
                    command, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
                    env={**os.environ, **(env or {}), **mine}, cwd=ROOT,
                )  # fmt: skip
        told = began
        while len(ended) < len(children):
            now = time.monotonic()
            for name, child in children.items():
                if name not in ended and child.poll() is not None:
                    over(name)
                elif name not in ended and now > soft and name not in stopped:
                    stop(name)
                    say(f"{name}: out of time, SIGINT after {now - began:.0f} s")
                elif name not in ended and now > soft + grace:
                    _kill(child)
            if now - told > every:
                told = now
                say(said())
            time.sleep(0.1)
    except BaseException:
        for name in children.keys() - ended.keys() - stopped:
            stop(name)
        end = time.monotonic() + HURRY
        with contextlib.suppress(Exception, KeyboardInterrupt):
            said()  # writes what there is before we wait: who stops us may not wait for us
        while time.monotonic() < end and any(c.poll() is None for c in children.values()):
            time.sleep(0.1)
        raise
    finally:
        for name, child in children.items():
            _kill(child)  # what it started too
            if name not in ended:
                over(name)
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
