"""Measure what the gradings of a pool do while they hold a GPU alone: seconds and requests to the driver of each step.

    python benchmarks/hold_steps.py OUT.json -- python eval/throughput.py --precision training --experts 1.0 --count 42 [...]

Everything after ``--`` is run as it is, with all workers it starts. OUT has a row for each hold of a GPU, and the means that are
printed. The requests are counted by a library that is loaded before all others (needs gcc), with their seconds; the figures of a
step are without those of the steps within it. Those of all processes of the command, from their start to their end, are told for
each hold as well.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import importlib.abc
import importlib.machinery
import json
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent
ROWS, COUNTS = "HOLD_STEPS_ROWS", "DRIVER_REQUESTS"
"""Environment variables: the folder of the rows, and the one that ``driver_requests.c`` reads."""
WORKERS, WATCHED = "kbx_env.executor.pools.fork_server_main", "kbx_env.grading.grader"
"""The process whose forks grade, and the module after whose import the steps are watched."""
Figures = dict[str, list[float]]
"""By step: seconds, runs, and for grader and runner each the requests and their seconds."""


def _requests(process: int) -> tuple[int, float]:
    """Return how many requests a process has made, and their seconds."""
    with contextlib.suppress(OSError):
        counts = list(struct.iter_unpack("QQ", Path(os.environ[COUNTS], str(process)).read_bytes()))
        return sum(made for made, _ in counts), sum(ns for _, ns in counts) / 1e9
    return 0, 0.0


def _of_all(counts: Path) -> tuple[int, float]:
    """Return how many requests all processes have made, and their seconds."""
    pairs = [pair for file in counts.iterdir() for pair in struct.iter_unpack("QQ", file.read_bytes())]
    return sum(made for made, _ in pairs), sum(ns for _, ns in pairs) / 1e9


def watch() -> None:
    """Watch the steps of all gradings of this process and its forks; each hold of a GPU becomes a row of a file in ``ROWS``."""
    sys.path.insert(0, str(ROOT))
    import alone_phases

    from kbx_env.grading.timing import gpu_lock, measuring

    now: dict[str, Any] = {}
    within, steps = list[list[float]](), Figures()

    def so_far() -> list[float]:
        return [time.perf_counter(), 0.0, *_requests(os.getpid()), *_requests(now.get("runner", 0))]

    class Steps(alone_phases.Phases):
        def watch(self, owner: Any, attribute: str, name: Any) -> None:
            real = getattr(owner, attribute)

            @functools.wraps(real)
            def watched(*args: Any, **more: Any) -> Any:
                if not self._alone:
                    return real(*args, **more)
                before = so_far()
                within.append([0.0] * len(before))
                try:
                    return real(*args, **more)
                finally:
                    whole = [b - a for a, b in zip(before, so_far(), strict=True)]
                    whole[1] = 1.0
                    own = steps.setdefault(name if isinstance(name, str) else name(*args, **more), [0.0] * len(whole))
                    inner = within.pop()
                    for k, figure in enumerate(whole):
                        own[k] += figure - inner[k]
                        if within and k != 1:
                            within[-1][k] += figure

            setattr(owner, attribute, staticmethod(watched) if isinstance(owner.__dict__[attribute], classmethod) else watched)

    run = measuring.Measuring.run

    def ran(measuring: Any, candidates: Sequence[Any], *more: Any) -> Any:
        now.update(task=measuring.task.id, cases=len(candidates), runner=candidates[0].session.runner.pid)
        return run(measuring, candidates, *more)

    measuring.Measuring.run = ran  # type: ignore[method-assign]
    Steps().watch_all()
    alone = gpu_lock.GpuHold.alone

    @contextlib.contextmanager
    def held(hold: Any, quiet: bool = True) -> Iterator[None]:
        with alone(hold, quiet):
            before = so_far()
            try:
                yield
            finally:
                whole = [b - a for a, b in zip(before, so_far(), strict=True)]
                row = {**now, "steps": {"in all": whole, **steps}}
                steps.clear()
        with Path(os.environ[ROWS], f"{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")

    gpu_lock.GpuHold.alone = held  # type: ignore[method-assign, assignment]


class _Watching(importlib.abc.Loader):
    """Loads ``WATCHED`` as ever, and watches it."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def create_module(self, spec: Any) -> types.ModuleType | None:
        made: types.ModuleType | None = self._real.create_module(spec)
        return made

    def exec_module(self, module: types.ModuleType) -> None:
        self._real.exec_module(module)
        watch()


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name == WATCHED else None
        if spec is not None:
            spec.loader = _Watching(spec.loader)
        return spec


def install() -> None:
    """Watch the workers, if this process is the one that forks them. Called by every Python that the command starts."""
    if ROWS in os.environ and any(WORKERS in argument for argument in sys.orig_argv):
        sys.meta_path.insert(0, _Finder())


def means(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the means of all holds, by step, the longest step first.

    Args:
        rows: as ``watch`` writes them.

    Returns:
        By step: ``ms``, ``runs``, and of grader and runner each the requests to the driver and their milliseconds.
    """
    sums: dict[str, list[float]] = collections.defaultdict(lambda: [0.0] * 6)
    for row in rows:
        for step, figures in row["steps"].items():
            sums[step] = [a + b for a, b in zip(sums[step], figures, strict=True)]
    names = ("ms", "runs", "grader_requests", "grader_requests_ms", "runner_requests", "runner_requests_ms")
    found = {step: {n: round((1e3 if n.endswith("ms") else 1) * s / len(rows), 2) for n, s in zip(names, figures, strict=True)}
             for step, figures in sums.items()}  # fmt: skip
    return dict(sorted(found.items(), key=lambda item: -item[1]["ms"]))


def counting(folder: Path) -> dict[str, str]:
    """Return an environment in which the requests of processes to the driver are counted. It needs gcc.

    Args:
        folder: for the library and the counts.
    """
    (counts := folder / "counts").mkdir()
    os.chmod(folder, 0o755)
    os.chmod(counts, 0o777)  # runners may have another user
    library = folder / "requests.so"
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-o", library, ROOT / "driver_requests.c", "-ldl"], check=True)
    return {**os.environ, COUNTS: str(counts), "LD_PRELOAD": str(library)}


def _run(command: Sequence[str], environment: dict[str, str]) -> int:
    """Run a command to its end; its status, or 130 if it was interrupted: what was measured by then counts."""
    with subprocess.Popen(command, env=environment) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:
            process.wait()
            return 130


def _parsed(line: str) -> list[dict[str, Any]]:
    """Return the row of a line; none of a line that a killed worker did not finish."""
    try:
        return [json.loads(line)]
    except ValueError:
        return []


def main(arguments: Sequence[str]) -> int:
    """Run the command, print and write."""
    if len(arguments) < 3 or arguments[1] != "--":
        print(__doc__, file=sys.stderr)
        return 2
    out = Path(arguments[0])
    with tempfile.TemporaryDirectory() as folder:
        (rows := Path(folder, "rows")).mkdir()
        environment = counting(Path(folder))
        at_start = f"import sys\nsys.path.append({str(ROOT)!r})\nimport hold_steps\nhold_steps.install()\n"
        Path(folder, "sitecustomize.py").write_text(at_start)
        path = os.pathsep.join(p for p in (folder, str(ROOT.parent), os.environ.get("PYTHONPATH")) if p)
        status = _run(arguments[2:], {**environment, ROWS: str(rows), "PYTHONPATH": path})
        found = [row for file in sorted(rows.iterdir()) for line in file.read_text().splitlines() for row in _parsed(line)]
        requests, seconds = _of_all(Path(environment[COUNTS]))
    if not found:
        print("hold_steps.py: no grading has held a GPU alone; the command needs a GPU and correct kernels", file=sys.stderr)
        return status or 2
    table = means(found)
    command = {"requests_a_hold": requests / len(found), "ms_a_hold": 1e3 * seconds / len(found)}
    result = {"command": list(arguments[2:]), "means": table, "whole_command": command, "rows": found}
    out.write_text(json.dumps(result, indent=1) + "\n")
    cases = statistics.mean(row["cases"] for row in found)
    if not table["in all"]["runner_requests"]:
        print("hold_steps.py: no request of a runner was counted; its process id may belong to another namespace", file=sys.stderr)
    print(f"{len(found)} holds of a GPU, {cases:.1f} cases left at their beginning; means of a hold:")
    print("in the whole command {requests_a_hold:.0f} requests ({ms_a_hold:.1f} ms) for each hold".format(**command))
    for step, row in table.items():
        sides = [f"{side} {row[f'{side}_requests']:6.1f} ({row[f'{side}_requests_ms']:6.1f} ms)" for side in ("grader", "runner")]
        print(f"{row['ms']:8.1f} ms {row['runs']:6.1f} x  requests: {', '.join(sides)}  {step}")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
