r"""Compares searches at equal budgets, by gradings and by seconds.

    python eval/compare_search.py --policy template-search:random --policy template-search:halving \
        --tasks 'math/*' --evals 12 --backend cpu --seeds 3 --out runs/search
    ... --policy geak --model NAME --base-url URL         # refinement by a language model, at the same budgets

Every policy searches on the same tasks, once for each seed. The value of a grading on the CPU backend is log(estimated
time of the project's own kernel / estimated time of the source). The estimate is the cost model's, not a measurement,
and no policy sees it. On CUDA the value is the log of the measured speedup over eager. A policy's clock runs while the
policy computes and while its sources are graded, but not while the cost model estimates. A policy that asks for more
than ``--evals`` gradings is told that the budget is spent, and its run ends.

The curves show the best value among the gradings so far; ``handed_in`` is the value of the source that the policy chose
at the end. ``compare.json`` is written after every run, ``compare.png`` at the end; Ctrl-C ends early and keeps the
results so far.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kbx_env.baselines.llm import access
from kbx_env.baselines.policy import Episodic, make_policy
from kbx_env.eval import curves

from kbx_env import versions
from kbx_env.envs.episode import Episode, Trajectory
from kbx_env.errors import BudgetSpent, KbxError, ModelError, UsageError
from kbx_env.executor.direct import retrying
from kbx_env.grading.grader import Grader
from kbx_env.options import resolve_backend
from kbx_env.outcome import Outcome
from kbx_env.spec.catalog import expert_source, load_tasks
from kbx_env.spec.task import Task

GradeFunction = Callable[..., Outcome]


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--policy", action="append", required=True, metavar="SPEC", help="an episodic policy; repeatable")
    p.add_argument("--tasks", default="*", help="glob over task ids, comma-separated")
    p.add_argument("--split", default="all", help="train, eval or all")
    p.add_argument("--evals", type=int, default=12, metavar="N", help="gradings for each policy, task and seed")
    p.add_argument("--seeds", type=int, default=3, metavar="N", help="runs of each policy on each task")
    p.add_argument("--backend", default="auto", help="cpu, cuda or auto")
    p.add_argument("--gpu", default="h200", help="GPU of the yardstick on the CPU backend")
    p.add_argument("--limit", type=float, metavar="SECONDS", help="start no run after this long")
    p.add_argument("--out", default="runs/search", help="folder of compare.json and compare.png")
    p.add_argument("--overwrite", action="store_true", help="replace an earlier comparison in the folder")
    p.add_argument("--no-figure", action="store_true")
    access.add_arguments(p)
    return p


class Yardstick:
    """Computes the value of a grading: ``None`` if it is not correct, or its time is not known.

    Args:
        backend: ``cpu`` or ``cuda``.
        task: the task, for the error.
        expert: grading of the project's own kernel; needed on the CPU backend.

    Raises:
        UsageError: the CPU backend has no estimate of the project's own kernel.
    """

    def __init__(self, backend: str, task: str, expert: Outcome | None) -> None:
        self.backend = backend
        self.expert_us = expert.estimate.estimated_us if expert is not None and expert.estimate else None
        if backend == "cpu" and self.expert_us is None:
            why = "there is none" if expert is None else f"{expert.verdict}: {expert.message}" if not expert.correct else ""
            why = why or "the cost model has no estimate of it (it reads a value back, or a stray size)"
            raise UsageError(f"{task}: nothing to compare with: the project's own kernel: {why[:200]}; leave it out with --tasks")

    def __call__(self, outcome: Outcome) -> float | None:
        """Return the value: the log of a ratio of times, 0 for the project's own kernel (CPU) or for eager (CUDA)."""
        if self.backend == "cuda":
            void = outcome.timing is not None and any(c.void for c in outcome.timing.cases)
            return math.log(outcome.speedup) if outcome.speedup is not None and not void else None
        if outcome.estimate is None or self.expert_us is None or not all(b.ok for b in outcome.compile):
            return None
        return math.log(self.expert_us / outcome.estimate.estimated_us)


class Budget:
    """Grades for one run: counts gradings, keeps the policy's clock, and hides the estimates from the policy.

    Args:
        grade: grades a source.
        worth: values a grading.
        evals: gradings of the run.

    Attributes:
        rows: one for each grading.
        values: source -> value.
        begin: start of the run, in ``time.perf_counter`` seconds.
        aside: seconds that do not count as the policy's.
        cut: whether the policy asked for more gradings than there are.
    """

    def __init__(self, grade: Callable[[str], Outcome], worth: Yardstick, evals: int) -> None:
        self._grade, self._worth, self._evals = grade, worth, evals
        self.rows: list[dict[str, Any]] = []
        self.values: dict[str, float | None] = {}
        self.begin, self.aside = time.perf_counter(), 0.0
        self.cut = False

    @property
    def seconds(self) -> float:
        """Seconds of the policy's clock so far."""
        return time.perf_counter() - self.begin - self.aside

    def submit(self, sources: Sequence[str]) -> list[Outcome]:
        """Grade sources in order.

        Args:
            sources: the sources.

        Returns:
            Their gradings, without estimates.

        Raises:
            BudgetSpent: more sources than gradings left; the sources that fit were graded.
        """
        outcomes = []
        for source in sources:
            if len(self.rows) >= self._evals:
                self.cut = True
                raise BudgetSpent(f"all {self._evals} gradings of this run are used")
            outcome = self._grade(source)
            self.aside += outcome.seconds.get("estimate", 0.0)
            value = self._worth(outcome)
            self.values[source] = value
            self.rows.append({
                "number": len(self.rows) + 1, "seconds": self.seconds, "verdict": str(outcome.verdict),
                "correct": outcome.correct, "value": value,
                "estimated_us": outcome.estimate.estimated_us if outcome.estimate else None, "speedup": outcome.speedup,
            })  # fmt: skip
            outcomes.append(replace(outcome, estimate=None))
        return outcomes


def one_run(policy: Episodic, spec: str, task: Task, seed: int, backend: str, budget: Budget) -> dict[str, Any]:
    """Let a policy search on one task.

    Args:
        policy: the policy.
        spec: its name on the command line.
        task: the task.
        seed: of the run.
        backend: ``cpu`` or ``cuda``.
        budget: grades for the run.

    Returns:
        The run as a row of ``compare.json``.

    Raises:
        UsageError: the policy raised an exception of its own.
    """
    env = Episode(task, backend, budget.submit, sample=seed)
    try:
        made = policy.run(task, env)
    except ModelError as e:  # the budget is spent, or a model's server failed: keep the gradings so far
        made = Trajectory(None, str(e), tuple(env.turns))
    except KbxError:
        raise
    except Exception as e:  # a policy is a plug-in
        raise UsageError(f"policy {spec!r} failed on {task.id}: {type(e).__name__}: {e}") from e
    seconds = budget.seconds
    # A source that was never graded has no known value: grading it now would exceed the budget.
    handed = budget.values.get(made.source) if made.source is not None else None
    for r, turn in zip(budget.rows, env.turns, strict=False):
        r["label"] = turn.label
    return {
        "policy": spec, "task": task.id, "seed": seed, "seconds": seconds, "handed_in": handed, "cut": budget.cut,
        "reason": made.reason, "notes": dict(made.notes), "gradings": budget.rows,
    }  # fmt: skip


def compare(a: argparse.Namespace, grade: GradeFunction, out: Path) -> dict[str, Any]:
    """Run every policy on every task with every seed; seeds in the outer loop, so that an interrupted comparison is balanced.

    Args:
        a: the command line.
        grade: the grader.
        out: folder of ``compare.json``, which is written after every run.

    Returns:
        The content of ``compare.json``.

    Raises:
        UsageError: a policy that is not episodic, or a task whose gradings cannot be valued.
    """
    tasks = load_tasks(split=a.split, pattern=a.tasks)
    backend = resolve_backend(a.backend)
    options: dict[str, Any] = {"backend": backend, "targets": ["sm_90"], "split": "train"}
    if backend == "cpu":
        options["estimate"] = a.gpu
    model_access = access.from_args(a)
    policies = {spec: _policy(spec, a.evals, model_access) for spec in dict.fromkeys(a.policy)}
    if any(hasattr(p, "spent") for p in policies.values()):
        model_access.ledger.keep(out / access.CALLS)
    result: dict[str, Any] = {
        "backend": backend, "evals": a.evals, "seeds": a.seeds, "device": a.gpu if backend == "cpu" else None,
        "value": f"log(own kernel's estimate / best estimate), {a.gpu}" if backend == "cpu" else "log(measured speedup)",
        "environment": versions.environment(backend), "interrupted": False, "left_out": 0, "runs": [],
    }  # fmt: skip
    begin, worth = time.perf_counter(), {}
    try:
        for policy in policies.values():
            getattr(policy, "prepare", lambda: None)()
        for seed in range(a.seeds):
            for task in tasks:
                if task.id not in worth:
                    own = expert_source(task.id) if backend == "cpu" else None
                    worth[task.id] = Yardstick(backend, task.id, grade(task.id, own, **options) if own else None)
                for spec, policy in policies.items():
                    if a.limit is not None and time.perf_counter() - begin > a.limit:
                        result["left_out"] += 1
                        continue
                    budget = Budget(lambda s, t=task: grade(t.id, s, **options), worth[task.id], a.evals)  # type: ignore[misc]
                    result["runs"].append(one_run(policy, spec, task, seed, backend, budget))
                    last = result["runs"][-1]
                    shown = curves.best_so_far(last["gradings"], "number", a.evals)
                    print(f"{task.id} seed {seed} {spec}: {len(last['gradings'])} gradings, {last['seconds']:.1f} s, "
                          f"best {'-' if shown is None else f'{shown:+.3f}'}", file=sys.stderr)  # fmt: skip
                    _write(result, a.evals, out)
    except KeyboardInterrupt:
        result["interrupted"] = True
    finally:
        for policy in policies.values():
            getattr(policy, "close", lambda: None)()
    _write(result, a.evals, out)
    return result


def _policy(spec: str, evals: int, model_access: access.Access) -> Episodic:
    policy: Any = make_policy(spec, model_access)
    if not callable(getattr(policy, "run", None)):
        raise UsageError(f"policy {spec!r} is not episodic: it has no run(task, env); for one answer a task use eval/report.py")
    # A policy that plans its gradings is told how many there are.
    if type(getattr(policy, "evals", None)) is int:
        policy.evals = evals
    return policy  # type: ignore[no-any-return]


def _write(result: dict[str, Any], evals: int, out: Path) -> None:
    """Replace ``compare.json`` with the result so far."""
    if result["runs"]:
        result["summary"] = curves.summary(result["runs"], evals)
    new = out / "compare.json.new"
    new.write_text(json.dumps(result, indent=1))
    os.replace(new, out / "compare.json")


def _folder(a: argparse.Namespace) -> Path:
    out = Path(a.out)
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {a.out!r} is a file; give a folder")
    if (out / "compare.json").exists() and not a.overwrite:
        raise UsageError(f"{out} holds a comparison; use --overwrite, or another --out")
    for end in ("", "-wal", "-shm"):  # a model's answers from an earlier record would take no time
        (out / f"{access.CALLS}{end}").unlink(missing_ok=True)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UsageError(f"cannot write to --out {a.out!r}: {e.strerror}") from e
    return out


def tell(result: dict[str, Any]) -> None:
    """Print the end points as a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table("policy", "runs", "gradings", "seconds", "correct", "best graded", "handed in", "at equal seconds",
                  title=result["value"])  # fmt: skip
    for name, p in result["summary"]["policies"].items():
        ends = [p["best_graded"], p["handed_in"], p["at_common_seconds"]]
        share = "-" if p["correct_share"] is None else f"{p['correct_share']:.0%}"
        table.add_row(name, str(p["best_graded"]["runs"]), f"{p['gradings']:.1f}", f"{p['seconds']:.1f}", share, *map(_shown, ends))
    Console(width=150).print(table)


def _shown(row: dict[str, Any]) -> str:
    if row["mean"] is None:
        return "-"
    wide = "" if row["low"] is None else f" [{row['low']:+.3f}, {row['high']:+.3f}]"
    return f"{row['mean']:+.3f}{wide}" + ("" if row["known"] == row["runs"] else f" of {row['known']}")


def main(argv: Sequence[str] | None = None, grade: GradeFunction | None = None) -> int:
    """Compare; the command line's main function.

    Args:
        argv: arguments; by default those of the process.
        grade: replaces the grader in tests.

    Returns:
        Exit status: 0 when all ran, 2 on bad usage, 130 when interrupted.
    """
    a = parser().parse_args(argv)
    try:
        for name in ("evals", "seeds"):
            if getattr(a, name) < 1:
                raise UsageError(f"--{name} is {getattr(a, name)}; at least 1")
        if a.limit is not None and not a.limit > 0:
            raise UsageError(f"--limit is {a.limit:g}; seconds above 0")
        if not a.no_figure:
            curves.check()
        importlib.import_module("kbx_env.backends.cost").load(a.gpu)
        out = _folder(a)
        if grade is not None:
            result = compare(a, grade, out)
        else:
            with Grader() as grader:
                result = compare(a, retrying(grader.grade), out)
        if result["runs"]:
            tell(result)
            # The table comes first, so that it is there if the picture fails.
            if not a.no_figure:
                curves.draw(result, out / "compare.png")
    except (KbxError, OSError) as e:
        print(f"compare_search: {e}", file=sys.stderr)
        return 2
    return 130 if result["interrupted"] else 0


if __name__ == "__main__":
    sys.exit(main())
