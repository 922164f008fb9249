"""The benchmark report: grades a policy over tasks and says what it can do.

    python eval/report.py --policy expert --backend cpu --split all --out runs/expert
    python eval/report.py --policy replay:answers.jsonl --out runs/answers --resume

Every grading is kept in ``gradings.sqlite`` as it ends; a killed run goes on with ``--resume``.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script from a clone
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kbx_env import versions
from kbx_env.catalog import load_tasks
from kbx_env.errors import KbxError, UsageError
from kbx_env.executor import Executor, InlineLane, Lane, ProcessLane, Request
from kbx_env.outcome import Fault, Outcome, Stage, Verdict
from kbx_env.ray_lane import RayLane
from kbx_env.store import Store
from kbx_env.task import Task

GradeFunction = Callable[..., Outcome]
EXECUTORS = ("process", "ray")
_OURS = ("gradings.sqlite", "gradings.sqlite-wal", "gradings.sqlite-shm", "report.json", "report.md", "report.html")


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
    p.add_argument("--torch-ops", default="strict", help="strict, or allow: wrappers may compute in torch")
    p.add_argument("--targets", default="sm_90", help="ahead-of-time targets, comma-separated, or none")
    p.add_argument("--executor", default="process", help="process: on this machine; ray: on a Ray cluster")
    p.add_argument("--ray-address", help="local (default), auto, or HOST:PORT of the head")
    p.add_argument("--workers", type=int, help="gradings at a time (default: 1; on Ray, one a GPU, or one a core)")
    p.add_argument("--seed", type=int, help="fix the inputs (default: secret and fresh)")
    p.add_argument("--no-timing", action="store_true")
    p.add_argument("--out", default="runs/report", help="folder of the report")
    p.add_argument("--resume", action="store_true", help="go on where a run into the same folder stopped")
    p.add_argument("--overwrite", action="store_true", help="delete an earlier report in the folder first")
    return p


def summarise(outcomes: Sequence[Outcome], timed: bool = True) -> dict[str, Any]:
    """Counts and rates over gradings; infrastructure faults are left out and counted apart. Missing is ``None``.

    Args:
        outcomes: the gradings.
        timed: whether correct kernels were timed; without timing, both speed figures are unknown, not 0.
    """
    from kbx_env.rewards.compose import load_term

    compiles = load_term("compiles")
    known = [o for o in outcomes if o.fault is not Fault.INFRA]
    timings = [o.timing for o in known if o.timing is not None]
    n = len(known)
    tasks = {o.task for o in known}

    def rate(k: int, of: int = n) -> float | None:
        return k / of if of else None

    return {
        "n": n,
        "infra_faults": len(outcomes) - n,
        "tasks": len(tasks),
        "compile_rate": rate(sum(compiles(o) == 1.0 for o in known)),
        "correct_rate": rate(sum(o.correct for o in known)),
        "solved_rate": rate(len({o.task for o in known if o.correct}), len(tasks)),
        # Faster means beyond the noise: the whole 95 % interval lies above 1.
        "faster_than_eager_rate": rate(sum(t.low > 1 for t in timings)) if timed else None,
        "geomean_speedup": math.exp(sum(math.log(t.speedup) for t in timings) / len(timings)) if timings else None,
        "verdicts": {v: k for v in map(str, Verdict) if (k := sum(str(o.verdict) == v for o in outcomes))},
    }


def _no_answer(task: Task, backend: str, grading: str) -> Outcome:
    return Outcome(task.id, Verdict.MALFORMED, Stage.SCREEN, backend, grading, Fault.POLICY, "the policy has no answer")


def requests(
    spec: str, policy: Any, task: Task, options: Mapping[str, Any], about: Mapping[str, Any], store: Store
) -> Iterator[tuple[Request | Outcome, int]]:
    """What one policy hands in for one task: (request or known outcome, sample number).

    A policy may have ``samples(task) -> int`` (default 1) and ``repeatable = True`` when it answers alike every
    time. One that is not repeatable is not asked again about what is already graded.

    Raises:
        UsageError: the policy raised an exception.
    """
    from kbx_env.answer import strip_fences
    from kbx_env.prompt import instruction

    record = {**about, "fingerprint": task.fingerprint}
    count = getattr(policy, "samples", None)
    samples = count(task.id) if callable(count) else 1
    if type(samples) is not int or samples < 1:
        raise UsageError(f"policy {spec!r}: samples({task.id!r}) is {samples!r}; a whole number, at least 1")
    for sample in range(samples):
        blank = Request(task.id, b"", options, record, spec, sample)
        stored = None if getattr(policy, "repeatable", False) else store.find(blank.record)
        if stored is not None:
            yield stored, sample
            continue
        prompt = instruction(task, options["backend"])
        seen = {"task": task.id, "prompt": prompt, "feedback": "", "turn": 0, "sample": sample}
        try:
            source = policy.act(seen)
        except (Exception, SystemExit) as e:
            raise UsageError(f"policy {spec!r} failed on {task.id}: {type(e).__name__}: {e}") from e
        if not isinstance(source, str | bytes | None):
            raise UsageError(f"policy {spec!r} answered {task.id} with a {type(source).__name__}; str, bytes or None")
        if source is None:
            outcome = _no_answer(task, options["backend"], options["grading"])
            store.put(blank.key, spec, sample, blank.record, None, outcome)
            yield outcome, sample
        else:
            data = strip_fences(source).encode("utf-8", "surrogatepass") if isinstance(source, str) else source
            yield Request(task.id, data, options, record, spec, sample), sample


def report_of(
    spec: str, tasks: Sequence[Task], outcomes: Mapping[tuple[str, int], Outcome], manifest: Mapping[str, Any]
) -> dict[str, Any]:
    """The JSON report of one policy; ``outcomes`` by task and sample."""
    from kbx_env.rewards.compose import load_preset

    reward = load_preset("default")
    timed = bool(manifest.get("timed"))
    by_id = {t.id: t for t in tasks}
    rows = []
    for (name, sample), o in sorted(outcomes.items()):
        t = by_id[name]
        more = {"sample": sample, "category": t.category, "difficulty": t.difficulty, "reward": reward(o)}
        rows.append({**o.to_dict(), **more})
    of = {c: [o for (name, _), o in outcomes.items() if by_id[name].category == c] for c in
          sorted({t.category for t in tasks})}  # fmt: skip
    return {
        "policy": spec, "manifest": dict(manifest), "summary": summarise(list(outcomes.values()), timed),
        "by_category": {c: summarise(found, timed) for c, found in of.items()}, "tasks": rows,
    }  # fmt: skip


def _folder(a: argparse.Namespace) -> Path:
    out = Path(a.out)
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {a.out!r} is a file; give a folder")
    if a.overwrite and a.resume:
        raise UsageError("--overwrite and --resume exclude each other: start anew, or go on")
    if a.overwrite:
        for name in _OURS:  # only what a report wrote: the folder may hold other things
            (out / name).unlink(missing_ok=True)
    elif out.is_dir() and any(out.iterdir()) and not a.resume:
        raise UsageError(f"{out} is not empty; use --resume to go on, --overwrite to start anew, or another --out")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UsageError(f"cannot write to --out {a.out!r}: {e.strerror}") from e
    return out


def _ray_lane(a: argparse.Namespace) -> tuple[RayLane, str]:
    """The lane of ``--executor ray`` and the device of its actors: GPUs where the cluster has them.

    Raises:
        UsageError: no Ray, no GPU for ``--backend cuda``, or GPUs whose times would not compare.
    """
    lane = RayLane(a.ray_address or "local", a.workers, gpus=False if a.backend == "cpu" else None)
    try:
        kinds = " and ".join(lane.kinds())
        if not lane.gpus and a.backend == "cuda":
            raise UsageError("backend 'cuda': no node of the Ray cluster has a GPU; use --backend cpu (no timing)")
        if not lane.gpus:
            return lane, "cpu"
        if " and " in kinds and not a.no_timing:
            raise UsageError(f"the cluster mixes {kinds}, whose times do not compare; use one kind, or --no-timing")
        device = lane.device()
        if device == "cpu":
            raise UsageError("torch finds no GPU in a Ray actor that was given one; use --backend cpu, or install it")
        return lane, device
    except KbxError as e:
        lane.close()
        raise UsageError(str(e)) from e


def run(a: argparse.Namespace, grade: GradeFunction | None = None) -> Path:
    """Grade and write; returns the folder. ``grade`` stands in for the real grader in tests."""
    import torch
    from kbx_env.baselines.policy import make_policy
    from kbx_env.eval import pages

    from kbx_env.errors import UnknownName
    from kbx_env.grading.grader import BACKENDS, GRADINGS, TARGETS, TORCH_OPS, Grader, resolve_backend

    tasks = load_tasks(split=a.split, pattern=a.tasks)
    if a.executor not in EXECUTORS:
        raise UnknownName("executor", a.executor, EXECUTORS)
    on_ray = a.executor == "ray"
    if a.ray_address and not on_ray:
        raise UsageError("--ray-address is for --executor ray; add that, or leave the address out")
    if a.backend not in BACKENDS:
        raise UnknownName("backend", a.backend, BACKENDS)
    if a.grading not in GRADINGS:
        raise UnknownName("grading", a.grading, GRADINGS)
    if a.torch_ops not in TORCH_OPS:
        raise UnknownName("torch policy", a.torch_ops, TORCH_OPS)
    targets = [t.strip() for t in a.targets.split(",") if t.strip() not in ("", "none")]
    for t in targets:
        if t not in TARGETS:
            raise UnknownName("target", t, TARGETS)
    workers = 1 if a.workers is None else a.workers
    if workers < 1:
        raise UsageError(f"--workers is {workers}; at least 1")
    backend = "" if on_ray else resolve_backend(a.backend)
    if backend == "cuda" and not a.no_timing and workers > 1:
        raise UsageError("--workers above 1 would spoil the timings on a shared GPU; use --workers 1 or --no-timing")
    policies = [(spec, make_policy(spec)) for spec in dict.fromkeys(a.policy)]
    with contextlib.ExitStack() as stack:
        lane: Lane
        if on_ray:
            lane, device = _ray_lane(a)
            stack.callback(lane.close)
            backend = "cpu" if device == "cpu" else "cuda"
        else:
            device = torch.cuda.get_device_name(0) if backend == "cuda" else "cpu"
        timed = backend == "cuda" and not a.no_timing
        out = _folder(a)
        environment = versions.environment("cpu" if on_ray else backend) | ({"device": device} if on_ray else {})
        settings = {
            "backend": backend, "targets": targets, "grading": a.grading, "seed": a.seed, "timing": not a.no_timing,
            "split": "train" if a.split == "train" else "eval", "torch_ops": a.torch_ops,
        }  # fmt: skip
        manifest = {**environment, **settings, "timed": timed, "tasks": len(tasks), "task_split": a.split,
                    "seed_policy": "secret, fresh for every grading" if a.seed is None else f"fixed: {a.seed}"}  # fmt: skip
        store = stack.enter_context(contextlib.closing(Store(out / "gradings.sqlite")))
        if grade is not None:
            lane = InlineLane(grade)
        elif not on_ray and workers == 1:
            lane = InlineLane(stack.enter_context(Grader()).grade)
        elif not on_ray:
            lane = ProcessLane(workers)
        # Timing a slow kernel on every case is allowed to take minutes; the sandbox's own wall limit is 30 s.
        # Everything is submitted at once: the bars then know how many there are.
        with Executor(lane, store=store, deadline=600 if timed else 120, capacity=sys.maxsize) as executor:
            found = _grade_all(executor, store, policies, tasks, settings, environment)
    pages.write(out, [report_of(spec, tasks, found[spec], manifest) for spec, _ in policies])
    return out


def _grade_all(
    executor: Executor, store: Store, policies: Sequence[tuple[str, Any]], tasks: Sequence[Task],
    settings: Mapping[str, Any], environment: Mapping[str, Any],
) -> dict[str, dict[tuple[str, int], Outcome]]:  # fmt: skip
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    found: dict[str, dict[tuple[str, int], Outcome]] = {spec: {} for spec, _ in policies}
    jobs: dict[concurrent.futures.Future[Outcome], tuple[str, str, int]] = {}
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bars = {spec: progress.add_task(spec, total=None) for spec, _ in policies}
        for spec, policy in policies:
            total = 0
            for task in tasks:
                for ask, sample in requests(spec, policy, task, settings, environment, store):
                    total += 1
                    if isinstance(ask, Outcome):
                        found[spec][task.id, sample] = ask
                        progress.advance(bars[spec])
                        continue
                    job = executor.submit(ask)
                    job.add_done_callback(lambda _, bar=bars[spec]: progress.advance(bar))
                    jobs[job] = (spec, task.id, sample)
            progress.update(bars[spec], total=total)
        for done in concurrent.futures.as_completed(jobs):
            spec, name, sample = jobs[done]
            found[spec][name, sample] = done.result()
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Exit 0 when the report is written, 2 on bad usage, 130 when interrupted."""
    a = parser().parse_args(argv)
    try:
        out = run(a)
    except UsageError as e:
        print(f"report.py: {e}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, concurrent.futures.CancelledError):
        print("interrupted; nothing that ended is lost: go on with the same command and --resume", file=sys.stderr)
        return 130
    print(f"report: {out / 'report.html'}\n        {out / 'report.md'}\n        {out / 'report.json'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
