"""Speedup over torch.compile, when asked for: a ratio compiled / eager that all gradings of a machine share.

A worker process (``compiled_worker``) compiles the baseline while nobody waits for the GPU, and times it against eager in pairs
while it has the GPU alone. The ratio is kept beside the device's peaks, measured again now and then, and multiplied with the
eager time of the grading at hand, which is measured anew every time. Nothing here can hurt a verdict.
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

LIMIT = 120.0
"""Seconds that compiling one case may take."""
SECONDS = 300.0
"""Seconds of one grading for all of its cases, waiting left out; the next grading goes on with those that are left."""
WAITING = 600.0
"""Seconds in line for the GPU after which a worker is given up."""
USING = 60.0
"""Seconds that a worker has the GPU alone at a time: a few suffice."""
USES = 50
"""Gradings that a ratio serves before it is measured again."""
TOLERANCE = 0.05
"""A fresh ratio within this of the kept one leaves it as it is."""
PAUSE = 0.05
_OPTIONS = ("TORCHINDUCTOR_", "TORCHDYNAMO_", "TORCH_COMPILE", "TORCH_LOGS", "TRITON_INTERPRET", "TRITON_CACHE")
_SECRETS = ("_KEY", "_TOKEN", "_SECRET")

Ask = Callable[[Task, Sequence[int], GpuHold], Mapping[int, "Row"]]


@dataclass(frozen=True)
class Row:
    """What a measurement said of a case: ``ratio`` compiled / eager, or ``why`` there is none; ``again``: not for good."""

    ratio: float | None = None
    why: str = ""
    again: bool = False


@dataclass(frozen=True)
class Kept:
    """A ratio that is kept, ``None`` where torch.compile has none: ``at`` seconds since 1970, after so many ``uses``."""

    ratio: float | None
    at: float
    uses: int = 0
    why: str = ""

    def stale(self, now: float) -> bool:
        """Whether it must be measured again; what failed is tried once a day, because failing may take minutes."""
        return not 0 <= now - self.at < KEPT_SECONDS or (self.ratio is not None and self.uses >= USES)


def beside(
    task: Task, timing: Timing, gpu: GpuHold, ask: Ask | None = None, now: Callable[[], float] = time.time,
    sizes: str = "published",
) -> Timing:  # fmt: skip
    """The timing with ``compiled_us`` for each case, ``compiled_speedup``, and a note for whatever is missing.

    Args:
        task: that was timed.
        timing: of a correct kernel; its runner has ended.
        gpu: not held: the worker asks for it.
        ask: measures cases, given by their place (``sizes.at``).
        now: seconds since 1970.
        sizes: that were timed.
    """
    first = 0 if sizes == "published" else len(task.timed)
    places = {c.label(): i for i, c in enumerate(timed(task, sizes), first)}
    wanted = [c.case for c in timing.cases]
    notes: list[str] = []
    found: Mapping[str, Kept] = {}
    try:
        found = _known(task, {label: places[label] for label in wanted}, gpu, ask or measured, now, notes)
    except Exception as e:  # a full disk, a bug of ours: the verdict and its speedup stand
        notes.append(f"torch.compile: not measured: {type(e).__name__}: {e}"[:300])
    cases = [_with(c, found.get(c.case)) for c in timing.cases]
    notes += [f"torch.compile: {c.case}: {k.why}" for c in cases if (k := found.get(c.case)) and k.ratio is None]
    logs = [
        math.log(c.speedup * k.ratio) for c in cases if (k := found.get(c.case)) is not None and k.ratio is not None
    ]
    whole = len(logs) == len(cases) > 0
    return replace(
        timing, cases=tuple(cases), notes=(*timing.notes, *notes),
        compiled_speedup=math.exp(sum(logs) / len(logs)) if whole else None,
    )  # fmt: skip


def _with(case: CaseTime, kept: Kept | None) -> CaseTime:
    known = kept is not None and kept.ratio is not None
    return replace(case, compiled_us=round(case.eager_us * kept.ratio, 3)) if known else case  # type: ignore[union-attr,operator]


def _known(
    task: Task, wanted: Mapping[str, int], gpu: GpuHold, ask: Ask, now: Callable[[], float], notes: list[str]
) -> dict[str, Kept]:  # fmt: skip
    file = kept_in(task, gpu)
    kept = _read(file)
    if any(label not in kept or kept[label].stale(now()) for label in wanted):
        # One measures, the others wait for what it finds.
        with _locked(file):
            kept = _read(file)
            due = [label for label in wanted if label not in kept or kept[label].stale(now())]
            rows = ask(task, [wanted[label] for label in due], gpu) if due else {}
            for label in due:
                found = _merged(label, kept.get(label), rows.get(wanted[label]), now(), notes)
                if found is not None:
                    kept[label] = found
            kept |= {k: replace(v, uses=v.uses + 1) for k, v in kept.items() if k in wanted}
            _write(file, task, kept)
    else:
        # Two who count at once may lose one: it is measured again a little later.
        kept |= {k: replace(v, uses=v.uses + 1) for k, v in kept.items() if k in wanted}
        _write(file, task, kept)
    return {label: kept[label] for label in wanted if label in kept}


def _merged(label: str, old: Kept | None, row: Row | None, now: float, notes: list[str]) -> Kept | None:
    """What is kept after a measurement, ``None`` for nothing."""
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


# --- what is kept ---------------------------------------------------------------------------------------------


def _versions() -> dict[str, str]:
    import triton

    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"
    return {"device": device, "torch": torch.__version__, "triton": triton.__version__, "cuda": str(torch.version.cuda)}


def kept_in(task: Task, gpu: GpuHold) -> Path | None:
    """The file of a task's ratios on this GPU, ``None`` without a lease; another version of anything has another file."""
    about = {"task": task.id, "fingerprint": task.fingerprint, **_versions()}
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
    return gpu.file(f"compiled-{digest[:20]}.json")


def _read(file: Path | None) -> dict[str, Kept]:
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        if file is not None:
            found = {k: Kept(**v) for k, v in json.loads(file.read_text())["cases"].items()}
            # Half a file, or one that somebody edited, is as good as none.
            return {k: v for k, v in found.items() if v.ratio is None or (math.isfinite(v.ratio) and v.ratio > 0)}
    return {}


def _write(file: Path | None, task: Task, kept: Mapping[str, Kept]) -> None:
    if file is None:
        return
    about = {"task": task.id, "fingerprint": task.fingerprint, **_versions()}
    with contextlib.suppress(OSError):
        new = file.with_name(f"{file.name}.{os.getpid()}-{time.monotonic_ns()}")
        new.write_text(json.dumps(about | {"cases": {k: asdict(v) for k, v in kept.items()}}))
        new.replace(file)


@contextlib.contextmanager
def _locked(file: Path | None) -> Iterator[None]:
    if file is None:
        yield
        return
    held = os.open(file.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)


# --- the worker -----------------------------------------------------------------------------------------------


def measured(
    task: Task, cases: Sequence[int], gpu: GpuHold, limit: float = LIMIT, seconds: float = SECONDS,
    command: Sequence[str] = (sys.executable, "-m", "kbx_env.grading.timing.compiled_worker"),
) -> dict[int, Row]:  # fmt: skip
    """Have a worker measure; a case that is missing was not reached."""
    lease = gpu.file("lease")
    with _folder(None if lease is None else lease.parent) as folder, tempfile.TemporaryFile(dir=folder / "tmp") as errors:
        asked = {
            "task": task.id,
            "cases": list(cases),
            "limit": limit,
            "lease": None if lease is None else str(lease.parent),
        }
        p = subprocess.Popen(
            list(command), env=environment(folder), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
            start_new_session=True,
        )  # fmt: skip
        with gpu.user(p.pid):
            try:
                assert p.stdin is not None
                with contextlib.suppress(BrokenPipeError):
                    p.stdin.write(json.dumps(asked).encode() + b"\n")
                    p.stdin.close()
                return _heard(p, cases, limit, seconds, errors)
            finally:
                with contextlib.suppress(OSError):
                    os.killpg(p.pid, signal.SIGKILL)
                p.wait()
                if p.stdout is not None:
                    p.stdout.close()


def _last(errors: BinaryIO) -> str:
    """The last line that the worker wrote about itself."""
    errors.seek(max(0, errors.seek(0, os.SEEK_END) - 4096))
    lines = errors.read().decode(errors="replace").strip().splitlines()
    return f": {lines[-1][:300]}" if lines else ""


def _heard(
    p: subprocess.Popen[bytes], cases: Sequence[int], limit: float, seconds: float, errors: BinaryIO
) -> dict[int, Row]:  # fmt: skip
    """What the worker tells, until it ends or is late. Waiting in line is nobody's time."""
    assert p.stdout is not None
    rows: dict[int, Row] = {}
    case, state, rest = -1, "starting", b""
    # It starts up (torch, the driver) on the compiler's account; a little more, so that it can tell itself that it was late.
    patience = {"waiting": WAITING, "using": USING}
    used, since = 0.0, time.monotonic()
    while True:
        most = patience.get(state, limit + 10.0)
        budget = math.inf if state == "waiting" else seconds - used
        left = since + min(most, budget) - time.monotonic()
        if left <= 0 or not select.select([p.stdout], [], [], left)[0]:
            if case >= 0 and most <= budget:
                late = state not in patience
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
            told = json.loads(line)
            state = told.get("state", "starting")
            if "state" in told:
                case = told.get("case", case)
            else:
                ratio = told.get("ratio")
                sound = isinstance(ratio, float) and math.isfinite(ratio) and ratio > 0
                why = str(told.get("why") or "no number")
                rows[told["case"]] = Row(ratio) if sound else Row(None, why, bool(told.get("again")))
                case = -1


def environment(folder: Path) -> dict[str, str]:
    """The worker's: torch's default settings, whatever this process' are, and every file below ``folder``."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_OPTIONS) and not k.upper().endswith(_SECRETS)}
    root = str(Path(kbx_env.__file__).resolve().parent.parent)
    kept["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [kept.get("PYTHONPATH")])])
    # One thread: it works while others grade, and forks no pool of processes.
    return kept | {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TRITON_CACHE_DIR": str(folder / "triton"),
        "TMPDIR": str(folder / "tmp"), "CUDA_CACHE_PATH": str(folder / "cuda"), "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip


@contextlib.contextmanager
def _folder(lease: Path | None) -> Iterator[Path]:
    """Where the compiler keeps its results: Triton kernels that solve the task, and pickles that it loads again.

    A runner may write to none of it, and by Landlock not read it either (``confine.unhidden``). Where that is not to be had, or
    somebody else made the folder, nothing is kept.
    """
    place = None if lease is None else lease / HIDDEN
    if place is not None and landlock_version() > 0:
        with contextlib.suppress(OSError):
            place.mkdir(mode=0o700, exist_ok=True)
            (place / "tmp").mkdir(mode=0o700, exist_ok=True)
        if _ours(place) and _ours(place.parent):
            yield place
            return
    private = Path(tempfile.mkdtemp(prefix="kbx-compiled-"))
    try:
        (private / "tmp").mkdir()
        yield private
    finally:
        shutil.rmtree(private, ignore_errors=True)


def _ours(folder: Path) -> bool:
    """Whether nobody else may write there."""
    try:
        about = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid() and not about.st_mode & 0o022
