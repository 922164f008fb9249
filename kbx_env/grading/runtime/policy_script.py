"""Runs a script that a policy wrote (its own tests) in a confined process with limits, apart from the grader."""

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
from kbx_env.protocol.script_process import BOOT, FILES, remove
from kbx_env.spec import packs

BACKENDS = ("cpu", "cuda")
"""Backends of a script."""
CHARACTERS = 8000
"""Last characters that are kept of stdout and of stderr."""
GRACE = 1.2
"""Seconds after the wall limit. A watcher process that has not ended by then is killed."""
REMOVE_SECONDS = 0.2
"""Seconds that a caller waits while the rest of the folder is removed."""
_KEPT = 4 * CHARACTERS + 4
"""Bytes kept of a stream: ``CHARACTERS`` of up to four bytes, and the rest of one that was cut."""
_PASSED_ON = (
    "PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_HOME",
    "CUDA_PATH", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "TRITON_PTXAS_PATH", "TRITON_LIBCUDA_PATH", "CC",
)  # fmt: skip
"""The only environment variables that a script sees. Others may hold secrets, such as API keys of model servers."""
_NAMESPACES = True
"""Whether a script gets its own process namespace. Tests set it to false, as on hosts that allow no namespaces."""


@dataclass(frozen=True)
class ScriptResult:
    """How a script ended. The script controls all fields but ``seconds``, so no verdict may depend on them.

    Attributes:
        status: exit status, or minus the signal that ended it; ``None`` if it was ended at the wall limit.
        stdout: its last 8,000 characters.
        stderr: its last 8,000 characters.
        seconds: wall time.
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

    The script can write in this folder only, and read this folder and the libraries. It reaches no network and no other
    process, and sees no secret of the environment. On the CPU backend Triton interprets kernels; all of torch is available.
    All processes that the script started end with it. Thread-safe.

    Args:
        files: texts by plain file name.
        entry: name of the file to run.
        backend: ``cpu`` or ``cuda``. On ``cuda`` the script shares the GPU lock, and waits while kernels are timed.
        wall: seconds that it may take, without that wait. A script that exceeds another limit (processes, memory, disk) is
            killed earlier; then ``stderr`` ends with the reason.

    Returns:
        How the script ended.

    Raises:
        UsageError: a file name, the entry, the backend or the wall limit is not accepted.
        SandboxError: the script could not be started.
    """
    _check(files, entry, backend, wall)
    gpu_lock = gpu_lock_of(backend)
    # The shared lock is enough: its processes end before the lock is released, and timing takes the lock alone.
    with contextlib.nullcontext() if gpu_lock is None else gpu_lock.shared():
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
            _remove_rest(folder)


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
        # Answers of models sometimes hold lone surrogates. They are passed on, so that Python reports the error.
        Path(folder, FILES, name).write_bytes(text.encode("utf-8", "surrogatepass"))


def _remove_rest(folder: str) -> None:
    """Remove what the watcher left of the folder; on a slow disk, finish in a background thread."""
    if os.path.exists(folder):
        thread = threading.Thread(target=remove, args=(folder,))
        thread.start()
        thread.join(REMOVE_SECONDS)


def _environment(folder: str, backend: str) -> dict[str, str]:
    env = {name: os.environ[name] for name in (*_PASSED_ON, packs.REGISTERED) if name in os.environ}
    env |= {
        "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1", "HOME": f"{folder}/home",
        "TMPDIR": f"{folder}/tmp", "TRITON_CACHE_DIR": f"{folder}/home/triton", "CUDA_CACHE_PATH": f"{folder}/home/cuda",
    }  # fmt: skip
    return env | ({"TRITON_INTERPRET": "1"} if backend == "cpu" else {})


def _run(folder: str, entry: str, backend: str, wall: float) -> ScriptResult:
    began = time.monotonic()
    control, watcher_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with control:
        with watcher_end:
            arguments = [str(Path(kbx_env.__file__).resolve().parent), str(watcher_end.fileno()), folder, entry, backend]
            process = subprocess.Popen(
                [sys.executable, "-I", "-B", "-u", "-X", "utf8", "-c", BOOT, *arguments,
                 repr(began + wall), "yes" if _NAMESPACES else "no"],
                pass_fds=[watcher_end.fileno()], env=_environment(folder, backend), cwd="/", start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )  # fmt: skip
        try:
            answer, streams = _listen(control, process, began + wall + GRACE)
            seconds = time.monotonic() - began
        finally:
            control.close()
            _end(process)
    stdout, stderr = (_text(stream, folder) for stream in streams)
    if answer is None and process.returncode > 0:
        raise SandboxError(f"a script could not be started: {stderr[-500:]}")
    if answer is None:  # the watcher was killed, and the script with it
        answer = {"status": None if seconds >= wall else process.returncode}
    if "error" in answer:
        raise SandboxError(f"a script could not be started: {answer['error']}")
    if "note" in answer:
        stderr = (stderr + f"\nkilled: {answer['note']}\n")[-CHARACTERS:]
    return ScriptResult(answer["status"], stdout, stderr, seconds)


def _listen(
    control: socket.socket, process: subprocess.Popen[bytes], until: float
) -> tuple[dict[str, Any] | None, list[bytearray]]:
    """Read both streams until the watcher reports how the script ended.

    Args:
        control: connection to the watcher.
        process: the watcher; the script writes to its streams.
        until: the latest end, in seconds of ``time.monotonic``.

    Returns:
        The report, ``None`` if there is none; and the last bytes of stdout and stderr.
    """
    assert process.stdout is not None and process.stderr is not None
    kept = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
    with selectors.DefaultSelector() as selector:
        for fd in kept:
            os.set_blocking(fd, False)
            selector.register(fd, selectors.EVENT_READ)
        selector.register(control, selectors.EVENT_READ)
        report = None
        while report is None and (left := until - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                if key.fileobj is control:
                    report = control.recv(4096)
                elif not _drain(key.fd, kept[key.fd]):
                    selector.unregister(key.fd)
    for fd, data in kept.items():
        # The rest of the pipe; not more than a pipe holds, in case a surviving process still writes.
        for _ in range(16):
            if not _drain(fd, data):
                break
    return json.loads(report) if report else None, list(kept.values())


def _drain(fd: int, kept: bytearray) -> bool:
    """Append what a stream has to the bytes kept. Return whether it is still open."""
    try:
        more = os.read(fd, 1 << 16)
    except BlockingIOError:
        return True
    kept += more
    if len(kept) > _KEPT:
        del kept[:-_KEPT]
    return bool(more)


def _text(data: bytearray, folder: str) -> str:
    # The path of the folder is useless to the policy, and differs every time.
    text = bytes(data).decode("utf-8", "replace")
    return text.replace(os.path.join(folder, FILES) + os.sep, "")[-CHARACTERS:]


def _end(process: subprocess.Popen[bytes]) -> None:
    """Wait for the watcher, which ends when the socket closes; if it does not, kill it and its script."""
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
