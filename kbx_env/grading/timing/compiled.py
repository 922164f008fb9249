"""Optional speedup over torch.compile, from a ratio compiled / eager that all gradings of a machine share.

A worker process (``compiled_worker``) compiles the baseline without holding the GPU, and times it against eager in
pairs while it holds the GPU alone. The ratio is stored in the folder of the GPU lock and measured again after ``USES``
gradings or a day. It is multiplied with eager's time, which each grading measures itself. Errors here never change a
verdict.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
import select
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import BinaryIO

import torch

import kbx_env
from kbx_env.confinement import HIDDEN, landlock_version
from kbx_env.grading.sizes import timed
from kbx_env.grading.timing.gpu_lock import GpuHold
from kbx_env.grading.timing.roofline import KEPT_SECONDS
from kbx_env.outcome import CaseTime, Timing
from kbx_env.spec.task import Task
from kbx_env.versions import TASK_SET

COMPILE_SECONDS = 120.0
"""Time limit for compiling one case."""
GRADING_SECONDS = 300.0
"""Time limit of one grading for all of its cases, without waiting; the next grading measures the cases that are
left."""
WAIT_SECONDS = 600.0
"""Seconds of waiting for the GPU after which the worker is killed."""
HOLD_SECONDS = 60.0
"""Longest time that a worker may hold the GPU alone at once; it needs a few seconds."""
USES = 50
"""Gradings that use a ratio before it is measured again."""
TOLERANCE = 0.05
"""Relative difference up to which a new ratio does not replace the stored one."""
_OPTIONS = ("TORCHINDUCTOR_", "TORCHDYNAMO_", "TORCH_COMPILE", "TORCH_LOGS", "TRITON_INTERPRET", "TRITON_CACHE")
"""Prefixes of environment variables that would change torch's default settings."""
_SECRETS = ("_KEY", "_TOKEN", "_SECRET")
"""Endings of environment variables that a worker does not need and must not get."""

Measure = Callable[[Task, Sequence[int], GpuHold], Mapping[int, "Row"]]
"""Measures cases of a task, given by index; the result may lack some."""


@dataclass(frozen=True)
class Row:
    """The measurement of one case."""

    ratio: float | None = None
    """Time of the compiled baseline over eager's."""
    why: str = ""
    """Why there is no ratio."""
    again: bool = False
    """Whether a later attempt may succeed."""


@dataclass(frozen=True)
class Kept:
    """The stored ratio of one case."""

    ratio: float | None
    """Time of the compiled baseline over eager's; ``None`` where torch.compile fails."""
    at: float
    """When it was measured, in seconds since 1970."""
    uses: int = 0
    """Gradings that used it since."""
    why: str = ""
    """Why there is no ratio."""

    def stale(self, now: float) -> bool:
        """Return whether the case must be measured again. Failures are repeated once a day, because they may take
        minutes.

        Args:
            now: seconds since 1970.

        Returns:
            True also where ``at`` lies in the future.
        """
        return not 0 <= now - self.at < KEPT_SECONDS or (self.ratio is not None and self.uses >= USES)


def beside(
    task: Task, timing: Timing, gpu: GpuHold, measure: Measure | None = None, now: Callable[[], float] = time.time,
    sizes: str = "published",
) -> Timing:  # fmt: skip
    """Add torch.compile's times to a timing.

    Args:
        task: the task that was timed.
        timing: of a correct kernel whose runner has ended.
        gpu: not held by this grading: the worker takes it.
        measure: measures cases by their index in ``sizes.at``; by default in a worker process.
        now: returns seconds since 1970.
        sizes: which timing cases were timed.

    Returns:
        The timing with ``compiled_us`` for each case, ``compiled_speedup``, and a note for each missing value.
    """
    first = 0 if sizes == "published" else len(task.timed)
    index_of = {c.label(): i for i, c in enumerate(timed(task, sizes), first)}
    wanted = [c.case for c in timing.cases]
    notes: list[str] = []
    found: Mapping[str, Kept] = {}
    try:
        found = _known(task, {label: index_of[label] for label in wanted}, gpu, measure or measured, now, notes)
    except Exception as e:  # a full disk or a bug in the grader: the verdict and its speedup stay valid
        notes.append(f"torch.compile: not measured: {type(e).__name__}: {e}"[:300])
    cases = [_with(c, found.get(c.case)) for c in timing.cases]
    notes += [f"torch.compile: {c.case}: {k.why}" for c in cases if (k := found.get(c.case)) and k.ratio is None]
    logs = [
        math.log(c.speedup * k.ratio) for c in cases if (k := found.get(c.case)) is not None and k.ratio is not None
    ]
    complete = len(logs) == len(cases) > 0
    return replace(
        timing, cases=tuple(cases), notes=(*timing.notes, *notes),
        compiled_speedup=math.exp(sum(logs) / len(logs)) if complete else None,
    )  # fmt: skip


def _with(case: CaseTime, kept: Kept | None) -> CaseTime:
    """Return a case's times with ``compiled_us``, if its ratio is known."""
    if kept is None or kept.ratio is None:
        return case
    return replace(case, compiled_us=round(case.eager_us * kept.ratio, 3))


def _known(
    task: Task, wanted: Mapping[str, int], gpu: GpuHold, measure: Measure, now: Callable[[], float], notes: list[str]
) -> dict[str, Kept]:  # fmt: skip
    """Return the ratios of cases, measured again where they are missing or stale.

    Args:
        task: the task.
        wanted: index of each case, by label.
        gpu: not held by this grading.
        measure: measures cases.
        now: returns seconds since 1970.
        notes: changes and failures are appended here.

    Returns:
        Ratios by label; those of cases that could not be measured are missing.
    """
    file = kept_in(task, gpu)
    kept = _read(file)
    if any(label not in kept or kept[label].stale(now()) for label in wanted):
        # One grading measures; the others wait for its results.
        with _locked(file):
            kept = _read(file)
            due = [label for label in wanted if label not in kept or kept[label].stale(now())]
            rows = measure(task, [wanted[label] for label in due], gpu) if due else {}
            for label in due:
                found = _merged(label, kept.get(label), rows.get(wanted[label]), now(), notes)
                if found is not None:
                    kept[label] = found
            kept |= {k: replace(v, uses=v.uses + 1) for k, v in kept.items() if k in wanted}
            _write(file, task, kept)
    else:
        # Two gradings that count at once may lose one use: the ratio is then measured again a little later.
        kept |= {k: replace(v, uses=v.uses + 1) for k, v in kept.items() if k in wanted}
        _write(file, task, kept)
    return {label: kept[label] for label in wanted if label in kept}


def _merged(label: str, old: Kept | None, row: Row | None, now: float, notes: list[str]) -> Kept | None:
    """Return what is stored of a case after a measurement.

    Args:
        label: of the case.
        old: what was stored before.
        row: the measurement; ``None`` if the worker did not reach the case.
        now: seconds since 1970.
        notes: changes and failures are appended here.

    Returns:
        The new entry; ``None`` for none.
    """
    if row is None or row.again:
        notes.append(
            f"torch.compile: {label}: not measured: {row.why if row else 'no time was left; a later grading will'}"
        )
        return old
    if row.ratio is None:
        if old is None or old.ratio is None:
            return Kept(None, now, 0, row.why)
        notes.append(f"torch.compile: {label}: measured earlier; now {row.why}")
        return replace(old, at=now, uses=0)
    if old is None or old.ratio is None:
        return Kept(row.ratio, now)
    if abs(row.ratio / old.ratio - 1) <= TOLERANCE:
        return replace(old, at=now, uses=0)
    notes.append(f"torch.compile: {label}: measured again: {row.ratio:.3f} of eager's time, before {old.ratio:.3f}")
    return Kept(row.ratio, now)


# --- the stored ratios ----------------------------------------------------------------------------------------


def _versions() -> dict[str, str]:
    """Return the versions on which a ratio depends."""
    import triton

    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"
    return {"device": device, "torch": torch.__version__, "triton": triton.__version__, "cuda": str(torch.version.cuda)}


def _about(task: Task) -> dict[str, str]:
    """Return what a ratio depends on. The version of the task set also stands for how eager is timed."""
    return {"task": task.id, "fingerprint": task.fingerprint, "task_set": TASK_SET, **_versions()}


def kept_in(task: Task, gpu: GpuHold) -> Path | None:
    """Return the file of a task's ratios on this GPU. Its name depends on the task and on all versions.

    Args:
        task: the task.
        gpu: whose folder has the file.

    Returns:
        The path; ``None`` without a GPU lock.
    """
    digest = hashlib.sha256(json.dumps(_about(task), sort_keys=True).encode()).hexdigest()
    return gpu.file(f"compiled-{digest[:20]}.json")


def _read(file: Path | None) -> dict[str, Kept]:
    """Return the stored ratios by label of their case; none if the file is missing or damaged."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        if file is not None:
            found = {k: Kept(**v) for k, v in json.loads(file.read_text())["cases"].items()}
            # Entries that are no positive numbers are ignored: the file may have been edited.
            return {k: v for k, v in found.items() if v.ratio is None or (math.isfinite(v.ratio) and v.ratio > 0)}
    return {}


def _write(file: Path | None, task: Task, kept: Mapping[str, Kept]) -> None:
    """Store ratios: replaces the file at once.

    Args:
        file: where; ``None`` to store nothing.
        task: the task.
        kept: ratios by label.
    """
    if file is None:
        return
    with contextlib.suppress(OSError):
        new = file.with_name(f"{file.name}.{os.getpid()}-{time.monotonic_ns()}")
        new.write_text(json.dumps(_about(task) | {"cases": {k: asdict(v) for k, v in kept.items()}}))
        new.replace(file)


@contextlib.contextmanager
def _locked(file: Path | None) -> Iterator[None]:
    """Hold the lock of a file of ratios within the block."""
    if file is None:
        yield
        return
    fd = os.open(file.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


# --- the worker -----------------------------------------------------------------------------------------------


def measured(
    task: Task, cases: Sequence[int], gpu: GpuHold, limit: float = COMPILE_SECONDS, seconds: float = GRADING_SECONDS,
    command: Sequence[str] = (sys.executable, "-m", "kbx_env.grading.timing.compiled_worker"),
) -> dict[int, Row]:  # fmt: skip
    """Measure cases in a worker process.

    Args:
        task: the task.
        cases: by index in ``sizes.at``.
        gpu: not held by this grading: the worker takes it.
        limit: seconds that compiling one case may take.
        seconds: time limit for all cases, without waiting for the GPU.
        command: starts the worker.

    Returns:
        The measurements by index; a case that is missing was not reached.
    """
    file = gpu.file("gpu_lock")
    lock_folder = None if file is None else file.parent
    with _folder(lock_folder) as folder, tempfile.TemporaryFile(dir=folder / "tmp") as errors:
        request = {
            "task": task.id,
            "cases": list(cases),
            "limit": limit,
            "gpu_lock": None if lock_folder is None else str(lock_folder),
        }
        p = subprocess.Popen(
            list(command), env=environment(folder), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
            start_new_session=True,
        )  # fmt: skip
        with gpu.user(p.pid):
            try:
                assert p.stdin is not None
                with contextlib.suppress(BrokenPipeError):
                    p.stdin.write(json.dumps(request).encode() + b"\n")
                    p.stdin.close()
                return _read_rows(p, cases, limit, seconds, errors)
            finally:
                with contextlib.suppress(OSError):
                    os.killpg(p.pid, signal.SIGKILL)
                p.wait()
                if p.stdout is not None:
                    p.stdout.close()


def _last(errors: BinaryIO) -> str:
    """Return the last line that the worker wrote to its standard error."""
    errors.seek(max(0, errors.seek(0, os.SEEK_END) - 4096))
    lines = errors.read().decode(errors="replace").strip().splitlines()
    return f": {lines[-1][:300]}" if lines else ""


def _read_rows(
    p: subprocess.Popen[bytes], cases: Sequence[int], limit: float, seconds: float, errors: BinaryIO
) -> dict[int, Row]:  # fmt: skip
    """Read the worker's messages until it ends or is late. Waiting for the GPU does not count.

    Args:
        p: the worker.
        cases: by index.
        limit: seconds that compiling one case may take.
        seconds: time limit for all cases.
        errors: the worker's standard error.

    Returns:
        The measurements by index.
    """
    assert p.stdout is not None
    rows: dict[int, Row] = {}
    case, state, rest = -1, "starting", b""
    # Its start (torch, the driver) counts as compiling. Ten seconds more, so that the worker can report itself that it
    # is late.
    limits = {"waiting": WAIT_SECONDS, "using": HOLD_SECONDS}
    used, since = 0.0, time.monotonic()
    while True:
        most = limits.get(state, limit + 10.0)
        budget = math.inf if state == "waiting" else seconds - used
        left = since + min(most, budget) - time.monotonic()
        if left <= 0 or not select.select([p.stdout], [], [], left)[0]:
            if case >= 0 and most <= budget:
                late = state not in limits
                rows[case] = Row(
                    why=f"took longer than {limit:.0f} s" if late else f"hung while {state} the GPU", again=not late
                )
            return rows
        data = os.read(p.stdout.fileno(), 1 << 16)
        if not data:
            ended = Row(why=f"the worker ended early (exit {p.wait()}){_last(errors)}", again=True)
            return {c: ended for c in cases} | rows
        used += 0.0 if state == "waiting" else time.monotonic() - since
        since = time.monotonic()
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            state = message.get("state", "starting")
            if "state" in message:
                case = message.get("case", case)
            else:
                ratio = message.get("ratio")
                sound = isinstance(ratio, float) and math.isfinite(ratio) and ratio > 0
                why = str(message.get("why") or "no number")
                rows[message["case"]] = Row(ratio) if sound else Row(None, why, bool(message.get("again")))
                case = -1


def environment(folder: Path) -> dict[str, str]:
    """Return the worker's environment: torch's default settings whatever this process has, and all files below a
    folder.

    Args:
        folder: for caches and temporary files.

    Returns:
        Environment variables.
    """
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_OPTIONS) and not k.upper().endswith(_SECRETS)}
    root = str(Path(kbx_env.__file__).resolve().parent.parent)
    kept["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [kept.get("PYTHONPATH")])])
    # One thread and no pool of compiler processes: other gradings run at the same time.
    return kept | {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TRITON_CACHE_DIR": str(folder / "triton"),
        "TMPDIR": str(folder / "tmp"), "CUDA_CACHE_PATH": str(folder / "cuda"), "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip


@contextlib.contextmanager
def _folder(lock_folder: Path | None) -> Iterator[Path]:
    """Provide a folder for the compiler's results: Triton kernels that solve the task, and pickles that it loads again.

    Runners cannot write to the folder and by Landlock cannot read it either (``confinement.unhidden``). Without
    Landlock, or if another user made the folder, a private folder is used and deleted afterwards.

    Args:
        lock_folder: of the GPU lock; ``None`` for a private folder.

    Yields:
        The folder, with a folder ``tmp`` in it.
    """
    hidden = None if lock_folder is None else lock_folder / HIDDEN
    if hidden is not None and landlock_version() > 0:
        with contextlib.suppress(OSError):
            hidden.mkdir(mode=0o700, exist_ok=True)
            (hidden / "tmp").mkdir(mode=0o700, exist_ok=True)
        if _ours(hidden) and _ours(hidden.parent):
            yield hidden
            return
    private = Path(tempfile.mkdtemp(prefix="kbx-compiled-"))
    try:
        (private / "tmp").mkdir()
        yield private
    finally:
        shutil.rmtree(private, ignore_errors=True)


def _ours(folder: Path) -> bool:
    """Return whether only this user can write to a folder."""
    try:
        about = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid() and not about.st_mode & 0o022
