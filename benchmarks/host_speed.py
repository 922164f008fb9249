"""Measure how fast a host does what the CPU tier consists of, to compare machines. It needs no GPU, and one core.

    python benchmarks/host_speed.py OUT.json [--repeats 5]

Each row is one activity: microseconds of one operation, the fastest of some repetitions and their median. A proof is made of Python
code, operations on small arrays, fresh memory, forks and messages between processes; on lent machines with a GPU it takes twice as
long as on a machine of two cores, and this tells which part does.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import numpy as np
import torch

from kbx_env import versions

PAGES = 4096
"""Pages that are touched at a time, of 4 KiB."""


def python_loop(count: int) -> None:
    """Add numbers up in Python."""
    total = 0
    for k in range(count):
        total += k & 7


def python_calls(count: int) -> None:
    """Call a function, look up names and attributes, and fill a dict."""

    def called(x: int, rows: dict[int, int]) -> int:
        rows[x & 63] = x
        return len(rows)

    rows: dict[int, int] = {}
    for k in range(count):
        called(k, rows)


def small_arrays(count: int) -> None:
    """Add arrays of 256 numbers, as the engine does for one operation of a block."""
    a, b = np.arange(256, dtype=np.float32), np.ones(256, np.float32)
    for _ in range(count):
        a + b


def large_array(count: int) -> None:
    """Sort 65,536 numbers, as judges do: one operation is one number."""
    values = np.random.default_rng(0).random(count)
    values.sort()


def torch_calls(count: int) -> None:
    """Multiply tensors of 256 numbers."""
    a = torch.ones(256)
    for _ in range(count):
        a * a


def fresh_pages(count: int) -> None:
    """Touch memory that the process has not had before: one operation is one page."""
    left = count
    while left > 0:
        with mmap.mmap(-1, PAGES * mmap.PAGESIZE) as memory:
            for page in range(min(PAGES, left)):
                memory[page * mmap.PAGESIZE] = 1
        left -= PAGES


def forks(count: int) -> None:
    """Fork this process, which has loaded torch, and wait for the end of the fork."""
    for _ in range(count):
        child = os.fork()
        if not child:
            os._exit(0)
        os.waitpid(child, 0)


def messages(count: int) -> None:
    """Send a message to another process and wait for its answer."""
    mine, other = socket.socketpair()
    child = os.fork()
    if not child:
        mine.close()
        while data := other.recv(4096):
            other.send(data)
        os._exit(0)
    other.close()
    for _ in range(count):
        mine.send(b"x" * 1024)
        mine.recv(4096)
    mine.close()
    os.waitpid(child, 0)


ACTIVITIES: tuple[tuple[Callable[[int], None], int], ...] = (
    (python_loop, 1_000_000), (python_calls, 500_000), (small_arrays, 200_000), (large_array, 1 << 16), (torch_calls, 100_000),
    (fresh_pages, 4 * PAGES), (forks, 20), (messages, 5_000),
)  # fmt: skip
"""Each with the operations of one repetition."""


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT.json")
    parser.add_argument("--repeats", type=int, default=5, help="of each activity (default: 5)")
    a = parser.parse_args()
    if a.repeats < 1:
        print(f"host_speed.py: --repeats takes 1 or more, not {a.repeats}", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for activity, count in ACTIVITIES:
        took = []
        for _ in range(a.repeats):
            began = time.perf_counter()
            activity(count)
            took.append(1e6 * (time.perf_counter() - began) / count)
        rows.append({"activity": activity.__name__, "best_us": round(min(took), 4), "median_us": round(statistics.median(took), 4)})
        print(f"{activity.__name__:14}{rows[-1]['best_us']:12.4f} us, median {rows[-1]['median_us']:.4f} us", flush=True)
    a.out.write_text(json.dumps({"environment": versions.environment("cpu"), "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
