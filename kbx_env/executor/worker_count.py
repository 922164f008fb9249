"""How many workers grade at a time where the user does not say it."""

from __future__ import annotations

import os

MAX_PER_GPU = 16
"""Workers of one GPU by default, however many cores there are. Each takes 1.4 GiB of an H200 even while it waits, and with 14 of
them one GPU graded only 5 % more right kernels than with 8 (docs/service.md, How many workers)."""
SPARE_CORES = 2
"""Cores of a machine that the default leaves to the kernels that are timed."""


def workers_per_gpu(cores: int, gpus: int = 1) -> int:
    """Return the default number of workers for each GPU of a machine.

    Args:
        cores: CPU cores of the machine.
        gpus: GPUs of the machine that grade.

    Returns:
        Workers for each GPU, at least 1.
    """
    return max(1, min((cores - SPARE_CORES) // max(1, gpus), MAX_PER_GPU))


def default_workers(backend: str, gpus: int = 1, processes: int = 1) -> int:
    """Return the default number of workers on this machine: of one process on the CPU backend, of one GPU on CUDA.

    Args:
        backend: ``cpu``: as many workers as cores. ``cuda``: see ``workers_per_gpu``.
        gpus: GPUs of this machine that grade, for all processes; used on CUDA alone.
        processes: processes of a training run on this machine, which divide the cores; used on the CPU backend alone.

    Returns:
        Workers, at least 1.
    """
    cores = os.cpu_count() or 1
    return max(1, cores // processes) if backend == "cpu" else workers_per_gpu(cores, gpus)
