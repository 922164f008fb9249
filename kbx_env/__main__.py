"""The command line: ``python -m kbx_env grade | tasks | prompt | expert | doctor | selfcheck | schema | store |
calls | serve | check-pack | new-task | generate | report | check-report | export |
eval | train``, also as ``kbx``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kbx_env.cli import calls, generate, packs, scripts, selfcheck, serve, store
from kbx_env.errors import DeclarationError, UsageError
from kbx_env.outcome import Outcome
from kbx_env.spec import packs as task_packs

if TYPE_CHECKING:
    from rich.console import Console


PACKS = "task packs: folders or names of installed packs, separated by commas (default: KBX_TASKS, else the benchmark)"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kbx", description="Grade Triton kernels.")
    sub = parser.add_subparsers(dest="command", required=True)
    g = sub.add_parser("grade", help="grade one source file; exits with 0 correct, 1 any other verdict, 2 bad usage")
    g.add_argument("task", help="category/name; the command tasks lists them")
    g.add_argument("file", help="the source file, or - for standard input")
    g.add_argument("--backend", default="auto", help="cpu, cuda, or auto: cuda if there is a GPU (default)")
    g.add_argument("--targets", help="targets to compile for, separated by commas; 'none' for none (default: all)")
    g.add_argument("--grading", default="contract", help="contract (default), or paper: the paper's own cases and check")
    g.add_argument("--torch-ops", default="strict", help="strict (default), or allow: the wrapper may compute in torch")
    g.add_argument("--sizes", default="published", help="sizes to time or estimate: published (default), or held-out")
    g.add_argument("--precision", default="report", help="of times: report (default, 1 %%), or training (3 %%, faster)")
    g.add_argument("--seed", type=int, help="seed that fixes the inputs (default: secret and new inputs)")
    g.add_argument("--no-timing", action="store_true", help="do not time correct kernels (CUDA)")
    g.add_argument("--compiled", action="store_true", help="also measure the speedup over torch.compile (CUDA)")
    g.add_argument("--estimate", metavar="GPU", help="estimate the time on a GPU, such as h200 (CPU backend)")
    g.add_argument("--reward", default="default", help="name of the reward preset (default: default)")
    g.add_argument("--json", action="store_true", help="print one JSON object")
    t = sub.add_parser("tasks", help="list the tasks")
    t.add_argument("--category", help="only tasks of this category")
    t.add_argument("--split", default="all", help="train, eval, all (default), or a split of a task pack")
    t.add_argument("--json", action="store_true", help="print one JSON list")
    p = sub.add_parser("expert", help="print the project's own kernel for a task, as one source")
    p.add_argument("task", help="category/name")
    p = sub.add_parser("prompt", help="print the instruction that a policy gets for a task")
    p.add_argument("task", help="category/name")
    p.add_argument("--backend", default="cpu", help="cpu (default), or cuda: whether kernels are timed")
    d = sub.add_parser("doctor", help="check what this machine can grade, and what is missing")
    d.add_argument("--json", action="store_true", help="print one JSON list")
    for command in (g, t, p, sub.choices["expert"]):
        command.add_argument("--tasks-from", metavar="PACK", help=PACKS)
    selfcheck.add_parser(sub)
    s = sub.add_parser("schema", help="print a JSON Schema: of outcomes, or of report.json")
    s.add_argument("name", help="outcome or report")
    store.add_parser(sub)
    calls.add_parser(sub)
    serve.add_parser(sub)
    packs.add_parsers(sub)
    generate.add_parser(sub)
    scripts.add_parsers(sub)
    return parser


def _grade(a: argparse.Namespace) -> int:
    from kbx_env.grading.runtime.zygote_process import ZygoteProcess
    from kbx_env.rewards.compose import load_preset

    reward = load_preset(a.reward)
    if a.file == "-":
        source = sys.stdin.buffer.read()
    else:
        path = Path(a.file)
        if not path.is_file():
            raise UsageError(f"no file {a.file!r}; give the kernel's source file, or - for standard input")
        source = path.read_bytes()
    source, taken = _unfenced(source)
    if taken and not a.json:
        print("The source is taken from the Markdown block of the answer; lines are counted from the block's first line.")
    targets = None if a.targets is None else [t.strip() for t in a.targets.split(",") if t.strip() not in ("", "none")]
    options = {
        "targets": targets, "grading": a.grading, "seed": a.seed, "timing": not a.no_timing,
        "estimate": a.estimate or reward.estimate, "torch_ops": a.torch_ops, "compiled": a.compiled, "sizes": a.sizes,
        "precision": a.precision,
    }  # fmt: skip
    # The sandbox takes seconds to import torch and Triton; this process imports torch meanwhile.
    with contextlib.closing(ZygoteProcess()) as sandbox:
        from kbx_env.executor.direct import retrying
        from kbx_env.grading.grader import Grader
        from kbx_env.options import resolve_backend

        backend = resolve_backend(a.backend)
        began = _age()
        with Grader(started=sandbox) as grader:
            outcome = retrying(grader.grade)(a.task, source, backend=backend, **options)
            ended = _age()
    if a.json:
        print(outcome.to_json(reward=reward(outcome)))
    else:
        _show(outcome, reward(outcome), {"imports": began, "exit": _age() - ended})
    return 0 if outcome.correct else 1


def _age() -> float:
    """Return the seconds since this process started; 0 where the operating system does not tell."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        return 0.0


def spent(outcome: Outcome, around: Mapping[str, float]) -> str:
    """List where the wall time of a command went, so that the parts add up.

    Args:
        outcome: of the grading.
        around: seconds before and after the grading, by name.

    Returns:
        Such as ``imports 1.20, cases 0.40, ..., other 0.02; in all 3.90``.
    """
    seconds = dict(outcome.seconds)
    total = seconds.pop("total", 0.0) + sum(around.values())
    held = {k: seconds.pop(k) for k in ("shared", "alone") if k in seconds}  # parts of the stages
    if "proof" in seconds and outcome.message.startswith("executed on the CPU tier"):
        del seconds["proof"]  # its stages are listed
    before = {k: v for k, v in around.items() if k == "imports"}
    parts = before | seconds | {k: v for k, v in around.items() if k not in before}
    shown = {k: round(v, 2) for k, v in parts.items()}
    shown["other"] = round(round(total, 2) - sum(shown.values()), 2)
    text = ", ".join(f"{k} {v:.2f}" for k, v in shown.items() if v) + f"; in all {total:.2f}"
    return text + (f" (the GPU was held: {', '.join(f'{k} {v:.2f}' for k, v in held.items())})" if held else "")


def _unfenced(source: bytes) -> tuple[bytes, bool]:
    """Return the source of an answer in Markdown, as an environment takes it, and whether it is only a part of the text."""
    from kbx_env.envs.answer import strip_fences

    try:
        text = source.decode()
    except UnicodeDecodeError:  # the screen says where
        return source, False
    found = strip_fences(text)
    return (source, False) if found == text else (found.encode(), True)


def _show(outcome: Outcome, reward: float | None, around: Mapping[str, float] | None = None) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from kbx_env.envs.prompt import ADVICE, notes, stopped

    console = Console(highlight=False)
    colour = "green" if outcome.correct else "yellow" if reward is None else "red"
    shown = "unknown (masked)" if reward is None else f"{reward:.3f}"
    console.print(f"[bold {colour}]{outcome.verdict}[/] {outcome.task} on {outcome.backend}, reward {shown}")
    if outcome.cases is not None:
        console.print(f"cases passed: {outcome.cases.passed} of {outcome.cases.total}")
    if at := stopped(outcome):
        console.print(at, markup=False, soft_wrap=True)
    if outcome.message and not outcome.correct:
        listed = {f"{f.case}: {f.reason}" for f in outcome.cases.failures} if outcome.cases else set()
        why = "" if outcome.message in listed else f": {outcome.message}"
        console.print(f"failed at stage {outcome.stage}{why}", markup=False, soft_wrap=True)
    for note in notes(outcome):
        console.print(note, markup=False, soft_wrap=True)
    if problems := _problems(outcome):
        table = Table("kind", "where", "what went wrong", box=None)
        for row in problems:
            table.add_row(*(Text(cell[:300]) for cell in row))  # Text: a message of a kernel must not be read as markup
        console.print(table)
    if outcome.cases is not None and outcome.cases.wrong > len(outcome.cases.failures):
        console.print(f"and {outcome.cases.wrong - len(outcome.cases.failures)} more failed cases")
    _show_work(console, outcome)
    if outcome.verdict in ADVICE:
        console.print(f"to do: {ADVICE[outcome.verdict]}", style="bold", soft_wrap=True)
    if outcome.compile:
        _show_builds(console, outcome)
    console.print(f"seconds: {spent(outcome, around or {})}", style="dim", soft_wrap=True)


def _show_builds(console: Console, outcome: Outcome) -> None:
    """Print a table of the builds, and for which specialisation each kernel was built."""
    from rich.table import Table

    table = Table("kernel", "target", "builds", "registers", "spills (B)", "shared (B)", "warps", box=None)
    named: dict[str, str] = {}
    for b in outcome.compile:
        cells = ["-" if v is None else str(v) for v in (b.registers, b.spills, b.shared, b.warps)]
        table.add_row(b.kernel, b.target, "yes" if b.ok else "no", *cells)
        named.setdefault(b.kernel, b.specialisation)
    console.print(table)
    for kernel, specialisation in named.items():
        if specialisation:
            console.print(f"{kernel} built for: {specialisation}", markup=False, soft_wrap=True, style="dim")


def _problems(outcome: Outcome) -> list[tuple[str, str, str]]:
    """Return kind, place and text of everything that went wrong."""
    findings = outcome.evidence.findings if outcome.evidence else ()
    failures = outcome.cases.failures if outcome.cases else ()
    return [
        *(("case", f"{f.case} [{f.layouts}]" if f.layouts else f.case, f.reason) for f in failures),
        *(("rule", v.rule, v.detail) for v in outcome.violations),
        *(("finding", f.kind.replace("_", " "), f.text) for f in findings),
        *(("build", f"{b.kernel} for {b.target}", b.error or "") for b in outcome.compile if not b.ok),
    ]


def _show_work(console: Console, outcome: Outcome) -> None:
    """Print traffic, times and estimates."""
    e, t = outcome.evidence, outcome.timing
    if e is not None and outcome.correct and e.moved_bytes and e.ideal_bytes:
        console.print(f"moved {e.moved_bytes:,} bytes, at least {e.ideal_bytes:,} needed, {e.launches} launches")
    if t is not None:
        console.print(f"speedup over eager {t.speedup:.3f}, 95 % interval {t.low:.3f} to {t.high:.3f}")
        if t.compiled_speedup is not None:
            console.print(f"speedup over torch.compile {t.compiled_speedup:.3f}")
        for note in t.notes:
            console.print(f"note: {note}", markup=False, style="dim")
    if outcome.estimate is not None:
        g = outcome.estimate
        share = f"{100 * g.estimated_share:.0f} % of the roofline"
        console.print(f"estimated, not measured, on {g.device}: {g.estimated_us:.1f} us, {share}")


def _tasks(a: argparse.Namespace) -> int:
    from kbx_env.spec.catalog import select_ids, splits
    from kbx_env.summaries import summary

    rows = [
        {"task": t.id, "entry": t.entry, "split": splits().get(t.id), "difficulty": t.difficulty,
         "judge": t.judge.capitalize(), "cases": t.cases}
        for t in map(summary, select_ids(category=a.category, split=a.split))
    ]  # fmt: skip
    if a.json:
        print(json.dumps(rows))
    else:
        for r in rows:
            print(f"{r['task']:36} {r['split']:6} difficulty {r['difficulty']}  {r['judge']:10} {r['cases']} cases")
    return 0


def _expert(a: argparse.Namespace) -> int:
    from kbx_env.spec.catalog import expert_source, full_id

    task = full_id(a.task)
    source = expert_source(task)
    if source is None:
        raise UsageError(f"{task} has no expert kernel")
    print(source, end="")
    return 0


def _prompt(a: argparse.Namespace) -> int:
    from kbx_env.envs.prompt import instruction
    from kbx_env.errors import UnknownName
    from kbx_env.spec.catalog import full_id
    from kbx_env.summaries import summary

    if a.backend not in ("cpu", "cuda"):  # the prompt for CUDA can be printed on a machine without a GPU
        raise UnknownName("backend", a.backend, ("cpu", "cuda"))
    print(instruction(summary(full_id(a.task)), a.backend))
    return 0


def _doctor(a: argparse.Namespace) -> int:
    from kbx_env.cli.doctor import examine

    rows = examine()
    if a.json:
        print(json.dumps(rows))
    else:
        for r in rows:
            remedy = f"  -> {r['remedy']}" if r["remedy"] else ""
            print(f"{'ok ' if r['ok'] else 'NO '} {r['name']:24} {r['found']}{remedy}")
    return 0 if next(r for r in rows if r["name"] == "cpu backend")["ok"] else 1


def _schema(a: argparse.Namespace) -> int:
    from kbx_env.schema import load

    print(json.dumps(load(a.name), indent=1))
    return 0


def _run(a: argparse.Namespace) -> int:
    """Run a command other than a script, and return its exit status."""
    commands: dict[str, Callable[[argparse.Namespace], int]] = {
        "grade": _grade, "tasks": _tasks, "prompt": _prompt, "expert": _expert, "doctor": _doctor, "store": store.command,
        "selfcheck": selfcheck.command, "schema": _schema,
        "calls": calls.command, "serve": serve.command, "check-pack": packs.check, "new-task": packs.new,
        "generate": generate.command,
    }  # fmt: skip
    if getattr(a, "tasks_from", None) is not None:
        task_packs.select(a.tasks_from)
    return commands[a.command](a)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: the arguments; by default those of the process.

    Returns:
        The exit status: 0; 1 if a graded source is not correct, the CPU backend cannot grade (``doctor``), or a verdict is not
        the expected one (``selfcheck``); 2 for bad usage; 130 if interrupted.
    """
    given = sys.argv[1:] if argv is None else list(argv)
    try:
        return scripts.run(given) if given[:1] and given[0] in scripts.COMMANDS else _run(_parser().parse_args(given))
    except (UsageError, DeclarationError) as e:
        print(f"kbx: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("kbx: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 1


if __name__ == "__main__":
    sys.exit(main())
