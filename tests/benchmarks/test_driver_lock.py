"""What a thread does in the kernel is told in a word."""

from __future__ import annotations

import os

from benchmarks import driver_lock


def test_what_a_thread_does() -> None:
    assert driver_lock._stack(os.getpid(), os.getpid()) is not None
    assert driver_lock._stack(1 << 30, 1) is None
