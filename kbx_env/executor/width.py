"""How many gradings run at a time where nobody says it."""

from __future__ import annotations

import os

MAX_PER_GPU = 16
"""Gradings that share a GPU by default, however many cores there are: each worker takes 1.4 GiB of an H200 even while it waits, and
14 workers graded no more right kernels than 8 (docs/service.md, How many workers)."""
SPARE_CORES = 2
"""Cores of a machine that the default number leaves to the kernels that are timed."""


def per_gpu(cores: int, gpus: int = 1) -> int:
    """Return how many gradings share each GPU of a machine.

    Args:
        cores: of the machine.
        gpus: that grade.

    Returns:
        Gradings for each GPU, at least 1.
    """
    return max(1, min((cores - SPARE_CORES) // max(1, gpus), MAX_PER_GPU))


def on_this_machine(backend: str, gpus: int = 1, processes: int = 1) -> int:
    """Return how many gradings run at a time on this machine.

    Args:
        backend: ``cpu``: as many as there are cores. ``cuda``: see ``per_gpu``.
        gpus: GPUs that grade, of all processes.
        processes: processes of a training run on this machine, which divide the cores.

    Returns:
        Gradings at a time, at least 1: of one process on the CPU backend, of one GPU on CUDA.
    """
    cores = os.cpu_count() or 1
    return max(1, cores // processes) if backend == "cpu" else per_gpu(cores, gpus)
