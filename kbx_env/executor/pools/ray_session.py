"""Connects to Ray without terminal output. Reports within seconds why a connection is not possible."""

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
from kbx_env.extras import install_hint

_PROBE_SECONDS = 20.0
"""Time limit of the process that asks a Ray head for an answer."""


def last_line(e: BaseException) -> str:
    """Return type and last line of an error of Ray, at most 300 characters: the cause stands below a traceback."""
    lines = [line.strip() for line in str(e).splitlines() if line.strip()]
    return f"{type(e).__name__}: {lines[-1] if lines else ''}"[:300]


def connect(address: str, workers: int | None = None) -> tuple[Any, bool]:
    """Connect to a cluster, or start Ray on this machine, without terminal output. An existing connection is kept.

    Args:
        address: ``local`` starts Ray, ``auto`` finds one that runs on this machine, ``HOST:PORT`` is a cluster's head.
        workers: CPUs that a Ray started here offers at least; by default the number of cores.

    Returns:
        The module ``ray``, and whether this call connected it: then the caller must call ``disconnect``.

    Raises:
        UsageError: Ray is not installed, or does not answer.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as e:
        raise UsageError(f"Ray is not installed; install it: {install_hint('rllib')}") from e
    if ray.is_initialized():
        return ray, False
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.CRITICAL}
    before = os.environ.get("PYTHONPATH")
    if address == "local":
        # For a clone that is not installed: the actors find the package as the workers of ``ProcessPool`` do.
        root = str(Path(kbx_env.__file__).resolve().parent.parent)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, before]))
        cores = max(os.cpu_count() or 1, workers or 1)
        options |= {"include_dashboard": False, "num_cpus": cores, "object_store_memory": 100 << 20}
    elif address != "auto":
        _probe(address)
    # Ray prints a paragraph for every actor that dies, even without log_to_driver; the outcomes report them.
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
    """Undo ``connect``: stop the Ray that it started, or leave the cluster that it joined."""
    import ray

    ray.shutdown()
    ray._private.worker._worker_logs_enabled = True


def _probe(address: str) -> None:
    """Raise ``UsageError`` unless a Ray head answers: ``ray.init`` would try for minutes and print warnings."""
    found = re.fullmatch(r"([\w.-]+):(\d{1,5})", address)
    if found is None:
        raise UsageError(f"Ray address {address!r}; local, auto, or HOST:PORT of the head (6379 by default)")
    try:
        socket.create_connection((found[1], int(found[2])), timeout=5).close()
        # In a separate process: an open port that is not a Ray head blocks the client for minutes.
        command = [sys.executable, "-c", f"import ray; ray._raylet.GcsClient(address={address!r})"]
        subprocess.run(command, capture_output=True, timeout=_PROBE_SECONDS, check=True)
    except (OSError, OverflowError, subprocess.SubprocessError) as e:
        raise UsageError(f"nothing answers at the Ray address {address!r}; give HOST:PORT of a running head") from e
