"""Requests to a driver are counted in each process, and stacks of the kernel are told in a word."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import driver_lock

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
ASKS = """
import fcntl, os

def ask(request):
    try:
        fcntl.ioctl(0, request, bytes(32))
    except OSError:  # no file of a driver
        pass

for request in (0xC020462A, 0xC020462A, 0xC020462B, 33, 0x5401):  # two controls, an allocation, memory, and of a terminal
    ask(request)
if os.fork() == 0:
    ask(0xC0204629)
    os._exit(0)
os.wait()
print(os.getpid())
"""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_requests_are_counted_in_each_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library, counts = tmp_path / "requests.so", tmp_path / "counts"
    counts.mkdir()
    source = BENCHMARKS / "driver_requests.c"
    subprocess.run(["gcc", "-Wall", "-Werror", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    environment = {**os.environ, "DRIVER_REQUESTS": str(counts), "LD_PRELOAD": str(library)}
    done = subprocess.run([sys.executable, "-c", ASKS], env=environment, capture_output=True, text=True, check=True)
    monkeypatch.setattr(driver_lock.os, "getpid", lambda: int(done.stdout))
    mine, others = driver_lock._made(counts)
    assert {k: n for k, n in mine.items() if k != "microseconds"} == {"control": 2, "alloc": 1, "unified memory": 1}
    assert {k: n for k, n in others.items() if k != "microseconds"} == {"free": 1}


def test_what_a_thread_does() -> None:
    assert driver_lock._stack(os.getpid(), os.getpid()) is not None
    assert driver_lock._stack(1 << 30, 1) is None
