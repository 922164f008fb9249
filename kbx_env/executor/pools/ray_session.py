"""Connects to Ray quietly, and says within seconds what is wrong when that cannot be done."""

from __future__ import annotations

import logging
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import kbx_env
from kbx_env.errors import UsageError

_PROBE_SECONDS = 20.0


def last_line(e: BaseException) -> str:
    """The last line of what Ray says: the cause, below the traceback of its worker."""
    lines = [line.strip() for line in str(e).splitlines() if line.strip()]
    return f"{type(e).__name__}: {lines[-1] if lines else ''}"[:300]


def connect(address: str, workers: int | None = None) -> tuple[Any, bool]:
    """Connect, or start Ray here, without a word on the terminal. A Ray that is already in use is left as it is.

    Args:
        address: ``local`` starts Ray, ``auto`` finds one that runs here, ``HOST:PORT`` is a cluster's head.
        workers: cores that a Ray started here shall offer at least; by default those of the machine.

    Returns:
        The module ``ray``, and whether it was connected here: then the caller owes a ``disconnect``.

    Raises:
        UsageError: Ray is not installed, or does not answer.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as e:
        raise UsageError('Ray is not installed; install it: pip install "kbx_env[rllib]"') from e
    if ray.is_initialized():
        return ray, False
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.CRITICAL}
    before = os.environ.get("PYTHONPATH")
    if address == "local":
        # A clone that is not installed: the actors find the package as the workers of the process lane do.
        root = str(Path(kbx_env.__file__).resolve().parent.parent)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, before]))
        cores = max(os.cpu_count() or 1, workers or 1)
        options |= {"include_dashboard": False, "num_cpus": cores, "object_store_memory": 100 << 20}
    elif address != "auto":
        _probe(address)
    # Ray prints a paragraph for every actor that dies, whatever log_to_driver says; the outcomes name each.
    ray._private.worker._worker_logs_enabled = False
    try:
        ray.init(address=address, **options)
    except Exception as e:
        ray._private.worker._worker_logs_enabled = True
        hint = "start a node on this machine: ray start --head, or --address=HOST:6379 for a head that runs elsewhere"
        raise UsageError(f"cannot use Ray at {address!r}: {last_line(e)}; {hint}") from e
    finally:
        os.environ.pop("PYTHONPATH", None)
        if before is not None:
            os.environ["PYTHONPATH"] = before
    return ray, True


def disconnect() -> None:
    """Undo ``connect``: end a Ray that it started, leave a cluster that it joined."""
    import ray

    ray.shutdown()
    ray._private.worker._worker_logs_enabled = True


def _probe(address: str) -> None:
    """Raise UsageError unless a Ray head answers: ``ray.init`` itself would try for minutes, printing warnings."""
    found = re.fullmatch(r"([\w.-]+):(\d{1,5})", address)
    if found is None:
        raise UsageError(f"Ray address {address!r}; local, auto, or HOST:PORT of the head (6379 by default)")
    try:
        socket.create_connection((found[1], int(found[2])), timeout=5).close()
        # In a process of its own, because a port that is open but no head of Ray keeps its client for minutes.
        ask = [sys.executable, "-c", f"import ray; ray._raylet.GcsClient(address={address!r})"]
        subprocess.run(ask, capture_output=True, timeout=_PROBE_SECONDS, check=True)
    except (OSError, OverflowError, subprocess.SubprocessError) as e:
        raise UsageError(f"nothing answers at the Ray address {address!r}; give HOST:PORT of a running head") from e
