"""Measure what short calls take on a GPU beside their kernels: by what is enqueued behind them, and by the process.

    python benchmarks/short_calls.py OUT.json [--processes 12] [--blocks 24]

Fresh processes, one after the other, time the same calls with the grader's stopwatch: an empty kernel, relu of 2^17 numbers by
Triton and by torch, three relus in a row. *Copy*: the result is copied and overwritten behind the call, as in a runner; eager has
no copy. *Host waits*: between calls nothing is enqueued, as the stopwatch does for short calls. The first process is left out,
because the GPU's clock still rises. The table has means over processes in microseconds, standard deviations between processes and
within one, and what is left between processes once each is levelled by its empty kernels (``ratio.levelled``).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch
import triton
import triton.language as tl
from rich.console import Console
from rich.progress import track
from rich.table import Table

from kbx_env import versions
from kbx_env.device import stopwatch

NUMBERS = 1 << 17
CALLS = ("empty", "relu by Triton", "relu by torch", "three relus")
NO_GPU = 3
LONGEST_US = 30.0
"""Longer calls were interrupted."""


@triton.jit
def _relu(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < n)
    tl.store(y + i, tl.where(v != v, v, tl.maximum(v, 0.0)), mask=i < n)


def _by_triton(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    _relu[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), BLOCK=1024)
    return y


def _calls(watch: stopwatch.Stopwatch) -> dict[str, Callable[[dict[str, Any]], Any]]:
    calls: tuple[Callable[[dict[str, Any]], Any], ...] = (
        lambda s: watch._driver.wait(0), lambda s: _by_triton(s["x"]), lambda s: torch.relu(s["x"]),
        lambda s: _by_triton(_by_triton(_by_triton(s["x"]))),
    )  # fmt: skip
    return dict(zip(CALLS, calls, strict=True))


def measured(blocks: int) -> list[dict[str, Any]]:
    """Measure in this process.

    Args:
        blocks: of five calls, for each kind of call and each way to time it.

    Returns:
        A row for each: microseconds of its calls, and of an empty kernel in ``launch_us``.
    """
    rows = []
    for copy in (False, True):
        watch = stopwatch.Stopwatch("cuda", guards=copy)
        for name, call in _calls(watch).items():
            for waits in (False, True) if not copy or name != CALLS[0] else ():  # an empty kernel has no result to copy
                stopwatch.WAIT_BELOW_US = float("inf") if waits else 0.0
                watch.prepare(call, [{"x": torch.randn(NUMBERS, device="cuda")} for _ in range(3)])
                watch._short, us = waits, list[float]()
                for block in range(blocks + 1):
                    watch.shuffle(block)
                    found = watch.measure({"order": [(block + k) % 3 for k in range(5)]})
                    late = set(found["late"])
                    us += [u for k, u in enumerate(found["us"]) if block and k not in late and u < LONGEST_US]
                rows.append({"call": name, "copy": copy, "waits": waits, "us": us, "launch_us": watch.time_empty()["us"]})
        watch.close()
    return rows


def _in_child(blocks: int, out: Path) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            from kbx_env.sandbox import limits

            if torch._C._cuda_getDeviceCount() == 0:
                os._exit(NO_GPU)
            limits.start_driver()
            limits.make_context()
            limits.use_context()
            out.write_text(json.dumps(measured(blocks)))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def summary(processes: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return a row for each call and way to time it, over processes."""
    rows = []
    for k, first in enumerate(processes[0]):
        each = [p[k] for p in processes]
        means = [statistics.mean(r["us"]) for r in each]
        level = [m - r["launch_us"] for m, r in zip(means, each, strict=True)]
        rows.append({
            "call": first["call"], "copy": first["copy"], "waits": first["waits"], "us": statistics.mean(means),
            "between_processes": statistics.stdev(means), "levelled": statistics.stdev(level),
            "of_a_call": statistics.mean(statistics.pstdev(r["us"]) for r in each),
        })  # fmt: skip
    return rows


def main() -> int:
    """Measure, print and write; return 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--processes", type=int, default=12)
    parser.add_argument("--blocks", type=int, default=24)
    a = parser.parse_args()
    if a.processes < 3 or a.blocks < 1:
        print("short_calls.py: takes --processes of 3 or more, and --blocks of 1 or more", file=sys.stderr)
        return 2
    processes = []
    for k in track(range(a.processes), "processes"):
        one = a.out.with_suffix(f".{k}.json")
        if code := _in_child(a.blocks, one):
            print("short_calls.py: " + ("torch finds no GPU here" if code == NO_GPU else "a process failed"), file=sys.stderr)
            return 2 if code == NO_GPU else 1
        processes.append(json.loads(one.read_text()))
        one.unlink()
    rows = summary(processes[1:])
    a.out.write_text(json.dumps({"environment": versions.environment("cuda"), "rows": rows, "processes": processes}) + "\n")
    table = Table("call", "copy", "host waits", "us", "sd between processes", "levelled", "sd of a call", title="microseconds")
    for r in rows:
        figures = [f"{r[name]:.3f}" for name in ("us", "between_processes", "levelled", "of_a_call")]
        table.add_row(r["call"], "yes" if r["copy"] else "no", "yes" if r["waits"] else "no", *figures)
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
