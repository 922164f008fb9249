"""Writes the benchmark report: grades policies over tasks, and summarises the results.

    python eval/report.py --policy expert --backend cpu --split all --out runs/expert
    python eval/report.py --policy replay:answers.jsonl --out runs/answers --resume

Every grading is stored in ``gradings.sqlite`` as soon as it ends; ``--resume`` continues a killed run.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import functools
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kbx_env.baselines.llm import access
from kbx_env.baselines.llm.method import Method
from kbx_env.eval import pages
from kbx_env.eval.calibration import calibrate
from kbx_env.eval.progress import asking
from kbx_env.eval.regrade import beside, chosen, grade_beside
from kbx_env.eval.runner import Answer, Asker, ask_all

from kbx_env import versions
from kbx_env.deadlines import deadline_of
from kbx_env.errors import UsageError
from kbx_env.executor import Executor, InlinePool, ProcessPool, WorkerPool
from kbx_env.executor.direct import ATTEMPTS
from kbx_env.executor.pools.gpu import gpu_pool, uuids_of
from kbx_env.executor.pools.ray_pool import open_ray
from kbx_env.executor.pools.remote import DEADLINE, WIDTH, RemotePool
from kbx_env.outcome import Fault, Outcome, Verdict
from kbx_env.spec import packs
from kbx_env.spec.catalog import load_tasks, task_ids
from kbx_env.spec.task import Task
from kbx_env.store import Store

if TYPE_CHECKING:
    from rich.status import Status

GradeFunction = Callable[..., Outcome]
EXECUTORS = ("process", "ray")
"""Where gradings run: in processes of this machine, or on a Ray cluster."""
_DATABASES = ("gradings.sqlite", access.CALLS)
_OURS = (
    *(d + end for d in _DATABASES for end in ("", "-wal", "-shm")), "report.json", "report.md", "report.html", "tasks.csv",
    "tasks.parquet",
)  # fmt: skip
"""Files of a report in its folder."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    p = argparse.ArgumentParser(description="Grade policies and write a report.")
    p.add_argument(
        "--policy", action="append", required=True,
        help="expert, eager, zeros, replay:FILE, autotriton, claude, deepseek-coder, geak, kernelagent, template-search, "
             "hf:FOLDER[,turns=N], python:module:attr; again for several",
    )  # fmt: skip
    p.add_argument("--compare", action="append", default=[], metavar="DIR", help="show an earlier report beside this one")
    p.add_argument("--backend", default="auto", help="cpu, cuda or auto")
    p.add_argument("--split", help="train, eval, all, or a split of a task pack (default: all with --tasks, else eval)")
    p.add_argument("--tasks-from", metavar="PACK", help="task packs: folders or names, comma-separated (default: KBX_TASKS)")
    p.add_argument("--tasks", metavar="GLOB", help="globs over task ids, comma-separated (default: all tasks of the split)")
    p.add_argument("--answered", action="store_true", help="leave out tasks for which a replay has no recorded answer")
    p.add_argument(
        "--gradings", default="contract", metavar="NAME[,NAME]",
        help="contract or paper; with a second one, answers are also graded under that, and the report says why the two differ",
    )  # fmt: skip
    p.add_argument("--torch-ops", default="strict", help="strict, or allow: wrappers may compute in torch")
    p.add_argument("--sizes", default="published", help="what is timed or estimated: published, or held-out sizes")
    p.add_argument("--targets", default="sm_90", help="ahead-of-time targets, comma-separated, all or none")
    p.add_argument("--executor", default="process", help="process: on this machine; ray: on a Ray cluster")
    p.add_argument("--ray-address", help="local (default), auto, or HOST:PORT of the head")
    p.add_argument("--per-gpu", type=int, help="Ray: gradings that share a GPU, timing has it alone; default: what the cores allow")
    p.add_argument("--grader", metavar="URL", help="grade by a service (kbx serve); its token is in KBX_TOKEN")
    p.add_argument("--workers", type=int, help="gradings at a time (default: 1; Ray: what it has room for); on each of --gpus")
    p.add_argument("--gpus", type=int, metavar="N", help="grade on so many GPUs of this machine (default: 1; more machines: Ray)")
    p.add_argument("--seed", type=int, help="fix the inputs (default: secret and fresh)")
    p.add_argument("--aa", type=int, default=0, metavar="N", help="time kernels against themselves N times, for the noise (GPU)")
    p.add_argument("--no-timing", action="store_true")
    p.add_argument("--compiled", action="store_true", help="also tell the speedups over torch.compile (GPU); rewards stay the same")
    p.add_argument("--estimate", metavar="GPU", help="estimate device time on a GPU, such as h200 (CPU backend; no measurement)")
    p.add_argument("--out", default="runs/report", help="folder of the report")
    p.add_argument("--resume", action="store_true", help="go on where a run into the same folder stopped")
    p.add_argument("--overwrite", action="store_true", help="delete an earlier report in the folder first")
    access.add_arguments(p)
    return p


def summarise(outcomes: Sequence[Outcome], timed: bool = True) -> dict[str, Any]:
    """Return counts and rates over gradings. Infrastructure faults are left out and counted separately.

    Args:
        outcomes: the gradings.
        timed: whether correct kernels were timed; without timing, both speed figures are unknown, not 0.

    Returns:
        The ``summary`` of ``report.json``; ``None`` for what is not known.
    """
    from kbx_env.rewards.compose import load_term

    compiles = load_term("compiles")
    known = [o for o in outcomes if o.fault is not Fault.INFRA]
    timings = [o.timing for o in known if o.timing is not None and not o.timing.void]
    compiled = [t.compiled_speedup for t in timings if t.compiled_speedup is not None]
    n = len(known)
    tasks = {o.task for o in known}

    def rate(k: int, of: int = n) -> float | None:
        return k / of if of else None

    return {
        "n": n,
        "infra_faults": len(outcomes) - n,
        "pass_at": pass_at(known),
        "tasks": len(tasks),
        "compile_rate": rate(sum(compiles(o) == 1.0 for o in known)),
        "correct_rate": rate(sum(o.correct for o in known)),
        "solved_rate": rate(len({o.task for o in known if o.correct}), len(tasks)),
        # A kernel counts as faster if its whole 95 % interval lies above 1.
        "faster_than_eager_rate": rate(sum(t.low > 1 for t in timings)) if timed else None,
        "geomean_speedup": math.exp(sum(math.log(t.speedup) for t in timings) / len(timings)) if timings else None,
        "geomean_compiled_speedup": math.exp(statistics.fmean(map(math.log, compiled))) if compiled else None,
        "compiled_n": len(compiled) or None,
        "void": sum(o.timing is not None and o.timing.void for o in known),
        "verdicts": {v: k for v in map(str, Verdict) if (k := sum(str(o.verdict) == v for o in outcomes))},
    }


def pass_at(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Return unbiased pass@k, the mean over tasks (Chen et al. 2021).

    pass@k is the probability that at least one of k samples, drawn without replacement, is correct.

    Args:
        outcomes: judged gradings.

    Returns:
        k -> pass@k for k = 1, 2, 4, ... up to the smallest number of judged samples of a task; empty for no grading.
    """
    by_task: dict[str, list[bool]] = {}
    for o in outcomes:
        by_task.setdefault(o.task, []).append(o.correct)
    least, k, found = min(map(len, by_task.values()), default=0), 1, {}
    while k <= least:
        found[str(k)] = statistics.fmean(pass_at_k(len(s), sum(s), k) for s in by_task.values())
        k = k * 2 if k * 2 <= least or k == least else least
    return found


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Return the probability that at least one of ``k`` samples drawn without replacement is correct.

    Args:
        n: number of samples.
        correct: number of correct samples.
        k: number of samples drawn.

    Returns:
        1 - C(n - correct, k) / C(n, k).
    """
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def pass_curve(n: int, correct: int, most: int) -> list[float]:
    """Return ``pass_at_k`` for k = 1 to ``most``.

    Each value is computed from the one before: a binomial coefficient of thousands takes milliseconds.

    Args:
        n: number of samples.
        correct: number of correct samples.
        most: the largest k.

    Returns:
        One probability for each k.
    """
    missed, chances = 1.0, []
    for drawn in range(most):
        missed *= max(0, n - correct - drawn) / (n - drawn)
        chances.append(1.0 - missed)
    return chances


def spending(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return the resources that answers took.

    Args:
        answers: the answers.

    Returns:
        Calls, tokens, dollars (``None`` if no server reported them), own scripts, gradings, and seconds of wall time.
    """
    spent = [a.spent for a in answers if a.spent is not None]
    sums: dict[str, Any] = {
        name: sum(s[name] for s in spent) if spent else None
        for name in ("calls", "prompt_tokens", "completion_tokens", "untold", "scripts")
    }
    dollars = [s["dollars"] for s in spent if s["dollars"] is not None]
    seconds = [a.seconds for a in answers if a.seconds is not None]
    more = {"dollars": sum(dollars) if dollars else None, "model_seconds": sum(s["seconds"] for s in spent) if spent else None}
    return {**sums, **more, "gradings": sum(a.gradings for a in answers), "seconds": sum(seconds) if seconds else None}


def report_of(
    spec: str, policy: Any, tasks: Sequence[Task], answers: Mapping[tuple[str, int], Answer], manifest: Mapping[str, Any],
    other: Mapping[tuple[str, int], Outcome] | None = None, second: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Return the JSON report of one policy.

    Args:
        spec: the policy's name on the command line.
        policy: the policy.
        tasks: the tasks.
        answers: by task and sample.
        manifest: of the run: device, versions, settings.
        other: gradings of the same answers under the second grading, by task and sample.
        second: the second grading, if there is one.

    Returns:
        Plain JSON types.
    """
    from kbx_env.rewards.compose import load_preset, load_term

    reward, compiles = load_preset("default"), load_term("compiles")
    timed = bool(manifest.get("timed"))
    by_id = {t.id: t for t in tasks}
    rows = []
    shared: dict[str, Any] = {}  # values that are equal in thousands of rows are in memory once
    for (name, sample), a in sorted(answers.items()):
        t = by_id[name]
        more = {"sample": sample, "category": t.category, "difficulty": t.difficulty, "reward": reward(a.outcome),
                "compiled": compiles(a.outcome) == 1.0,
                "spent": spending([a]), "turns": list(a.turns), "notes": dict(a.notes)}  # fmt: skip
        row = {**a.outcome.to_dict(), **more}
        rows.append(row | {k: shared.setdefault(f"{k} {row[k]!r}", row[k]) for k in ("manifest", "spent")})
    of = {c: [a.outcome for (name, _), a in answers.items() if by_id[name].category == c] for c in
          sorted({t.category for t in tasks})}  # fmt: skip
    about = getattr(policy, "about", None)
    untimed = functools.partial(summarise, timed=False)
    compared = {} if other is None or second is None else {"beside": beside(answers, other, second, untimed)}
    return {
        "policy": spec, "about": about() if callable(about) else {}, "manifest": dict(manifest),
        "summary": {**summarise([a.outcome for a in answers.values()], timed), "spent": spending(list(answers.values()))},
        "by_category": {c: summarise(found, timed) for c, found in of.items()}, **compared, "tasks": rows,
    }  # fmt: skip


def _folder(a: argparse.Namespace) -> Path:
    out = Path(a.out)
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {a.out!r} is a file; give a folder")
    if a.overwrite and a.resume:
        raise UsageError("--overwrite and --resume exclude each other: start anew, or go on")
    if a.overwrite:
        for name in _OURS:  # only files of a report: the folder may contain others
            (out / name).unlink(missing_ok=True)
        pages.remove(out)
    elif out.is_dir() and any(out.iterdir()) and not a.resume:
        raise UsageError(f"{out} is not empty; use --resume to go on, --overwrite to start anew, or another --out")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UsageError(f"cannot write to --out {a.out!r}: {e.strerror}") from e
    return out


@dataclass(frozen=True)
class _Choices:
    """The checked choices of a command line; ``backend`` is empty on Ray and with ``--grader``, which decide themselves."""

    targets: list[str]
    backend: str
    workers: int
    uuids: Sequence[str]


def _checked(a: argparse.Namespace) -> _Choices:
    """Check the options of the command line, and choose the task packs, before anything is started.

    Args:
        a: the command line.

    Returns:
        The choices.

    Raises:
        UsageError: options that are unknown, out of range, or do not fit together.
    """
    from kbx_env.errors import UnknownName
    from kbx_env.options import BACKENDS, SIZES, TARGETS, TORCH_OPS, resolve_backend

    if getattr(a, "tasks_from", None) is not None:
        packs.select(a.tasks_from)
    a.split = a.split or ("eval" if a.tasks is None else "all")
    targets = [t.strip() for t in a.targets.split(",") if t.strip() not in ("", "none")]
    targets = list(TARGETS) if targets == ["all"] else targets
    choices = [
        ("executor", a.executor, EXECUTORS), ("backend", a.backend, BACKENDS),
        ("torch policy", a.torch_ops, TORCH_OPS), ("sizes", a.sizes, SIZES), *(("target", t, TARGETS) for t in targets),
    ]  # fmt: skip
    for kind, value, accepted in choices:
        if value not in accepted:
            raise UnknownName(kind, value, accepted)
    chosen(a.gradings)
    on_ray = a.executor == "ray"
    _only_one_place(a)
    if a.estimate is not None:
        from kbx_env.backends import cost

        cost.load(a.estimate)
        if a.backend == "cuda":
            raise UsageError("--estimate is for the CPU backend; on a GPU kernels are timed")
    if a.aa < 0:
        raise UsageError(f"--aa is {a.aa}; 0 or more")
    workers = 1 if a.workers is None else a.workers
    if workers < 1:
        raise UsageError(f"--workers is {workers}; at least 1")
    backend = "" if on_ray or a.grader is not None else resolve_backend(a.backend)
    if a.gpus is not None and (on_ray or backend == "cpu" or a.gpus < 1):
        raise UsageError(f"--gpus is {a.gpus}; at least 1, with --executor process and --backend cuda (Ray takes all that it has)")
    return _Choices(targets, backend, workers, uuids_of(a.gpus or 0))


def _elsewhere(
    a: argparse.Namespace, stack: contextlib.ExitStack
) -> tuple[str, WorkerPool | None, Mapping[str, str]] | None:
    """Return backend, pool and environment of a Ray cluster or a service; ``None`` where this machine grades."""
    if a.grader is not None:
        remote = RemotePool(a.grader, width=a.workers or WIDTH)
        stack.callback(remote.close)
        return remote.backend(a.backend), remote, remote.info["environment"]
    if a.executor == "ray":
        pool, device = open_ray(a.backend, a.ray_address, a.workers, a.per_gpu, timing=not a.no_timing)
        stack.callback(pool.close)
        return "cpu" if device == "cpu" else "cuda", pool, versions.environment("cpu") | {"device": device}
    return None


def _only_one_place(a: argparse.Namespace) -> None:
    """Refuse options that belong to a place other than the chosen one."""
    on_ray = a.executor == "ray"
    for name, value in (("--ray-address", a.ray_address), ("--per-gpu", a.per_gpu)):
        if value is not None and not on_ray:
            raise UsageError(f"{name} is for --executor ray; add that, or leave {name} out")
    if a.grader is not None:
        for name, value in (("--executor ray", on_ray or None), ("--gpus", a.gpus), ("--aa", a.aa or None)):
            if value is not None:
                raise UsageError(f"{name} and --grader: the service has the machines; leave {name} out")


def _local_pool(choices: _Choices, stack: contextlib.ExitStack) -> WorkerPool:
    """Return the worker pool of this machine; ``stack`` closes it, where the command line is refused before it is used."""
    pool: WorkerPool
    if len(choices.uuids) > 1:
        pool = gpu_pool(len(choices.uuids), choices.workers, uuids=choices.uuids)
    elif choices.workers == 1:
        from kbx_env.grading.grader import Grader

        pool = InlinePool(stack.enter_context(Grader()).grade)
    else:
        pool = ProcessPool(choices.workers)
    stack.callback(pool.close)
    return pool


def _policies(a: argparse.Namespace, model_access: access.Access, stack: contextlib.ExitStack) -> list[tuple[str, Any]]:
    """Return (spec, policy) of each policy of the command line; ``stack`` closes them."""
    from kbx_env.baselines.policy import make_policy

    policies = []
    for spec in dict.fromkeys(a.policy):
        policies.append((spec, policy := make_policy(spec, model_access)))
        if callable(close := getattr(policy, "close", None)):
            stack.callback(close)
    return policies


def _grade_settings(a: argparse.Namespace, backend: str, targets: Sequence[str]) -> dict[str, Any]:
    """Return the options of ``grade``, which are part of each grading's key in the store."""
    return {
        "backend": backend, "targets": targets, "grading": chosen(a.gradings)[0], "seed": a.seed, "timing": not a.no_timing,
        "split": "train" if a.split == "train" else "eval", "torch_ops": a.torch_ops, "estimate": a.estimate,
        "sizes": a.sizes,
        **({"compiled": True} if a.compiled else {}),  # absent otherwise: gradings of earlier runs keep their keys
    }  # fmt: skip


def run(a: argparse.Namespace, grade: GradeFunction | None = None) -> Path:
    """Grade the policies and write the report.

    Args:
        a: the command line.
        grade: replaces the real grader in tests.

    Returns:
        The folder of the report.

    Raises:
        UsageError: the command line asks for something that cannot be done.
    """
    from kbx_env.eval import report_data
    from rich.console import Console

    choices = _checked(a)
    model_access = access.from_args(a)
    compare = [report_data.read(folder) for folder in a.compare]
    with contextlib.ExitStack() as stack:
        # Started before this process loads the tasks, and with them torch: the workers import meanwhile.
        local = _local_pool(choices, stack) if choices.backend and grade is None else None
        tasks = load_tasks(split=a.split, pattern=a.tasks or "*")
        policies = _policies(a, model_access, stack)
        backend, pool, environment = _elsewhere(a, stack) or (choices.backend, local, versions.environment(choices.backend))
        grading, second = chosen(a.gradings)
        timed = backend == "cuda" and not a.no_timing and grading == "contract"
        for name, asked_for in (("--aa", a.aa), ("--compiled", a.compiled)):
            if asked_for and not timed:
                raise UsageError(f"{name} needs a run that times kernels: --backend cuda, --gradings contract, without --no-timing")
        if not a.resume:  # a resumed run may need no call; otherwise the probe is made before its first one
            _probe(policies)
        out = _folder(a)
        settings = _grade_settings(a, backend, choices.targets)
        manifest = {**versions.task_set(t.id for t in tasks).entries(),
                    **environment, **settings, "timed": timed, "task_split": a.split,
                    "seed_policy": "secret, fresh for every grading" if a.seed is None else f"fixed: {a.seed}"}  # fmt: skip
        print(f"{len(tasks)} of {len(task_ids())} tasks (--split {a.split}, --tasks {a.tasks or '*'})", file=sys.stderr)
        store = stack.enter_context(contextlib.closing(Store(out / "gradings.sqlite")))
        if any(hasattr(policy, "spent") for _, policy in policies):
            model_access.ledger.keep(out / access.CALLS)
            stack.callback(model_access.ledger.close)
        if grade is not None:
            pool = InlinePool(grade)
        elif local is not None:
            pages.import_ahead()
        assert pool is not None  # with neither a cluster nor a service this machine grades
        # All answers are submitted at once, so that the progress bars know their number.
        deadline = deadline_of(timed, compiled=a.compiled) if a.grader is None else DEADLINE
        # A service itself tries again after an infrastructure fault.
        attempts = ATTEMPTS if a.grader is None else 1
        with Executor(pool, attempts, store=store, deadline=deadline, capacity=sys.maxsize) as executor:
            askers = [Asker(s, p, settings, environment, store, executor, a.answered) for s, p in policies]
            answers = _ask_all(askers, tasks)
            _refuse_silence(policies, answers)
            other = grade_beside(askers, tasks, answers, second) if second else {}
        if a.aa:
            manifest["aa"] = calibrate(a.aa)
        asked = {k.spec: {"tasks": len(k.asked(tasks))} | ({"tasks_asked": "answered"} if a.answered else {}) for k in askers}
        # pop(): the answers of a policy are freed once its rows are made, else memory would hold both.
        reports = [
            report_of(spec, policy, tasks, answers.pop(spec), manifest | asked[spec], other.pop(spec, None), second)
            for spec, policy in policies
        ]
    with Console(stderr=True).status("writing") as status:
        store_path, on_step = out / "gradings.sqlite", functools.partial(_show_step, status)
        pages.write(out, reports, compare=compare, store=store_path, step=on_step)
    for report in reports:
        found = report["summary"]
        print(f"{report['policy']}: {found['verdicts'].get('correct', 0)} of {found['n']} judged answers are correct")
    return out


def _show_step(status: Status, step: str) -> None:
    status.update(f"writing {step}")


def _ask_all(askers: Sequence[Asker], tasks: Sequence[Task]) -> dict[str, dict[tuple[str, int], Answer]]:
    from rich.console import Console

    found: dict[str, dict[tuple[str, int], Answer]] = {a.spec: {} for a in askers}
    policies = {
        a.spec: (sum(a.samples(t) for t in a.asked(tasks)), a.policy.caller.status if isinstance(a.policy, Method) else None)
        for a in askers
    }
    with asking(policies, Console(stderr=True)) as progress:
        for asker, name, sample, answer in ask_all(askers, tasks):
            found[asker.spec][name, sample] = answer
            progress.advance(asker.spec)
    return found


def _probe(policies: Sequence[tuple[str, Any]]) -> None:
    """Ask each model once, so that a wrong address, key or name ends the run before anything is written."""
    from rich.console import Console

    for spec, policy in policies:
        if isinstance(policy, Method):
            with Console(stderr=True).status(f"{spec}: asking the model's server once"):
                policy.probe()


def _refuse_silence(policies: Sequence[tuple[str, Any]], answers: Mapping[str, Mapping[tuple[str, int], Answer]]) -> None:
    """Refuse a run in which no call of a policy was answered; it had too few calls to be stopped on the way.

    Raises:
        UsageError: there is such a policy, and none of its answers was judged.
    """
    for spec, policy in policies:
        error = policy.caller.lost if isinstance(policy, Method) else None
        if error is not None and all(a.outcome.fault is Fault.INFRA for a in answers[spec].values()):
            raise UsageError(f"policy {spec!r}: no call of its model was answered; the last error: {error}; go on with --resume")


def main(argv: Sequence[str] | None = None) -> int:
    """Write the report; return 0 when it is written, 2 on bad usage, 130 when interrupted."""
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
