"""Runs a script that a policy wrote (its own tests) away from the grader: confined, bounded, nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kbx_env
from kbx_env.errors import SandboxError, UnknownName, UsageError
from kbx_env.grading.timing.gpu_lock import gpu_lock_of
from kbx_env.sandbox.script import BOOT, FILES, remove

BACKENDS = ("cpu", "cuda")
CHARACTERS = 8000
"""Of each stream, its last ones."""
GRACE = 1.2
"""Seconds after the wall limit at which a watcher that has not ended by itself is killed."""
REMOVE_SECONDS = 0.2
"""How long a caller waits for what the watcher could not remove in time."""
_KEPT = 4 * CHARACTERS + 4
"""Bytes that hold so many characters, and what is left of one that was cut."""
_PASSED_ON = (
    "PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_HOME",
    "CUDA_PATH", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "TRITON_PTXAS_PATH", "TRITON_LIBCUDA_PATH", "CC",
)  # fmt: skip
"""All that a script sees of the environment: keys of models' servers are in there."""
_NAMESPACES = True
"""Tests do without them, as some hosts must."""


@dataclass(frozen=True)
class ScriptResult:
    """How a script ended. Everything in it is the script's word: no verdict may rest on it.

    ``status`` is its exit status, negative for a signal, ``None`` when it was ended at the wall limit (seconds);
    ``stdout`` and ``stderr`` are cut to their last 8,000 characters.
    """

    status: int | None
    stdout: str
    stderr: str
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether it ended with status 0."""
        return self.status == 0


def run_script(files: Mapping[str, str], entry: str, *, backend: str = "cpu", wall: float = 30.0) -> ScriptResult:
    """Run ``entry`` with Python in a private folder that holds ``files``.

    The script may write there only, and read there and among the libraries; it reaches no network and no other process, and
    sees no secret of the environment. On the CPU backend Triton interprets kernels; torch is whole. When the script ends, so
    does whatever it started. Thread-safe.

    Args:
        files: texts by plain file name.
        entry: the one to run.
        backend: ``cpu`` or ``cuda``; there the script shares the GPU's lease, and waits while somebody times.
        wall: seconds that it may take, without that wait. A script that takes too much of something else (processes,
            memory, disk) is killed before; ``stderr`` ends with the reason.

    Raises:
        UsageError: a name, the backend or the wall limit makes no sense.
        SandboxError: the machine could not start it.
    """
    _check(files, entry, backend, wall)
    lease = gpu_lock_of(backend)
    # Shared is enough: its processes have ended before the lease is given back, and who times has the GPU alone.
    with contextlib.nullcontext() if lease is None else lease.shared():
        try:
            folder = tempfile.mkdtemp(prefix="kbx-script-")
        except OSError as e:
            raise SandboxError(f"no folder for a script: {e}") from e
        try:
            _fill(folder, files)
            return _run(os.path.realpath(folder), entry, backend, wall)
        except OSError as e:
            raise SandboxError(f"a script could not be started: {e}") from e
        finally:
            _removed(folder)


def _check(files: Mapping[str, str], entry: str, backend: str, wall: float) -> None:
    if backend not in BACKENDS:
        raise UnknownName("backend", backend, BACKENDS)
    if not 0 < wall < float("inf"):
        raise UsageError(f"wall is {wall!r}; accepted: a positive, finite number of seconds")
    for name in files:
        plain = isinstance(name, str) and name not in ("", ".", "..") and not set(name) & {"/", "\\", "\0"}
        with contextlib.suppress(UnicodeEncodeError):
            if plain and len(name.encode()) <= 200:
                continue
        raise UsageError(f"{name!r} is no plain file name; accepted: names like kernel.py, without folders")
    if entry not in files:
        raise UsageError(
            f"the entry {entry!r} is not among the files; accepted: {', '.join(map(str, files)) or 'none'}"
        )
    if backend == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise UsageError("backend 'cuda' needs a CUDA device; accepted here: cpu")


def _fill(folder: str, files: Mapping[str, str]) -> None:
    for name in (FILES, "home", "tmp"):
        os.mkdir(os.path.join(folder, name))
    for name, text in files.items():
        # Models' answers hold halves of surrogate pairs now and then: Python shall say what it thinks of them.
        Path(folder, FILES, name).write_bytes(text.encode("utf-8", "surrogatepass"))


def _removed(folder: str) -> None:
    """Usually it is gone already; on a slow disk the rest goes while the caller has its result."""
    if os.path.exists(folder):
        rest = threading.Thread(target=remove, args=(folder,))
        rest.start()
        rest.join(REMOVE_SECONDS)


def _environment(folder: str, backend: str) -> dict[str, str]:
    env = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    env |= {
        "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1", "HOME": f"{folder}/home",
        "TMPDIR": f"{folder}/tmp", "TRITON_CACHE_DIR": f"{folder}/home/triton", "CUDA_CACHE_PATH": f"{folder}/home/cuda",
    }  # fmt: skip
    return env | ({"TRITON_INTERPRET": "1"} if backend == "cpu" else {})


def _run(folder: str, entry: str, backend: str, wall: float) -> ScriptResult:
    began = time.monotonic()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours:
        with theirs:
            arguments = [str(Path(kbx_env.__file__).resolve().parent), str(theirs.fileno()), folder, entry, backend]
            process = subprocess.Popen(
                [sys.executable, "-I", "-B", "-u", "-X", "utf8", "-c", BOOT, *arguments,
                 repr(began + wall), "yes" if _NAMESPACES else "no"],
                pass_fds=[theirs.fileno()], env=_environment(folder, backend), cwd="/", start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )  # fmt: skip
        try:
            answer, streams = _listen(ours, process, began + wall + GRACE)
            seconds = time.monotonic() - began
        finally:
            ours.close()
            _end(process)
    stdout, stderr = (_text(stream, folder) for stream in streams)
    if answer is None and process.returncode > 0:
        raise SandboxError(f"a script could not be started: {stderr[-500:]}")
    if answer is None:  # something killed the watcher, and the script with it
        late = seconds >= wall
        answer = {"status": None if late else process.returncode}
    if "error" in answer:
        raise SandboxError(f"a script could not be started: {answer['error']}")
    if "note" in answer:
        stderr = (stderr + f"\nkilled: {answer['note']}\n")[-CHARACTERS:]
    return ScriptResult(answer["status"], stdout, stderr, seconds)


def _listen(
    ours: socket.socket, process: subprocess.Popen[bytes], until: float
) -> tuple[dict[str, Any] | None, list[bytearray]]:
    """Keep the streams empty until the watcher says how it went; ``None`` when it does not."""
    assert process.stdout is not None and process.stderr is not None
    kept = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
    with selectors.DefaultSelector() as selector:
        for fd in kept:
            os.set_blocking(fd, False)
            selector.register(fd, selectors.EVENT_READ)
        selector.register(ours, selectors.EVENT_READ)
        said = None
        while said is None and (left := until - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                if key.fileobj is ours:
                    said = ours.recv(4096)
                elif not _drain(key.fd, kept[key.fd]):
                    selector.unregister(key.fd)
    for fd, data in kept.items():
        # What is still in the pipe; no more than a pipe holds, in case somebody has survived who writes.
        for _ in range(16):
            if not _drain(fd, data):
                break
    return json.loads(said) if said else None, list(kept.values())


def _drain(fd: int, kept: bytearray) -> bool:
    try:
        more = os.read(fd, 1 << 16)
    except BlockingIOError:
        return True
    kept += more
    if len(kept) > _KEPT:
        del kept[:-_KEPT]
    return bool(more)


def _text(data: bytearray, folder: str) -> str:
    # Where it ran is of no use to anybody, and another name every time.
    text = bytes(data).decode("utf-8", "replace")
    return text.replace(os.path.join(folder, FILES) + os.sep, "")[-CHARACTERS:]


def _end(process: subprocess.Popen[bytes]) -> None:
    """The watcher hears the socket close, and ends; one that does not is killed, and its script with it."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(0.4)
    if process.poll() is None:
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(OSError):
                kill(process.pid, signal.SIGKILL)
        process.wait()
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()
