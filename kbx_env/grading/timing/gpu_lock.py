"""A fair shared/exclusive lock of one GPU across threads and processes: many gradings share it, a timed one has it
alone.

The lock consists of advisory locks (flock) on files in a folder of the GPU. The operating system releases them when a
process dies. Exclusive holders are served in the order of their requests. The GPU idles while an exclusive request
waits for the last shared holder, so exclusive holders run in batches of ``EXCLUSIVE_BATCH``; then a shared window of
``SHARED_WINDOW_SECONDS`` follows, in which an exclusive request gets the GPU only while nobody shares it. The window ends
early when a crowd of exclusive requests waits.

A CUDA context disturbs a timed call seldom, by some per cent. It is made while somebody holds the GPU alone, unless a holder, or
who waits to be one, asks for quiet: who measures within 1 % does, who measures within 3 % does not.
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
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

from kbx_env.grading import gpu_turns

PARTS = 16
"""Parts into which each pool of GPU memory that timing may reserve is divided; each part is one lock file."""
UNRESERVED = 0.5 / PARTS
"""Largest share of that memory that is used without a reservation: most cases are small, and need not wait behind a
large one."""
EXCLUSIVE_BATCH = 4
"""Exclusive holders in a row, after which the GPU is shared, if a shared request waits."""
SHARED_WINDOW_SECONDS = 1.5
"""Longest time in seconds for which exclusive requests wait after a batch of exclusive holders, while others share the
GPU."""
CROWD, LEAST_WINDOW_SECONDS = 4, 0.3
"""When so many exclusive requests wait, a shared window ends early, but not before so many seconds: most workers then wait to
measure, and it is the measuring that binds."""
IDLE_SECONDS = 0.06
"""Seconds after the beginning of a shared window from which an exclusive request takes an idle GPU: three of the
longest pauses of those that want to share it."""
LEAST_SHARED_SECONDS = 0.1
"""Seconds for which a shared holder keeps the GPU at least, before it gives way to an exclusive request."""
ENDED_PROCESS_SECONDS = 60.0
"""Seconds for which an ended process stays in the list of known processes: the driver still reports its last
activity."""
POLL_SECONDS = 0.002
"""Seconds between two attempts to take a lock: short compared with a grading. flock has no timeout, so the lock
polls."""
MAX_POLL_SECONDS = 0.02
"""Largest pause between two attempts of a shared request, or to reserve memory. With ``POLL_SECONDS`` a dozen of them would keep
half a core busy."""


def _growing_pauses() -> Iterator[float]:
    """Yield pauses in seconds that grow by a fifth from ``POLL_SECONDS`` to ``MAX_POLL_SECONDS``."""
    pause = POLL_SECONDS
    while True:
        yield pause
        pause = min(1.2 * pause, MAX_POLL_SECONDS)


def _is_live(ticket: Path) -> bool:
    """Return whether the process of a ticket runs; delete the ticket if it does not."""
    if Path(f"/proc/{ticket.name.split('-')[1]}").exists():
        return True
    ticket.unlink(missing_ok=True)
    return False


def _parts(share: float) -> int:
    """Return how many of ``PARTS`` cover a share of the memory: at least one, at most all."""
    return min(PARTS, max(1, math.ceil(PARTS * share)))


class GpuLock:
    """The lock of one GPU.

    Args:
        gpu: its UUID.
        folder: where the folder of lock files is created; every process that uses the GPU must pass the same one. By
            default the system's folder for temporary files.

    Raises:
        OSError: the files cannot be created.
    """

    def __init__(self, gpu: str, folder: str | Path | None = None) -> None:
        self.folder = Path(folder or tempfile.gettempdir()) / f"kbx-gpu-{os.getuid()}-{gpu}"
        for name in ("users", "line", "quiet"):
            (self.folder / name).mkdir(mode=0o700, parents=True, exist_ok=True)
        (self.folder / "users" / str(os.getpid())).touch()

    @contextlib.contextmanager
    def shared(self) -> Iterator[float]:
        """Hold the lock together with other shared holders within the block.

        Yields:
            Seconds waited.
        """
        began, pauses = time.monotonic(), _growing_pauses()
        while not self._window_open() and self._exclusive_waiting():
            self._announce_shared()
            time.sleep(next(pauses))
        with self._locked("turn", fcntl.LOCK_SH, self._announce_shared, pauses):
            use = self._take("use", fcntl.LOCK_SH, self._announce_shared, pauses)
        try:
            yield time.monotonic() - began
        finally:
            os.close(use)

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """Make a CUDA context, or what belongs to one, within the block; one process of the host at a time.

        The driver makes one context after the other, for all GPUs of the host, and whoever asks it for anything waits in the same
        line: who measures waits the longer the more contexts are asked for at once.
        """
        host = f"../kbx-gpu-{os.getuid()}-contexts"  # begins as the locks' folders do, which runners may not read
        with self._locked("start", fcntl.LOCK_EX):
            making = self._take("making", fcntl.LOCK_EX)
            try:
                if not self.quiet_wanted():  # who wants it from now on waits for "making"
                    with self._locked(host, fcntl.LOCK_EX):
                        yield
                    return
            finally:
                os.close(making)
            with self.shared(), self._locked(host, fcntl.LOCK_EX):
                yield

    @contextlib.contextmanager
    def alone(self, quiet: bool = True) -> Iterator[float]:
        """Hold the lock exclusively within the block; exclusive requests are served first come, first served.

        Args:
            quiet: no CUDA context is made meanwhile.

        Yields:
            Seconds waited.
        """
        began = time.monotonic()
        with self._ticket("quiet") if quiet else contextlib.nullcontext():
            with self._first_in_line():
                use = self._idle_in_window()
                window_left = 0.0 if use is None else max(0.0, self._read_state()[1] - time.monotonic())
                if use is None:
                    with self._locked("turn", fcntl.LOCK_EX):
                        use = self._take("use", fcntl.LOCK_EX)
                count, since = self._read_state()[0] + 1, time.time()
                self._write_state(count, 0.0)
            try:
                if quiet:
                    os.close(self._take("making", fcntl.LOCK_EX))  # what began before it was asked for quiet
                yield time.monotonic() - began
            finally:
                self._end_alone(use, count, since, window_left)

    def _end_alone(self, use: int, count: int, since: float, window_left: float) -> None:
        """Release the exclusive use, and open a shared window where one is due.

        Args:
            use: the file descriptor of the use.
            count: exclusive holders in a row, with this one.
            since: when the use began, in seconds since the epoch.
            window_left: seconds of the shared window in which the GPU was idle.
        """
        shared_waiting = (self.folder / "asked").exists() and (self.folder / "asked").stat().st_mtime > since
        batch_over = count >= EXCLUSIVE_BATCH or not self._exclusive_waiting()
        # A window that was idle goes on for those that came meanwhile.
        window = window_left or (SHARED_WINDOW_SECONDS if batch_over else 0.0)
        window_end = time.monotonic() + window if window and shared_waiting else 0.0
        self._write_state(0 if batch_over or window_end or not shared_waiting else count, window_end)
        os.close(use)

    def wanted_alone(self) -> bool:
        """Return whether an exclusive request waits for shared holders, and no shared window is open."""
        return not self._window_open() and self._exclusive_waiting()

    @contextlib.contextmanager
    def room(self, parts: int, pool: str = "room") -> Iterator[float]:
        """Reserve memory of the GPU within the block.

        Args:
            parts: how many of ``PARTS``.
            pool: the name of the memory that is divided.

        Yields:
            Seconds waited.
        """
        began, reserved, pauses = time.monotonic(), list[int](), _growing_pauses()
        try:
            # Later requests wait behind this lock: otherwise a stream of small ones would keep a large one waiting for
            # ever.
            with self._locked(pool, fcntl.LOCK_EX, pauses=pauses):
                while len(reserved) < parts:
                    free = [fd for k in range(PARTS) if (fd := self._try(f"{pool}{k}", fcntl.LOCK_EX)) is not None]
                    reserved += free[: parts - len(reserved)]
                    for fd in free:
                        if fd not in reserved:
                            os.close(fd)
                    if len(reserved) < parts:
                        time.sleep(next(pauses))
            yield time.monotonic() - began
        finally:
            for fd in reserved:
                os.close(fd)

    def _idle_in_window(self) -> int | None:
        """Wait for the end of a shared window, or until nobody uses the GPU in it.

        Returns:
            The file descriptor of the exclusive use of an idle GPU; ``None`` at the end of the window.
        """
        while self._shared_window_due():
            if self._read_state()[1] and time.time() - self._window_began() > IDLE_SECONDS:
                use = self._try("use", fcntl.LOCK_EX)
                if use is not None:
                    return use
            time.sleep(POLL_SECONDS)
        return None

    def _window_began(self) -> float:
        """Return when the state was last written, in seconds since the epoch."""
        with contextlib.suppress(OSError):
            return (self.folder / "turns").stat().st_mtime
        return time.time()

    def _shared_window_due(self) -> bool:
        """Return whether exclusive requests must wait for a shared window: it is open, or due after the holder's
        batch.
        """
        count, _, holder = self._read_state()
        return self._window_open() or (count >= EXCLUSIVE_BATCH and Path(f"/proc/{holder}").exists())

    def _window_open(self) -> bool:
        """Return whether a shared window is open. All that ask decide by the same files, and nobody has to close it."""
        if time.monotonic() >= self._read_state()[1]:
            return False
        if time.time() - self._window_began() < LEAST_WINDOW_SECONDS:
            return True
        return sum(_is_live(self.folder / "line" / name) for name in os.listdir(self.folder / "line")) < CROWD

    def _announce_shared(self) -> None:
        """Show the exclusive holder that a shared request waits."""
        (self.folder / "asked").touch()

    def _read_state(self) -> tuple[int, float, int]:
        """Read what the last exclusive holder has written.

        Returns:
            Exclusive holders in a row, the end of the shared window (``time.monotonic``; 0 for none), and the process
            that wrote both; zeros where nothing is written.
        """
        try:
            count, end, pid = (self.folder / "turns").read_text().split()
            # After a restart of the machine time.monotonic() starts at 0 again, and an old end would lie far ahead.
            until = float(end) if float(end) <= time.monotonic() + SHARED_WINDOW_SECONDS else 0.0
            return int(count), until, int(pid)
        except (OSError, ValueError):
            return 0, 0.0, 0

    def _write_state(self, count: int, until: float) -> None:
        """Write what ``_read_state`` reads; only the exclusive holder may call this."""
        part = self.folder / "turns.part"
        part.write_text(f"{count} {until} {os.getpid()}")
        os.replace(part, self.folder / "turns")

    def _exclusive_waiting(self) -> bool:
        """Return whether an exclusive request waits."""
        folder = self.folder / "line"
        return any(_is_live(folder / name) for name in os.listdir(folder))

    @contextlib.contextmanager
    def _first_in_line(self) -> Iterator[None]:
        """Wait until this is the first exclusive request, and stay first within the block.

        The queue makes the lock fair: of several processes that poll a lock any may get it, and one may wait for ever.
        """
        folder = self.folder / "line"
        with self._ticket("line") as ticket:
            # The further back in the queue, the longer the pauses.
            while ahead := sum(_is_live(folder / name) for name in sorted(os.listdir(folder)) if name < ticket):
                time.sleep(5 * POLL_SECONDS * min(ahead, 5))
            yield

    @contextlib.contextmanager
    def _ticket(self, folder: str) -> Iterator[str]:
        """Keep a file that names this process in a folder within the block; yields its name, which sorts by time."""
        ticket = self.folder / folder / f"{time.monotonic_ns():020d}-{os.getpid()}-{threading.get_ident()}"
        ticket.touch()
        try:
            yield ticket.name
        finally:
            ticket.unlink(missing_ok=True)

    def quiet_wanted(self) -> bool:
        """Return whether somebody holds the GPU, or waits for it, and asks that no CUDA context is made."""
        folder = self.folder / "quiet"
        return any(_is_live(folder / name) for name in os.listdir(folder))

    @contextlib.contextmanager
    def _locked(
        self, name: str, kind: int, on_wait: Callable[[], None] = lambda: None, pauses: Iterator[float] | None = None
    ) -> Iterator[None]:  # fmt: skip
        """Hold the lock file within the block; arguments as for ``_take``."""
        fd = self._take(name, kind, on_wait, pauses)
        try:
            yield
        finally:
            os.close(fd)

    def _try(self, name: str, kind: int) -> int | None:
        """Return the file descriptor of a lock file that was locked, or ``None`` if another holder has it."""
        # Opened anew every time: a lock belongs to the open file description, and the threads of a process would share
        # one.
        fd = os.open(self.folder / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
            return fd
        except BlockingIOError:
            os.close(fd)
            return None

    def _take(
        self, name: str, kind: int, on_wait: Callable[[], None] = lambda: None, pauses: Iterator[float] | None = None
    ) -> int:  # fmt: skip
        """Wait for a lock file.

        Args:
            name: the file without its ending.
            kind: ``fcntl.LOCK_SH`` or ``fcntl.LOCK_EX``.
            on_wait: called after every attempt that failed.
            pauses: seconds between attempts; by default ``POLL_SECONDS``.

        Returns:
            A file descriptor; closing it releases the lock.
        """
        while (fd := self._try(name, kind)) is None:
            on_wait()
            time.sleep(next(pauses) if pauses else POLL_SECONDS)
        return fd

    @contextlib.contextmanager
    def user(self, pid: int) -> Iterator[None]:
        """Register a process that respects this lock within the block; its start and end do not disturb a measurement.

        Args:
            pid: its process id.
        """
        file = self._user_file(pid)
        file.touch()
        try:
            yield
        finally:
            # Its end starts the time for which it stays known. Perhaps the interpreter ends, and no path can be made any more.
            with contextlib.suppress(OSError):
                file.touch()

    def register(self, pid: int) -> None:
        """Let a process count as one that respects this lock, as long as it runs and ``ENDED_PROCESS_SECONDS`` from now on.

        Args:
            pid: its process id.
        """
        self._user_file(pid).touch()

    def _user_file(self, pid: int) -> Path:
        """Return the file that names a process."""
        return self.folder / "users" / str(pid)

    def users(self) -> frozenset[int]:
        """Return the ids of registered processes that run or ended within the last ``ENDED_PROCESS_SECONDS``."""
        found = set()
        for file in (self.folder / "users").iterdir():
            with contextlib.suppress(OSError):  # another process removed it
                if Path(f"/proc/{file.name}").exists() or time.time() - file.stat().st_mtime < ENDED_PROCESS_SECONDS:
                    found.add(int(file.name))
                else:
                    file.unlink()
        return frozenset(found)

    def living(self) -> frozenset[int]:
        """Return the ids of registered processes that run now."""
        return frozenset(pid for pid in self.users() if Path(f"/proc/{pid}").exists())


class GpuHold:
    """One grading's use of a GPU lock. Calls may nest; without a lock nothing waits.

    Args:
        gpu_lock: the lock; ``None`` where no GPU is shared (the CPU backend).

    Attributes:
        waited: seconds waited so far; they count against no time limit.
        spent: seconds for which the GPU was held, by kind: ``shared`` and ``alone``.
    """

    def __init__(self, gpu_lock: GpuLock | None) -> None:
        self._gpu_lock, self._kind, self.waited = gpu_lock, "", 0.0
        self._began, self._held = 0.0, ExitStack()
        self.spent = {"shared": 0.0, "alone": 0.0}

    def add(self, earlier: GpuHold | None) -> None:
        """Add what an earlier session of the same grading has waited and held."""
        if earlier is not None:
            self.waited += earlier.waited
            self.spent = {kind: s + earlier.spent[kind] for kind, s in self.spent.items()}

    def using(self) -> AbstractContextManager[None]:
        """Return a context in which the GPU is shared with other gradings."""
        return self._hold(None if self._gpu_lock is None else self._gpu_lock.shared, "shared")

    def alone(self, quiet: bool = True) -> AbstractContextManager[None]:
        """Return a context in which the GPU is held exclusively.

        Within ``using`` it raises ``RuntimeError``: it would wait for itself.

        Args:
            quiet: no CUDA context is made meanwhile.
        """
        return self._hold(None if self._gpu_lock is None else functools.partial(self._gpu_lock.alone, quiet), "alone")

    @contextlib.contextmanager
    def room(self, share: float, pool: str = "room") -> Iterator[None]:
        """Reserve a share of a pool of the memory that timing may use, within the block.

        Reserve before taking the GPU itself, and never inside another reservation of the same pool: two gradings would wait for
        each other. Who has some of the pool ``kept`` may reserve some of ``room``, and not the other way round.

        Args:
            share: of the pool; more than 1 counts as 1, and at most ``UNRESERVED`` is not reserved.
            pool: ``room``, for work; ``kept``, for results that wait for their judge.
        """
        if self._gpu_lock is None:
            yield
            return
        if share <= UNRESERVED:
            yield
            return
        with self._gpu_lock.room(_parts(share), pool) as waited:
            self.waited += waited
            yield

    @contextlib.contextmanager
    def _hold(self, take: Callable[[], AbstractContextManager[float]] | None, kind: str) -> Iterator[None]:
        """Hold the lock within the block, unless an outer block does already.

        Args:
            take: takes the lock and yields the seconds waited; ``None`` where there is no lock.
            kind: ``shared`` or ``alone``.
        """
        if take is None or self._kind in (kind, "alone"):
            yield
            return
        if self._kind:
            raise RuntimeError("a shared holder of the GPU lock cannot hold it alone: it would wait for itself")
        with ExitStack() as held:
            self._take(kind, take, held)
            try:
                with gpu_turns.holding(self):
                    yield
            finally:
                self._leave()

    def _take(self, kind: str, take: Callable[[], AbstractContextManager[float]], held: ExitStack) -> None:
        """Wait for the lock; ``held`` releases it."""
        self.waited += held.enter_context(take())
        self._kind, self._began, self._held = kind, time.monotonic(), held

    def _leave(self) -> None:
        """Count the seconds of the hold that ends."""
        self.spent[self._kind] += time.monotonic() - self._began
        self._kind = ""

    def give_way(self) -> None:
        """Release the shared GPU and take it again, if a grading waits to have it alone and may have it now."""
        if self._kind != "shared" or time.monotonic() - self._began < LEAST_SHARED_SECONDS:
            return
        if self._gpu_lock is not None and self._gpu_lock.wanted_alone():
            _finish()
            held = self._held
            self._leave()
            held.close()
            self._take("shared", self._gpu_lock.shared, held)

    @property
    def quiet_wanted(self) -> bool:
        """See ``GpuLock.quiet_wanted``."""
        return self._gpu_lock is not None and self._gpu_lock.quiet_wanted()

    @property
    def contended(self) -> bool:
        """Whether there is a lock, so that other gradings may hold the GPU."""
        return self._gpu_lock is not None

    def user(self, pid: int) -> AbstractContextManager[None]:
        """See ``GpuLock.user``."""
        return contextlib.nullcontext() if self._gpu_lock is None else self._gpu_lock.user(pid)

    def file(self, name: str) -> Path | None:
        """Return the path of a file that all processes on this GPU share.

        Args:
            name: says what the file holds, and for which versions.

        Returns:
            The path; ``None`` without a lock.
        """
        return None if self._gpu_lock is None else self._gpu_lock.folder / name

    def users(self) -> frozenset[int]:
        """See ``GpuLock.users``."""
        return frozenset() if self._gpu_lock is None else self._gpu_lock.users()

    def living(self) -> frozenset[int]:
        """See ``GpuLock.living``."""
        return frozenset() if self._gpu_lock is None else self._gpu_lock.living()


def _finish() -> None:
    """Wait until the GPU has done what this process has asked of it."""
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


@functools.cache
def gpu_lock_of(backend: str) -> GpuLock | None:
    """Return the lock of the GPU that this process grades on; ``None`` on the CPU backend."""
    if backend != "cuda":
        return None
    import torch

    properties = torch.cuda.get_device_properties(0)
    return GpuLock(str(getattr(properties, "uuid", None) or f"{properties.name}-0".replace(" ", "-")))
