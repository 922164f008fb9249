"""How many threads torch computes with in a process that grades."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

# A process that was forked after torch had started its OpenMP threads would wait for them forever: they are not there.
os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))


@contextlib.contextmanager
def single_threaded(on: bool = True) -> Iterator[None]:
    """Let torch compute in the calling thread alone, if ``on``.

    Cases of the CPU backend are small, and other threads slow them down where processes compete for the cores: a grading of
    ``math/bitwise_and_binomial`` took 29 seconds of processor time instead of 2.7 (2 threads, 2 busy cores).

    Args:
        on: false to change nothing.
    """
    before = torch.get_num_threads()
    if on:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if on:
            torch.set_num_threads(before)
