"""Who may use a GPU now: many gradings at once, or one that times, alone. Holds across threads and processes.

Advisory locks (flock) on two files for each GPU: the kernel gives them back when a process dies, whatever it died of. Who
wants the GPU alone stands in line. Everybody who shares must leave before one is alone, and the GPU idles while the last ones
do: so some are alone one after the other, and then the GPU is everybody's for a while.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import math
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

PARTS = 16
"""Into so many parts the memory of a GPU is divided that timing may use."""
BATCH, WINDOW = 4, 1.5
"""So many are alone one after the other, then the GPU is everybody's for so many seconds."""
LINGER = 60.0
"""Seconds for which an ended process stays known."""
PAUSE = 0.002
"""Seconds between two attempts: short beside a grading, and flock has no way to give up waiting."""
LONGEST = 0.02
"""What they grow to for those who only wait to share: a dozen of them would otherwise keep half a core busy with looking."""


def _growing() -> Iterator[float]:
    pause = PAUSE
    while True:
        yield pause
        pause = min(1.2 * pause, LONGEST)


def _stands(ticket: Path) -> bool:
    """Whether whoever took a ticket lives; others' tickets are thrown away."""
    if Path(f"/proc/{ticket.name.split('-')[1]}").exists():
        return True
    ticket.unlink(missing_ok=True)
    return False


def _parts(share: float) -> int:
    return min(PARTS, max(1, math.ceil(PARTS * share)))


class GpuLock:
    """The lock of one GPU.

    Args:
        gpu: its UUID.
        folder: of the lock files; every process that uses the GPU must name the same.

    Raises:
        OSError: the files cannot be made.
    """

    def __init__(self, gpu: str, folder: str | Path | None = None) -> None:
        self.folder = Path(folder or tempfile.gettempdir()) / f"kbx-gpu-{os.getuid()}-{gpu}"
        for name in ("users", "line"):
            (self.folder / name).mkdir(mode=0o700, parents=True, exist_ok=True)
        (self.folder / "users" / str(os.getpid())).touch()

    @contextlib.contextmanager
    def shared(self) -> Iterator[float]:
        """Use the GPU beside others; gives the seconds waited."""
        began, pauses = time.monotonic(), _growing()
        while time.monotonic() >= self._told()[1] and self._wanted():
            self._ask()
            time.sleep(next(pauses))
        with self._locked("turn", fcntl.LOCK_SH, self._ask, pauses):
            use = self._take("use", fcntl.LOCK_SH, self._ask, pauses)
        try:
            yield time.monotonic() - began
        finally:
            os.close(use)

    @contextlib.contextmanager
    def alone(self) -> Iterator[float]:
        """Use the GPU alone, in the order of asking; gives the seconds waited."""
        began = time.monotonic()
        with self._first_in_line():
            while self._others_turn():
                time.sleep(PAUSE)
            with self._locked("turn", fcntl.LOCK_EX):
                use = self._take("use", fcntl.LOCK_EX)
            count, since = self._told()[0] + 1, time.time()
            self._tell(count, 0.0)
        try:
            yield time.monotonic() - began
        finally:
            others = (self.folder / "asked").exists() and (self.folder / "asked").stat().st_mtime > since
            over = count >= BATCH or not self._wanted()
            self._tell(0 if over or not others else count, time.monotonic() + WINDOW if over and others else 0.0)
            os.close(use)

    @contextlib.contextmanager
    def room(self, parts: int) -> Iterator[float]:
        """Some of the memory's ``PARTS``, for as long as it takes; gives the seconds waited."""
        began, held = time.monotonic(), list[int]()
        try:
            # Who comes later waits: else small ones that come and go would keep a large one out.
            with self._locked("room", fcntl.LOCK_EX):
                while len(held) < parts:
                    free = [one for k in range(PARTS) if (one := self._try(f"part{k}", fcntl.LOCK_EX)) is not None]
                    held += free[: parts - len(held)]
                    for one in free:
                        if one not in held:
                            os.close(one)
                    if len(held) < parts:
                        time.sleep(PAUSE)
            yield time.monotonic() - began
        finally:
            for one in held:
                os.close(one)

    def _others_turn(self) -> bool:
        """Whether who wants to be alone must let others go first: the GPU is everybody's, or will be after the one who is
        alone now."""
        count, until, holder = self._told()
        return time.monotonic() < until or (count >= BATCH and Path(f"/proc/{holder}").exists())

    def _ask(self) -> None:
        """Show whoever is alone that somebody waits to share."""
        (self.folder / "asked").touch()

    def _told(self) -> tuple[int, float, int]:
        """How many were alone one after the other, until when (``time.monotonic``) the GPU is everybody's, and which process
        says so."""
        try:
            count, end, who = (self.folder / "turns").read_text().split()
            until = float(end) if float(end) <= time.monotonic() + WINDOW else 0.0  # a restart sets the clock back
            return int(count), until, int(who)
        except (OSError, ValueError):
            return 0, 0.0, 0

    def _tell(self, count: int, until: float) -> None:
        """Only who has the GPU alone says so."""
        part = self.folder / "turns.part"
        part.write_text(f"{count} {until} {os.getpid()}")
        os.replace(part, self.folder / "turns")

    def _wanted(self) -> bool:
        """Whether somebody stands in line."""
        folder = self.folder / "line"
        return any(_stands(folder / name) for name in os.listdir(folder))

    @contextlib.contextmanager
    def _first_in_line(self) -> Iterator[None]:
        """Wait until nobody stands before us: of those who try for a lock again and again any may win, and one may wait for
        ever."""
        folder = self.folder / "line"
        mine = folder / f"{time.monotonic_ns():020d}-{os.getpid()}-{threading.get_ident()}"
        mine.touch()
        try:
            # Who is far behind looks seldom.
            while ahead := sum(_stands(folder / name) for name in sorted(os.listdir(folder)) if name < mine.name):
                time.sleep(5 * PAUSE * min(ahead, 5))
            yield
        finally:
            mine.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _locked(
        self, name: str, kind: int, waiting: Callable[[], None] = lambda: None, pauses: Iterator[float] | None = None
    ) -> Iterator[None]:  # fmt: skip
        held = self._take(name, kind, waiting, pauses)
        try:
            yield
        finally:
            os.close(held)

    def _try(self, name: str, kind: int) -> int | None:
        # A new description every time: locks belong to descriptions, and threads share a process's.
        held = os.open(self.folder / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(held, kind | fcntl.LOCK_NB)
            return held
        except BlockingIOError:
            os.close(held)
            return None

    def _take(
        self, name: str, kind: int, waiting: Callable[[], None] = lambda: None, pauses: Iterator[float] | None = None
    ) -> int:  # fmt: skip
        while (held := self._try(name, kind)) is None:
            waiting()
            time.sleep(next(pauses) if pauses else PAUSE)
        return held

    @contextlib.contextmanager
    def user(self, pid: int) -> Iterator[None]:
        """Make a process known that keeps to this lease: its coming and going disturbs nobody."""
        file = self.folder / "users" / str(pid)
        file.touch()
        try:
            yield
        finally:
            # The driver still tells of what it did a moment ago.
            with contextlib.suppress(OSError):
                file.touch()

    def users(self) -> frozenset[int]:
        """The processes that are known: those that live, and those that ended within the last ``LINGER`` seconds."""
        found = set()
        for file in (self.folder / "users").iterdir():
            with contextlib.suppress(OSError):  # somebody else removed it
                if Path(f"/proc/{file.name}").exists() or time.time() - file.stat().st_mtime < LINGER:
                    found.add(int(file.name))
                else:
                    file.unlink()
        return frozenset(found)

    def living(self) -> frozenset[int]:
        """The known processes that live now."""
        return frozenset(pid for pid in self.users() if Path(f"/proc/{pid}").exists())


class GpuHold:
    """One grading's use of a lease, which may be asked for within itself; without a GPU there is nothing to wait for.

    Attributes:
        waited: seconds of waiting so far; nobody's time.
        spent: seconds for which it was used, beside others (``shared``) and ``alone``.
    """

    def __init__(self, lease: GpuLock | None) -> None:
        self._lease, self._holds, self.waited = lease, "", 0.0
        self.spent = {"shared": 0.0, "alone": 0.0}

    def using(self) -> AbstractContextManager[None]:
        """Use the GPU beside other gradings."""
        return self._hold(None if self._lease is None else self._lease.shared, "shared")

    def alone(self) -> AbstractContextManager[None]:
        """Use the GPU alone; not within ``using``, which would wait for itself."""
        return self._hold(None if self._lease is None else self._lease.alone, "alone")

    @contextlib.contextmanager
    def room(self, share: float) -> Iterator[None]:
        """Have a share of the memory that is shared out, 1 at most; taken before the GPU itself, and never while other room
        is held."""
        if self._lease is None:
            yield
            return
        with self._lease.room(_parts(share)) as waited:
            self.waited += waited
            yield

    @contextlib.contextmanager
    def _hold(self, take: Callable[[], AbstractContextManager[float]] | None, kind: str) -> Iterator[None]:
        if take is None or self._holds in (kind, "alone"):
            yield
            return
        if self._holds:
            raise RuntimeError("who shares the GPU cannot have it alone: it would wait for itself")
        with take() as waited:
            self.waited += waited
            self._holds, began = kind, time.monotonic()
            try:
                yield
            finally:
                self._holds = ""
                self.spent[kind] += time.monotonic() - began

    @property
    def contended(self) -> bool:
        """Whether there is somebody to share with."""
        return self._lease is not None

    def user(self, pid: int) -> AbstractContextManager[None]:
        """See ``GpuLock.user``."""
        return contextlib.nullcontext() if self._lease is None else self._lease.user(pid)

    def file(self, name: str) -> Path | None:
        """A file that all who use this GPU share; its name says what it holds, and for which versions."""
        return None if self._lease is None else self._lease.folder / name

    def users(self) -> frozenset[int]:
        """See ``GpuLock.users``."""
        return frozenset() if self._lease is None else self._lease.users()

    def living(self) -> frozenset[int]:
        """See ``GpuLock.living``."""
        return frozenset() if self._lease is None else self._lease.living()


@functools.cache
def gpu_lock_of(backend: str) -> GpuLock | None:
    """The lease of the GPU that this process grades on; none on the CPU backend."""
    if backend != "cuda":
        return None
    import torch

    properties = torch.cuda.get_device_properties(0)
    return GpuLock(str(getattr(properties, "uuid", None) or f"{properties.name}-0".replace(" ", "-")))
