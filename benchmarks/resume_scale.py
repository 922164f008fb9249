"""Measure the time of a report whose gradings are all in the store: ``eval/report.py --resume`` with many rows.

python benchmarks/resume_scale.py OUT.json [--rows 100000] [--policy sampled] [--folder DIR] [--profile]

Experts of four tasks, correct and broken on purpose, are graded once on the CPU backend and stored many times as the samples of
one policy. The second run, which is measured, is a process of its own and grades nothing. ``sampled`` is a policy whose answers
all differ, so that the store finds them by sample; ``replay`` has a file of answers, which are found by source. With ``--folder``
the folder is kept and used again, by the same version of the grader only: another version would grade everything again.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kbx_env import jsonl
from kbx_env.outcome import Outcome
from kbx_env.spec.catalog import expert_source
from kbx_env.store import Row, Store, request_key

ROOT = Path(__file__).resolve().parent.parent
TASKS = ("math/softmax", "activation/gelu_fp16", "reduce/argmax", "loss/cross_entropy")
SAMPLES = "KBX_RESUME_SAMPLES"


class Sampled:
    """A policy with correct and broken answers in turn, each with its number; it does not repeat itself, like a model."""

    name = "sampled"

    def samples(self, task: str) -> int:
        """Return the number in the environment variable KBX_RESUME_SAMPLES."""
        return int(os.environ[SAMPLES])

    def act(self, observation: Mapping[str, Any]) -> str:
        """Return the expert's source, every other one broken."""
        return source_of(observation["task"], observation["sample"])


def source_of(task: str, sample: int) -> str:
    """Return the answer to a task in a sample."""
    source = expert_source(task)
    return (source if sample % 2 else source.replace(" + ", " - ").replace("other=", "othr=")) + f"\n# {sample}\n"


def arguments(folder: Path, kind: str) -> list[str]:
    """Return the arguments of ``eval/report.py`` for a kind of policy."""
    policy = "python:resume_scale:Sampled" if kind == "sampled" else f"replay:{folder}/answers.jsonl"
    return ["--policy", policy, "--backend", "cpu", "--split", "all", "--tasks", ",".join(t.split("/")[1] for t in TASKS),
            "--resume", "--out", str(folder / f"out-{kind}")]  # fmt: skip


def keep(folder: Path, kind: str, samples: int) -> float:
    """Make a report of two samples a task with the real grader, then copy its rows.

    Args:
        folder: folder of the report.
        kind: the policy, ``sampled`` or ``replay``.
        samples: samples of each task after copying.

    Returns:
        Seconds.
    """
    from kbx_env.eval import report

    start = time.perf_counter()
    _ask_for(folder, kind, 2)
    a = report.parser().parse_args(arguments(folder, kind))
    report.run(a)
    with contextlib.closing(Store(Path(a.out) / "gradings.sqlite")) as store:
        first = {(r.task, r.sample): r for r in store.records()}
        for task in TASKS:
            for begin in range(2, samples, 5000):
                store.put_all(_like(first[task, n % 2], n) for n in range(begin, min(samples, begin + 5000)))
    _ask_for(folder, kind, samples)
    return time.perf_counter() - start


def _ask_for(folder: Path, kind: str, samples: int) -> None:
    os.environ[SAMPLES] = str(samples)
    if kind == "replay":
        rows = ({"task": t, "predict": source_of(t, n)} for t in TASKS for n in range(samples))
        jsonl.write(folder / "answers.jsonl", rows)


def _like(row: Row, sample: int) -> tuple[str, str, int, dict[str, Any], bytes, Outcome]:
    source = source_of(row.task, sample).encode()
    request = {**row.settings, "policy": row.policy, "sample": sample}
    seconds = {k: round(v * (1 + sample % 97 / 97), 4) for k, v in row.outcome.seconds.items()}
    outcome = dataclasses.replace(row.outcome, seconds=seconds, source_sha256=hashlib.sha256(source).hexdigest())
    return request_key(request, source), row.policy, sample, request, source, outcome


def resume(folder: Path, kind: str, profile: bool) -> dict[str, Any]:
    """Do the measured run.

    Args:
        folder: folder of the report.
        kind: the policy, ``sampled`` or ``replay``.
        profile: print a profile.

    Returns:
        Seconds, processor seconds, peak memory, and a digest of the report.
    """
    how = ["-m", "cProfile", "-o", str(folder / "profile")] if profile else []
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    command = [sys.executable, *how, str(ROOT / "eval" / "report.py"), *arguments(folder, kind)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    took, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    report = folder / f"out-{kind}" / "report.json"
    return {
        "seconds": round(took, 1), "processor_s": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1),
        "peak_mb": round(after.ru_maxrss / 1024), "load_average": os.getloadavg()[0],
        "report_mb": round(report.stat().st_size / 1e6, 1), "report_sha": hashlib.sha256(report.read_bytes()).hexdigest(),
    }  # fmt: skip


def main() -> None:
    """Run the command: measure, write JSON and print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--policy", choices=("sampled", "replay"), default="sampled")
    parser.add_argument("--folder", type=Path, help="keep the first run here, and use it again")
    parser.add_argument("--profile", action="store_true", help="leave a profile of the main thread in the folder")
    a = parser.parse_args()
    samples = a.rows // len(TASKS)
    os.environ[SAMPLES] = str(samples)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")])
    sys.path.insert(0, str(ROOT / "benchmarks"))
    with tempfile.TemporaryDirectory() as own:
        folder: Path = a.folder or Path(own)
        folder.mkdir(parents=True, exist_ok=True)
        result: dict[str, Any] = {"rows": samples * len(TASKS), "policy": a.policy, "cores": os.cpu_count()}
        if not (folder / f"out-{a.policy}").exists():
            result["first_run_s"] = round(keep(folder, a.policy, samples), 1)
        result["resume"] = resume(folder, a.policy, a.profile)
    a.out.write_text(json.dumps(result, indent=1))
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
