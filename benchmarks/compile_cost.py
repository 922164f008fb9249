"""Measure what the kernels of the experts cost to compile: every specialisation of one grading, down to the cubin, without a GPU.

    python benchmarks/compile_cost.py OUT.json [--tasks 'math/*,reduce/*'] [--workers 2] [--seed 0] [--before OLD.json] [--top 25]
                                      [--ttir-only]

The cases of a grading (declared ones, and derived ones of the seed) are called on the CPU tier, which records each specialisation
that they launch; the launches are executed only where host code reads results back. Then every timed case, published or held out,
is called with launches left out and tensors of its sizes without values, as it is before it is timed on a GPU. Each specialisation
is compiled for sm_90 in this process, one stage after the other, as Triton compiles it once in a grading. OUT has one row for each:
kernel, signature, constants, options, the first case that uses it, and seconds of processor time by stage.

With ``--before`` the table compares with an earlier file, and the exit status is 1 if a timed case uses other code than before:
the TTIR without source lines, warps and stages, in the order of the names of the kernels. Equal TTIR gives equal machine code, so
code that the earlier file has is not compiled again: it has the seconds of that file.

Left out: a specialisation that only appears with the values of a timed case, because the host code reads them, and what a call
compiles on a GPU only. A grading times published sizes or held-out ones, never both: the held-out ones that no published case
uses do not count in the table.
"""

from __future__ import annotations

import argparse
import atexit
import hashlib
import json
import multiprocessing
import re
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if __package__ in (None, ""):
    sys.path.insert(0, str(ROOT))

from rich.console import Console
from rich.progress import track
from rich.table import Table

from kbx_env.errors import UsageError
from kbx_env.grading import derived_cases, sizes
from kbx_env.grading.runtime.compiler_client import TARGET, KernelCompiler
from kbx_env.grading.runtime.processes import SandboxProcesses
from kbx_env.grading.runtime.session import RunnerSession
from kbx_env.grading.runtime.untrusted import GradingAborted
from kbx_env.grading.runtime.zygote_client import Zygote
from kbx_env.grading.timing.estimate import blank_sizes
from kbx_env.spec.catalog import expert_source, load_task, task_ids
from kbx_env.spec.task import Case, Task

STAGES = ("ttir", "ttgir", "llir", "ptx", "cubin")
"""Triton's stages. ``ptx`` is LLVM's code generation, and ``cubin`` is ptxas."""
WALL = 300.0
"""Seconds of wall time for the calls of one expert; more than a grading gives, because this process compiles beside them."""


@dataclass
class Specialisation:
    """One specialisation of a kernel.

    Attributes:
        kernel: its name.
        signature: types of the runtime parameters; ``:16`` marks one that 16 divides.
        constants: values of the constant parameters, and of integers that are 1.
        warps: per program.
        stages: of software pipelining.
        text: its TTIR.
        seconds: processor time by stage.
        cases: label of the first graded case that uses it; empty if none does.
        timed: label of the first published timed case that uses it; empty if none does.
        held: the same for held-out timed cases.
    """

    kernel: str
    signature: str
    constants: str
    warps: int
    stages: int
    text: str
    options: dict[str, Any]
    seconds: dict[str, float] = field(default_factory=dict)
    cases: list[str] = field(default_factory=list)
    timed: list[str] = field(default_factory=list)
    held: list[str] = field(default_factory=list)

    def code(self) -> str:
        """Return a hash of the TTIR without source lines, and of the options."""
        lines = [re.sub(r"\s*loc\(.*\)$", "", line) for line in self.text.splitlines() if not line.startswith("#loc")]
        plain = re.sub(r" loc\([^()]*(\([^()]*\))?[^()]*\)", "", "\n".join(lines))
        return hashlib.sha256(f"{self.options}\n{plain}".encode()).hexdigest()[:16]

    def row(self) -> dict[str, Any]:
        """Return the specialisation as a JSON object, without its text."""
        return {
            "kernel": self.kernel, "signature": self.signature, "constants": self.constants, "warps": self.warps,
            "stages": self.stages, "code": self.code(), "seconds": {k: round(v, 4) for k, v in self.seconds.items()},
            "total": round(sum(self.seconds.values()), 4), "cases": self.cases, "timed": self.timed, "held": self.held,
        }  # fmt: skip


class Recorded(KernelCompiler):
    """Compiles kernels in this process, because experts are our own code, and records them.

    Args:
        source: the expert.
        folder: for the file of the source, which Triton reads.
        known: the specialisations so far, by description.

    Attributes:
        uses: label of the case that is called now, and its kind: ``cases``, ``timed`` or ``held``.
    """

    def __init__(self, source: bytes, folder: Path, known: dict[str, Specialisation]) -> None:
        from kbx_env.sandbox.recompile import Source

        path = folder / "submission.py"
        path.write_bytes(source)
        self.made = Source(source, str(path))
        self.known, self.rows, self.changed = known, {}, ""
        self.uses = ("", "cases")

    def compile(self, recipe: Mapping[str, Any], deadline: float) -> dict[str, Any]:
        """Compile a kernel to TTIR; arguments as for ``KernelCompiler``."""
        from kbx_env.sandbox.fake_cuda.driver import TARGETS

        described = json.dumps(recipe, sort_keys=True)
        began = time.process_time()
        row = self.made.compile(recipe, TARGETS[TARGET])
        seconds = time.process_time() - began
        if described not in self.known:
            self.known[described] = _specialisation(recipe, row)
            self.known[described].seconds["ttir"] = seconds
        key = str(row.pop("key"))
        self.rows[key] = row
        label, kind = self.uses
        getattr(self.known[described], kind).append(label)
        return {"key": key, "text": row["text"]}

    def close(self) -> None:
        """Do nothing: there is no process."""


def _specialisation(recipe: Mapping[str, Any], row: Mapping[str, Any]) -> Specialisation:
    divisible = {json.dumps(k) for k, v in recipe["attrs"] if ["tt.divisibility", 16] in v}
    places = {name: json.dumps([i]) for i, (name, _) in enumerate(recipe["signature"])}
    types = [f"{n}: {t}{':16' * (places[n] in divisible)}" for n, t in recipe["signature"] if t != "constexpr"]
    names = [n for n, _ in recipe["signature"]]

    def name(key: Any) -> str:
        inner = "".join(f"[{i}]" for i in key[1:]) if isinstance(key, list) else ""
        first = key[0] if isinstance(key, list) else key
        return (names[first] if isinstance(first, int) else str(first)) + inner

    def value(described: Any) -> str:
        ((kind, v),) = described.items() if isinstance(described, dict) else (("c", described),)
        return value(v) if kind == "ce" else str(v)

    constants = ", ".join(f"{name(k)}={value(v)}" for k, v in recipe["constexprs"])
    options = dict(row["options"])
    kernel = recipe["functions"][recipe["entry"]]["name"]
    return Specialisation(
        kernel, ", ".join(types), constants, int(options["num_warps"]), int(options["num_stages"]), row["text"], options
    )


def _spent() -> float:
    """Return the processor seconds of this process and of the compilers that it has run."""
    below = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + below.ru_utime + below.ru_stime


def lower(one: Specialisation) -> None:
    """Compile a specialisation from its TTIR to the cubin, and note the seconds of each stage."""
    from triton._C.libtriton import ir
    from triton.compiler.compiler import IRSource, make_backend

    from kbx_env.sandbox.fake_cuda.driver import TARGETS

    target = TARGETS[TARGET]
    backend = make_backend(target)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ttir"
        path.write_text(one.text)
        context = ir.context()
        source = IRSource(str(path), context, backend)
        chosen = {k: v for k, v in one.options.items() if v is not None}
        options = backend.parse_options(chosen | source.parse_options())
        stages: dict[str, Callable[[Any, Any], Any]] = {}
        backend.add_stages(stages, options, source.language)
        metadata = {"target": target, **options.__dict__}
        module = source.make_ir(target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context)
        for stage in STAGES[1:]:
            began = _spent()
            module = stages[stage](module, metadata)
            one.seconds[stage] = _spent() - began


class ReadsValues(Exception):
    """The host code of a call reads values back, so launches may depend on results."""


def _call_graded(session: RunnerSession, case: Case, index: int, execute: bool) -> None:
    drawn = session.draw_call(case, index, "run")
    if execute:
        session.make_call(drawn)
        return
    reply, _ = session.ask(drawn.header | {"seconds": WALL, "keep": False}, drawn.blobs)
    if "want" in reply:
        raise ReadsValues


def _call_timed(task: Task, session: RunnerSession, case: Case) -> None:
    args: dict[str, Any] = dict(blank_sizes(task, case))
    args |= {k: v for k, v in case.args.items() if k not in args and k != "out"}
    session.ask(session.header(args) | {"op": "call", "mode": "ablate", "seconds": WALL})


def specialisations(processes: SandboxProcesses, name: str, seed: int) -> tuple[list[Specialisation], list[str]]:
    """Return the specialisations that one grading of a task's expert compiles, as far as TTIR.

    Args:
        processes: the zygote.
        name: of the task.
        seed: of the derived cases and the values.

    Returns:
        The specialisations, and what went wrong.
    """
    task, source = load_task(name), (expert_source(name) or "").encode()
    secret, known, errors = f"compile cost {seed}".encode(), dict[str, Specialisation](), list[str]()
    graded = [*task.cases, *derived_cases.derive(task, secret, "eval")]

    def call(cases: Sequence[Case], how: Callable[[RunnerSession, Case, int], None], kind: str) -> None:
        """Call all cases in a session of their own, whose runner has compiled nothing yet."""
        made = list[Recorded]()

        def maker(zygote: Zygote, text: bytes) -> KernelCompiler:
            made.append(Recorded(text, Path(folder), known))
            return made[0]

        with RunnerSession(processes.zygote(), task, "cpu", secret, "eval", WALL, compilers=maker) as session:
            session.load(source)
            for index, case in enumerate(cases):
                made[0].uses = (case.label(), kind)
                try:
                    how(session, case, index)
                except GradingAborted as e:
                    errors.append(f"{case.label()}: {e}"[:200])

    with tempfile.TemporaryDirectory() as folder:
        call(task.timed, lambda session, case, _: _call_timed(task, session, case), "timed")
        call(sizes.held_out(task), lambda session, case, _: _call_timed(task, session, case), "held")
        try:
            call(graded, lambda session, case, index: _call_graded(session, case, index, False), "cases")
        except ReadsValues:
            call(graded, lambda session, case, index: _call_graded(session, case, index, True), "cases")
    return list(known.values()), errors


_PROCESSES: list[SandboxProcesses] = []


def measure(name: str, seed: int, ttir_only: bool, known: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Measure one expert, in a worker process.

    Args:
        name: of the task.
        seed: of the derived cases and the values.
        ttir_only: compile no further than the CPU tier does.
        known: seconds by stage, by code; what is known is not compiled again.

    Returns:
        A JSON object: ``task``, ``rows`` (``Specialisation.row``), and ``errors``.
    """
    if not _PROCESSES:
        _PROCESSES.append(SandboxProcesses())
        atexit.register(_PROCESSES[0].close)
    found, errors = specialisations(_PROCESSES[0], name, seed)
    for one in [] if ttir_only else found:
        try:
            seconds = known.get(one.code(), {})
            if set(STAGES) <= set(seconds):
                one.seconds |= {s: seconds[s] for s in STAGES[1:]}
            else:
                lower(one)
        except Exception as e:
            errors.append(f"{one.kernel}({one.constants}): {type(e).__name__}: {e}"[:200])
    return {"task": name, "rows": [one.row() for one in found], "errors": errors}


def timed_code(task: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return kernel and code of what the timed cases of a measured task use, sorted."""
    return sorted((r["kernel"], r["code"]) for r in task["rows"] if r["timed"] or r["held"])


def counted(task: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the rows of a measured task that a grading with published sizes compiles."""
    return [r for r in task["rows"] if r["cases"] or r["timed"]]


def total(task: Mapping[str, Any], stages: Sequence[str] = STAGES) -> float:
    """Return the seconds of a measured task."""
    return sum(r["seconds"].get(s, 0.0) for r in counted(task) for s in stages)


def table(found: Mapping[str, Mapping[str, Any]], before: Mapping[str, Mapping[str, Any]], top: int) -> Table:
    """Return the costliest tasks as a table; with ``before``, how many specialisations and seconds they had."""
    old = ["before: count", "s"] if before else []
    shown = Table("task", *old, "count", "timed", "s", *STAGES, "slowest kernel", "s")

    def cost(name: str) -> float:
        return max(total(found[name]), total(before[name]) if name in before else 0.0)

    def line(name: str, tasks: Sequence[Mapping[str, Any]], earlier: Sequence[Mapping[str, Any]]) -> None:
        rows = [r for t in tasks for r in counted(t)]
        worst = max(rows, key=lambda r: r["total"], default={"kernel": "", "total": 0.0})
        cells = [str(sum(len(counted(t)) for t in earlier)), f"{sum(map(total, earlier)):.2f}"] if before else []
        cells += [str(len(rows)), str(sum(bool(r["timed"]) for r in rows)), f"{sum(map(total, tasks)):.2f}"]
        cells += [f"{sum(total(t, [s]) for t in tasks):.2f}" for s in STAGES]
        shown.add_row(name, *cells, worst["kernel"], f"{worst['total']:.2f}")

    for name in sorted(found, key=cost, reverse=True)[:top]:
        line(name, [found[name]], [before[name]] if name in before else [])
    shown.add_section()
    line(f"all {len(found)}", list(found.values()), [before[n] for n in found if n in before])
    return shown


def _read(path: Path) -> dict[str, dict[str, Any]]:
    return {t["task"]: t for t in json.loads(path.read_text())["tasks"]}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; exit status 0, 1 after an error or where timed code differs from before, 2 on bad usage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT.json")
    parser.add_argument("--tasks", default="*", help="comma-separated patterns of task ids (default: all)")
    parser.add_argument("--workers", type=int, default=2, help="experts at a time")
    parser.add_argument("--seed", type=int, default=0, help="of the derived cases")
    parser.add_argument("--before", type=Path, metavar="OLD.json", help="compare with an earlier file")
    parser.add_argument("--top", type=int, default=25, help="rows of the table")
    parser.add_argument("--ttir-only", action="store_true", help="compile no further than the CPU tier does")
    a = parser.parse_args(argv)
    try:
        patterns = [p.strip() for p in a.tasks.split(",")]
        names = list(dict.fromkeys(t for p in patterns for t in task_ids() if fnmatchcase(t, p)))
        if not names:
            raise UsageError(f"--tasks {a.tasks!r} matches no task; patterns look like 'math/*'")
        before = _read(a.before) if a.before else {}
    except (UsageError, OSError, ValueError) as e:
        print(f"compile_cost.py: {e}", file=sys.stderr)
        return 2
    found: dict[str, dict[str, Any]] = {}
    known = {r["code"]: r["seconds"] for t in before.values() for r in t["rows"]}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(a.workers, mp_context=context) as pool:
        jobs = [pool.submit(measure, name, a.seed, a.ttir_only, known) for name in names]
        for job in track(as_completed(jobs), total=len(jobs), description="experts"):
            task = job.result()
            found[task["task"]] = task
            rows = [found[n] for n in names if n in found]  # a run that is stopped leaves what it has
            a.out.write_text(json.dumps({"target": TARGET, "seed": a.seed, "tasks": rows}, indent=1))
    console = Console(width=200)
    console.print(table(found, before, a.top))
    errors = [f"{n}: {e}" for n in names for e in found[n]["errors"]]
    changed = [n for n in names if n in before and timed_code(found[n]) != timed_code(before[n])]
    for text in [*errors, *(f"{n}: the timed cases use other code than before" for n in changed)]:
        console.print(text, markup=False, highlight=False)
    return 1 if errors or changed else 0


if __name__ == "__main__":
    sys.exit(main())
