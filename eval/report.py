"""The benchmark report: grades a policy over tasks and says what it can do.

    python eval/report.py --policy expert --backend cpu --split all --out runs/expert
    python eval/report.py --policy replay:answers.jsonl --out runs/answers --resume

Every grading is kept in ``gradings.sqlite`` as it ends; a killed run goes on with ``--resume``.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import math
import shutil
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script from a clone
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kbx_env.catalog import load_tasks
from kbx_env.errors import UsageError
from kbx_env.outcome import Fault, Outcome, Stage, Verdict
from kbx_env.store import Store, request_key
from kbx_env.task import Task

GradeFunction = Callable[..., Outcome]
_NOT_COMPILED = (Verdict.MALFORMED, Verdict.COMPILE_ERROR)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(prog="report.py", description="Grade policies and write a report.")
    p.add_argument(
        "--policy", action="append", required=True, help="expert, eager, zeros, replay:FILE, python:module:attr"
    )
    p.add_argument("--backend", default="auto", help="cpu, cuda or auto")
    p.add_argument("--split", default="eval", help="train, eval or all")
    p.add_argument("--tasks", default="*", help="glob over task ids, comma-separated")
    p.add_argument("--grading", default="contract", help="contract or paper")
    p.add_argument("--targets", default="sm_90", help="ahead-of-time targets, comma-separated, or none")
    p.add_argument("--workers", type=int, default=1, help="gradings at a time (1 is right for timing on one GPU)")
    p.add_argument("--seed", type=int, help="fix the inputs (default: secret and fresh)")
    p.add_argument("--no-timing", action="store_true")
    p.add_argument("--out", default="runs/report", help="folder of the report")
    p.add_argument("--resume", action="store_true", help="go on where a run into the same folder stopped")
    p.add_argument("--overwrite", action="store_true", help="delete an earlier report in the folder first")
    return p


def summarise(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Counts and rates over outcomes; infrastructure faults are left out and counted apart. Missing is ``None``."""
    known = [o for o in outcomes if o.fault is not Fault.INFRA]
    timed = [o.speedup for o in known if o.speedup is not None]
    n = len(known)

    def rate(k: int) -> float | None:
        return k / n if n else None

    return {
        "n": n,
        "infra_faults": len(outcomes) - n,
        "compile_rate": rate(sum(o.verdict not in _NOT_COMPILED for o in known)),
        "correct_rate": rate(sum(o.correct for o in known)),
        "faster_than_eager_rate": rate(sum(s > 1 for s in timed)) if timed else None,
        "geomean_speedup": math.exp(sum(map(math.log, timed)) / len(timed)) if timed else None,
        "verdicts": {v: k for v in map(str, Verdict) if (k := sum(str(o.verdict) == v for o in outcomes))},
    }


def _no_answer(task: Task, backend: str, grading: str) -> Outcome:
    return Outcome(task.id, Verdict.MALFORMED, Stage.SCREEN, backend, grading, Fault.POLICY, "the policy has no answer")


class Run:
    """Grades one policy over tasks; every outcome goes to the store at once."""

    def __init__(
        self, store: Store, grade: GradeFunction, settings: Mapping[str, Any], environment: Mapping[str, Any]
    ) -> None:
        self.store, self.grade, self.settings, self.environment = store, grade, dict(settings), dict(environment)

    def one(self, spec: str, policy: Any, task: Task) -> Outcome:
        """The stored outcome, or a new one."""
        from kbx_env.prompt import instruction

        observation = {
            "task": task.id,
            "prompt": instruction(task, self.settings["backend"]),
            "feedback": "",
            "turn": 0,
        }
        source = policy.act(observation)
        request = {
            "policy": spec,
            "task": task.id,
            "fingerprint": task.fingerprint,
            **self.settings,
            **self.environment,
        }
        data = None if source is None else source.encode("utf-8", "surrogatepass")
        key = request_key(request, data)
        outcome = self.store.get(key)
        if outcome is None:
            outcome = (
                _no_answer(task, self.settings["backend"], self.settings["grading"])
                if data is None
                else self.grade(task.id, data, **self.settings)
            )
            self.store.put(key, spec, 0, request, data, outcome)
        return outcome


def report_of(
    spec: str, tasks: Sequence[Task], outcomes: Mapping[str, Outcome], manifest: Mapping[str, Any]
) -> dict[str, Any]:
    """The JSON report of one policy."""
    from kbx_env.rewards.compose import load_preset

    reward = load_preset("default")
    categories = sorted({t.category for t in tasks})
    rows = []
    for t in tasks:
        o = outcomes[t.id]
        rows.append({**o.to_dict(), "category": t.category, "difficulty": t.difficulty, "reward": reward(o)})
    return {
        "policy": spec, "manifest": dict(manifest), "summary": summarise(list(outcomes.values())),
        "by_category": {c: summarise([outcomes[t.id] for t in tasks if t.category == c]) for c in categories},
        "tasks": rows,
    }  # fmt: skip


def run(a: argparse.Namespace, grade: GradeFunction | None = None) -> Path:
    """Grade and write; returns the folder."""
    from kbx_env.baselines.policy import make_policy
    from kbx_env.eval import pages

    from kbx_env.errors import UnknownName
    from kbx_env.grading.grader import GRADINGS, TARGETS, Grader, resolve_backend

    tasks = load_tasks(split=a.split, pattern=a.tasks)
    backend = resolve_backend(a.backend)
    if a.grading not in GRADINGS:
        raise UnknownName("grading", a.grading, GRADINGS)
    targets = tuple(t for t in a.targets.split(",") if t and t != "none")
    for t in targets:
        if t not in TARGETS:
            raise UnknownName("target", t, TARGETS)
    if a.workers < 1:
        raise UsageError(f"--workers is {a.workers}; at least 1")
    policies = [(spec, make_policy(spec)) for spec in dict.fromkeys(a.policy)]
    out = Path(a.out)
    database = out / "gradings.sqlite"
    if a.overwrite and database.is_file():
        shutil.rmtree(out)
    if database.exists() and not a.resume:
        raise UsageError(
            f"{out} holds a report already; use --resume to go on, --overwrite to start anew, or another --out"
        )
    out.mkdir(parents=True, exist_ok=True)
    import torch
    import triton

    device = torch.cuda.get_device_name(0) if backend == "cuda" else "cpu"
    environment = {"device": device, "torch": torch.__version__, "triton": triton.__version__}
    split = "train" if a.split == "train" else "eval"
    settings = {
        "backend": backend, "targets": targets, "grading": a.grading, "seed": a.seed, "timing": not a.no_timing, "split": split,
    }  # fmt: skip
    manifest = {**environment, **settings, "targets": list(targets), "tasks": len(tasks), "task_split": a.split,
                "seed_policy": "secret, fresh for every grading" if a.seed is None else f"fixed: {a.seed}"}  # fmt: skip
    store = Store(database)
    graders: list[Grader] = []
    local = threading.local()

    def graded(*args: Any, **options: Any) -> Outcome:
        if grade is not None:
            return grade(*args, **options)
        if not hasattr(local, "grader"):
            local.grader = Grader()
            graders.append(local.grader)
        return local.grader.grade(*args, **options)

    try:
        reports = _grade_all(Run(store, graded, settings, environment), policies, tasks, a.workers, manifest)
    finally:
        for g in graders:
            g.close()
        store.close()
    pages.write(out, reports)
    return out


def _grade_all(
    job: Run, policies: Sequence[tuple[str, Any]], tasks: Sequence[Task], workers: int, manifest: Mapping[str, Any]
) -> list[dict[str, Any]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    found: dict[str, dict[str, Outcome]] = {spec: {} for spec, _ in policies}
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bars = {spec: progress.add_task(spec, total=len(tasks)) for spec, _ in policies}
        pool = concurrent.futures.ThreadPoolExecutor(workers)
        try:
            jobs = {pool.submit(job.one, spec, policy, t): (spec, t.id) for spec, policy in policies for t in tasks}
            for done in concurrent.futures.as_completed(jobs):
                spec, task = jobs[done]
                found[spec][task] = done.result()
                progress.advance(bars[spec])
        except BaseException:
            # What has ended is in the store; what has not begun is given up.
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        pool.shutdown()
    return [report_of(spec, tasks, found[spec], manifest) for spec, _ in policies]


def main(argv: Sequence[str] | None = None) -> int:
    """Exit 0 when the report is written, 2 on bad usage, 130 when interrupted."""
    a = parser().parse_args(argv)
    try:
        out = run(a)
    except UsageError as e:
        print(f"report.py: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"interrupted; go on with --resume --out {a.out}", file=sys.stderr)
        return 130
    print(f"report: {out / 'report.html'}\n        {out / 'report.md'}\n        {out / 'report.json'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
