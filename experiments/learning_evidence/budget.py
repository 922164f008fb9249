"""Time of `train_evidence.py`: each step's share of the minutes, and commands that end in time."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""The repository."""
SHARES = {"sft": 0.12, "grpo": 0.30, "shaping": 0.20, "report": 0.23, "ppo": 0.15}
"""Share of the time by step. The time that a step leaves, or that of a step which does not run, is divided among later steps."""
GRACE = 20.0
"""Seconds between SIGINT and SIGKILL at most; they are part of a step's time."""
HURRY = 5.0
"""Seconds that children have to write their results when this script itself is stopped."""


class Budget:
    """Divides the remaining time among the remaining steps."""

    def __init__(self, seconds: float, steps: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        """Start the time.

        Args:
            seconds: time of all steps.
            steps: keys of ``SHARES``.
            clock: returns seconds.
        """
        self._clock, self._left = clock, list(steps)
        self._began, self._end = clock(), clock() + seconds

    @property
    def elapsed(self) -> float:
        """Seconds so far."""
        return self._clock() - self._began

    def take(self, step: str, seconds: float | None = None) -> float:
        """Return the seconds of a step that begins now.

        Args:
            step: the step, which is then no longer remaining.
            seconds: at most so many; by default its share of the remaining time.

        Returns:
            Seconds.
        """
        left, shares = max(0.0, self._end - self._clock()), sum(SHARES[s] for s in self._left)
        self._left.remove(step)
        return left * SHARES[step] / shares if seconds is None else min(seconds, left)


@dataclasses.dataclass
class Ended:
    """How a command ended."""

    status: int
    seconds: float
    stopped: bool
    """It was stopped because its time was over."""
    tail: str
    """The last 2000 characters of its output."""


def together(
    commands: Mapping[str, Sequence[str]], seconds: float, folder: Path, *, progress: Callable[[], str] = lambda: "",
    on_end: Callable[[str, Ended], None] = lambda name, end: None, grace: float = GRACE, every: float = 15.0,
    env: Mapping[str, str] | None = None, gpus: Sequence[str] = (),
) -> dict[str, Ended]:  # fmt: skip
    """Run commands side by side until their time is over. None outlives the call, however it ends.

    Args:
        commands: the commands, by name.
        seconds: time of all of them; ``grace`` is part of it.
        folder: folder for their output.
        progress: returns their progress as text, called every ``every`` seconds.
        on_end: called when a command has ended, also where this call is interrupted.
        grace: seconds between SIGINT and SIGKILL.
        every: see ``progress``.
        env: environment variables in addition to ours.
        gpus: names of GPUs; of several each command sees one, in turn.

    Returns:
        How each command ended, by name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    children = _Children(folder, on_end)
    soft = children.began + max(seconds - min(grace, seconds / 4), 0.0)
    try:
        for k, (name, command) in enumerate(commands.items()):
            gpu = {"CUDA_VISIBLE_DEVICES": gpus[k % len(gpus)]} if len(gpus) > 1 else {}
            children.start(name, command, {**os.environ, **(env or {}), **gpu})
        reported = children.began
        while children.running:
            children.poll(soft, grace)
            if (now := time.monotonic()) - reported > every:
                reported = now
                say(progress())
            time.sleep(0.1)
    except BaseException:
        children.interrupt()
        end = time.monotonic() + HURRY
        with contextlib.suppress(Exception, KeyboardInterrupt):
            progress()  # writes the results so far before we wait: our own parent may not wait for us
        while time.monotonic() < end and children.alive:
            time.sleep(0.1)
        raise
    finally:
        children.close()
    return children.ended


class _Children:
    """Commands that run side by side."""

    def __init__(self, folder: Path, on_end: Callable[[str, Ended], None]) -> None:
        self.began, self._folder, self._on_end = time.monotonic(), folder, on_end
        self._of, self.ended, self._stopped = dict[str, subprocess.Popen[bytes]](), dict[str, Ended](), set[str]()

    @property
    def running(self) -> bool:
        """Whether the end of a command is still to be recorded."""
        return len(self.ended) < len(self._of)

    @property
    def alive(self) -> bool:
        """Whether a command has not exited."""
        return any(child.poll() is None for child in self._of.values())

    def start(self, name: str, command: Sequence[str], env: Mapping[str, str]) -> None:
        with (self._folder / f"{name}.txt").open("ab") as file:
            self._of[name] = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True, env=env, cwd=ROOT
            )

    def poll(self, soft: float, grace: float) -> None:
        """Record the commands that have ended; stop the others at ``soft``, kill them ``grace`` seconds later."""
        now = time.monotonic()
        for name, child in self._of.items():
            if name in self.ended:
                continue
            if child.poll() is not None:
                self._record(name)
            elif now > soft and name not in self._stopped:
                self._stop(name)
                say(f"{name}: out of time, SIGINT after {now - self.began:.0f} s")
            elif now > soft + grace:
                _kill(child)

    def interrupt(self) -> None:
        """Send SIGINT to all that run and have not been stopped."""
        for name in self._of.keys() - self.ended.keys() - self._stopped:
            self._stop(name)

    def close(self) -> None:
        """Kill everything that the commands have started, and record their ends."""
        for name, child in self._of.items():
            _kill(child)
            if name not in self.ended:
                self._record(name)

    def _record(self, name: str) -> None:
        text = (self._folder / f"{name}.txt").read_text(errors="replace")
        took = round(time.monotonic() - self.began, 1)
        self.ended[name] = Ended(self._of[name].returncode, took, name in self._stopped, text[-2000:])
        self._on_end(name, self.ended[name])

    def _stop(self, name: str) -> None:
        self._stopped.add(name)
        self._of[name].send_signal(signal.SIGINT)


def _kill(child: subprocess.Popen[bytes]) -> None:
    """Kill a command and the processes of its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


_BEGAN = time.monotonic()


def say(text: str) -> None:
    """Print a line with the seconds so far; an empty text prints nothing."""
    if text:
        print(f"[{time.monotonic() - _BEGAN:6.1f} s] {text}", flush=True)
