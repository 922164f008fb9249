"""Measures on which processes a run spends processor time: graders, runners, engines, compilers."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from kbx_env.eval.soak import below

SAMPLE_SECONDS = 0.1
"""Between two looks, each of which takes milliseconds. What a process computes after the last look at it is not seen, and many
live for less than a second."""
ROLES = {
    "kbx-runner": "runner", "kbx-engine": "engine", "kbx-compiler": "compiler to TTIR", "kbx-closed": "zygote",
}  # fmt: skip
"""By the name that ``kbx_env.sandbox.zygote`` gives a process."""
PROGRAMS = "programs of runners"
"""Role of what runners start: ptxas, mostly."""


@dataclass(frozen=True)
class Usage:
    """What the system says of a process.

    Attributes:
        name: its name, at most 15 characters.
        parent: id of its parent.
        own: processor seconds of its threads.
        system: of these, seconds in the system: page faults, forks, drivers.
        faults: pages that the system gave it or copied for it, without reading a disk.
        programs: processor seconds of the processes that it has started and that have ended.
        began: when it started, in ticks since the machine did; tells two processes of one id apart.
    """

    name: str
    parent: int
    own: float
    system: float
    faults: int
    programs: float
    began: int

    @classmethod
    def read(cls, text: str) -> Usage:
        """Read a process's usage.

        Args:
            text: of ``/proc/PID/stat``, as proc(5) describes it.

        Returns:
            The usage.
        """
        head, _, rest = text.rpartition(")")
        fields = rest.split()
        tick = os.sysconf("SC_CLK_TCK")
        user, system, of_user, of_system = (int(x) / tick for x in fields[11:15])
        name, parent, faults, began = head.partition("(")[2], int(fields[1]), int(fields[7]), int(fields[19])
        return cls(name, parent, user + system, system, faults, of_user + of_system, began)


def usages() -> dict[int, Usage]:
    """Return the usage of this process and all its descendants, by process id, parents first; empty without ``/proc``."""
    found: dict[int, Usage] = {}
    with contextlib.suppress(FileNotFoundError):
        for pid in below(os.getpid()):
            with contextlib.suppress(OSError):  # it has ended
                found[pid] = Usage.read(Path(f"/proc/{pid}/stat").read_text())
    return found


def role_of(pid: int, name: str, command: str) -> str:
    """Return what a process does.

    Args:
        pid: its id.
        name: its name.
        command: its command line.

    Returns:
        A value of ``ROLES``, ``parent`` for this process, ``grader`` for workers and the process that forks them, ``zygote``, or
        ``other``.
    """
    if pid == os.getpid():
        return "parent"
    if name in ROLES:
        return ROLES[name]
    if "kbx_env.sandbox.zygote" in command:
        return "zygote"
    return "grader" if "kbx_env.executor.pools" in command else "other"


class CpuWatch:
    """Samples this process and its descendants, once, from ``start`` to ``stop``. Programs of runners are seen once they end.

    Attributes:
        own_seconds: processor seconds of the sampling itself, after ``stop``; they count for ``parent``.
    """

    def __init__(self) -> None:
        self.own_seconds = 0.0
        self._first: dict[tuple[int, int], Usage] = {}
        self._last: dict[tuple[int, int], tuple[str, Usage]] = {}
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin: what was computed before does not count."""
        self._first = {(pid, u.began): u for pid, u in usages().items()}
        self._thread = threading.Thread(target=self._watch, name="cpu-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End. Does nothing before ``start``."""
        if self._thread is not None:
            self._over.set()
            self._thread.join()
            began = time.thread_time()
            self._look()
            self.own_seconds += time.thread_time() - began

    def _watch(self) -> None:
        while not self._over.wait(SAMPLE_SECONDS):
            self._look()
        self.own_seconds = time.thread_time()

    def _look(self) -> None:
        found, roles = usages(), dict[int, str]()
        for pid, usage in found.items():  # parents come first
            if roles.get(usage.parent) in ("runner", PROGRAMS):
                roles[pid] = PROGRAMS  # the runner's own entry has its time
                continue
            with contextlib.suppress(OSError):
                line = b"" if usage.name in ROLES else Path(f"/proc/{pid}/cmdline").read_bytes()
                roles[pid] = role_of(pid, usage.name, line.replace(b"\0", b" ").decode(errors="replace"))
                self._last[pid, usage.began] = roles[pid], usage

    def seconds(self, of: float | None = None) -> dict[str, float]:
        """Return the processor seconds of each role, the largest first.

        Args:
            of: those of the cores on which the processes ran; what no role has of them is ``not seen``.

        Returns:
            By role, those of ``role_of`` and ``PROGRAMS``: seconds, without roles that have none.
        """
        found = self._sums("own")
        for key, (role, usage) in self._last.items():
            if role == "runner":
                found[PROGRAMS] += usage.programs - (self._first[key].programs if key in self._first else 0.0)
        if of is not None:
            found["not seen"] = of - sum(found.values())
        return _largest_first(found)

    def system_seconds(self) -> dict[str, float]:
        """Return which part of ``seconds`` each role has spent in the system, programs of runners left out."""
        return _largest_first(self._sums("system"))

    def page_faults(self) -> dict[str, float]:
        """Return the pages that the system gave or copied for each role, programs of runners left out."""
        return _largest_first(self._sums("faults"))

    def _sums(self, what: str) -> dict[str, float]:
        found = defaultdict[str, float](float)
        for key, (role, usage) in self._last.items():
            found[role] += getattr(usage, what) - (getattr(self._first[key], what) if key in self._first else 0)
        return found


def _largest_first(sums: dict[str, float]) -> dict[str, float]:
    return {role: round(s, 2) for role, s in sorted(sums.items(), key=lambda r: -r[1]) if s > 0}
