"""Changes the experts in small ways and lists the changes that the grader does not notice.

    python eval/mutants.py [--tasks GLOBS] [--per-task N] [--seed N] [--workers N] [--without derived] [--json FILE]
    python eval/mutants.py --every [--seconds S] [--workers N] [--json FILE]
    python eval/mutants.py --table FILE [FILE ...]

A mutant is an expert with one change: a constant, a comparison, a sign, a mask, a dtype, a stride, or a branch that is
always or never taken. A mutant that is judged correct *survives*: no case tests what the changed code does. A mutant
that makes no difference is *equivalent* (a block size, a fast path) if ``eval/equivalent_mutants.json`` lists the change
with the reason; a listed change that the grader refuses counts as killed. A survivor whose place in the source no case
executes is not counted: replaced by an error, it is still judged correct. Mutants depend on seed and task alone.
``--without derived`` grades the declared cases only. ``--every`` takes all mutants, each change of a function that
experts share first in one of them. ``FILE`` gets one JSON object a line; an interrupted run goes on where its file ends.
"""

from __future__ import annotations

import argparse
import ast
import fnmatch
import functools
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.progress import track

from kbx_env.grading.grader import Grader
from kbx_env.spec.catalog import expert_source, load_tasks

COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
}  # fmt: skip
"""Comparison operators and what they are changed to."""
OPERATORS: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "+"), ast.Div: ("/", "*"), ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"), ast.BitAnd: ("&", "|"), ast.BitOr: ("|", "&"),
}  # fmt: skip
"""Arithmetic operators and what they are changed to."""
DTYPES = {"float32": "float16", "float64": "float32"}
"""Dtypes and the narrower ones that they are changed to. Offsets of 64 bits are left alone: no case is that large."""
CALLS = {"maximum": "minimum", "minimum": "maximum", "max": "min", "min": "max"}
"""Functions of tl and Python and what they are changed to."""
KNOBS = ("num_warps", "num_stages", "eviction_policy", "cache_modifier", "BLOCK", "B", "warps", "stages", "GROUP")
"""Keywords whose values change the speed only."""
EQUIVALENT = Path(__file__).resolve().parent / "equivalent_mutants.json"
"""Changes that make no difference: function, line of code, the text before and after the change (``*`` for any), the tasks
(globs) for which that holds, and the reason."""
CRASH = "tl.static_assert(False)"
"""What a kernel's statement is replaced by to see whether any case compiles it; host code raises instead."""
WALL = 60.0
"""Seconds of wall time for one mutant; a changed loop may not end."""


@dataclass(frozen=True)
class Mutant:
    """One change of an expert's source.

    Attributes:
        kind: of the change.
        line: in the source, from 1.
        before: the changed piece of text.
        after: what it was changed to.
        start: offset of the piece in the source.
        function: the innermost function or kernel that contains it; empty outside of functions.
        code: the line of the source without indentation.
    """

    kind: str
    line: int
    before: str
    after: str
    start: int
    function: str = ""
    code: str = ""

    def applied(self, text: str) -> str:
        """Return the source with the change."""
        return text[: self.start] + self.after + text[self.start + len(self.before) :]


class _Finder(ast.NodeVisitor):
    """Collects the possible mutants of one source."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.found: list[Mutant] = []
        self._function = ""
        self._lines = lines = text.split("\n")
        self._starts = [0]
        for line in lines:
            self._starts.append(self._starts[-1] + len(line) + 1)

    def at(self, line: int, column: int) -> int:
        """Return the offset of a position; columns count bytes of UTF-8."""
        start = self._starts[line - 1]
        row = self.text[start : self._starts[line] - 1]
        return start + len(row.encode()[:column].decode())

    def span(self, node: ast.expr | ast.keyword) -> tuple[int, int]:
        """Return the offsets of a node."""
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self.at(node.lineno, node.col_offset), self.at(node.end_lineno, node.end_col_offset)

    def change(self, kind: str, start: int, end: int, after: str) -> None:
        """Add a mutant."""
        line = self.text.count("\n", 0, start) + 1
        code = self._lines[line - 1].strip()
        self.found.append(Mutant(kind, line, self.text[start:end], after, start, self._function, code))

    def between(self, kind: str, left: ast.expr, right: ast.expr, pair: tuple[str, str]) -> None:
        """Change the operator between two operands."""
        start, end = self.span(left)[1], self.span(right)[0]
        at = self.text.find(pair[0], start, end)
        if at >= 0:
            self.change(kind, at, at + len(pair[0]), pair[1])

    def visit_Compare(self, node: ast.Compare) -> None:
        """Change comparison operators."""
        left = node.left
        for op, right in zip(node.ops, node.comparators, strict=True):
            if type(op) in COMPARISONS:
                self.between("comparison", left, right, COMPARISONS[type(op)])
            left = right
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        """Change arithmetic operators."""
        if type(node.op) in OPERATORS:
            kind = "mask" if isinstance(node.op, ast.BitAnd | ast.BitOr) else "operator"
            self.between(kind, node.left, node.right, OPERATORS[type(node.op)])
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        """Remove signs."""
        if isinstance(node.op, ast.USub):
            start, end = self.span(node)
            self.change("sign", start, end, self.text[slice(*self.span(node.operand))])
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        """Change numbers."""
        start, end = self.span(node)
        if isinstance(node.value, bool):
            self.change("constant", start, end, str(not node.value))
        elif isinstance(node.value, int) and abs(node.value) < 16:
            self.change("constant", start, end, str(node.value + 1))
        elif isinstance(node.value, float):
            self.change("constant", start, end, repr(node.value * 1.01 if node.value else 1.0))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """Change dtypes to narrower ones."""
        if node.attr in DTYPES:
            end = self.span(node)[1]
            self.change("dtype", end - len(node.attr), end, DTYPES[node.attr])
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        """Change functions, masks and strides; leave the knobs alone."""
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in CALLS:
            end = self.span(node.func)[1]
            self.change("function", end - len(name), end, CALLS[name])
        if name == "contiguous" and not node.args and isinstance(node.func, ast.Attribute):
            start, end = self.span(node)
            self.change("stride", start, end, self.text[slice(*self.span(node.func.value))])
        for keyword in node.keywords:
            if keyword.arg == "mask" and name == "load":
                start, end = self.span(keyword.value)
                self.change("mask", start, end, f"({self.text[start:end]}) & False")
        for child in (node.func, *node.args):
            self.visit(child)
        for keyword in node.keywords:
            if keyword.arg not in KNOBS:
                self.visit(keyword.value)

    def visit_If(self, node: ast.If) -> None:
        """Take a branch always, or never."""
        start, end = self.span(node.test)
        for after in ("True", "False"):
            self.change("branch", start, end, after)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        """Take a branch always, or never."""
        start, end = self.span(node.test)
        for after in ("True", "False"):
            self.change("branch", start, end, after)
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Leave signatures, decorators and docstrings alone."""
        outer, self._function = self._function, node.name
        for statement in node.body:
            if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
                self.visit(statement)
        self._function = outer


def mutants(text: str) -> list[Mutant]:
    """List the possible mutants of a source, in the order of their places.

    Args:
        text: the source.

    Returns:
        One mutant for each possible change.
    """
    finder = _Finder(text)
    finder.visit(ast.parse(text))
    return sorted(finder.found, key=lambda m: (m.start, m.after))


def chosen(task_id: str, text: str, count: int, seed: int) -> list[Mutant]:
    """Draw mutants of a source, as evenly over their kinds as there are any.

    Args:
        task_id: the task.
        text: the expert's source.
        count: the most mutants.
        seed: of the choice.

    Returns:
        The mutants.
    """
    draw = random.Random(f"{seed} {task_id}")
    kinds: dict[str, list[Mutant]] = {}
    for mutant in mutants(text):
        kinds.setdefault(mutant.kind, []).append(mutant)
    for group in kinds.values():
        draw.shuffle(group)
    found: list[Mutant] = []
    while len(found) < count and any(kinds.values()):
        for kind in draw.sample(sorted(kinds), len(kinds)):
            if kinds[kind] and len(found) < count:
                found.append(kinds[kind].pop())
    return found


@functools.cache
def equivalents() -> tuple[Mapping[str, str], ...]:
    """Return the rules of ``EQUIVALENT``."""
    return tuple(json.loads(EQUIVALENT.read_text()))


def matches(rule: Mapping[str, str], task_id: str, mutant: Mutant) -> bool:
    """Return whether a rule of ``EQUIVALENT`` says that a mutant makes no difference."""
    same = all(rule[key] in ("*", getattr(mutant, key)) for key in ("function", "code", "before", "after"))
    return same and any(fnmatch.fnmatch(task_id, glob) for glob in rule["tasks"].split(","))


def reason(task_id: str, mutant: Mutant) -> str | None:
    """Return why a mutant makes no difference; ``None`` if no rule says so."""
    return next((rule["why"] for rule in equivalents() if matches(rule, task_id, mutant)), None)


def crashed(text: str, line: int) -> str | None:
    """Return the source in which the statement at a line raises an error, to see whether any case executes it.

    Args:
        text: the source.
        line: a line of the statement.

    Returns:
        The source; ``None`` if the line is in no function.
    """
    rows = text.split("\n")
    kernel, place = False, None
    for function in (n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef)):
        for node in ast.walk(function):
            if not isinstance(node, ast.stmt) or node is function:
                continue
            inside = node.lineno <= line <= (node.end_lineno or node.lineno)
            if inside and (place is None or node.lineno > place):
                place = node.lineno
                kernel = any("jit" in ast.unparse(d) for d in function.decorator_list)
    if place is None or rows[place - 1].lstrip().startswith(("elif", "else")):
        return None
    indent = rows[place - 1][: len(rows[place - 1]) - len(rows[place - 1].lstrip())]
    rows.insert(place - 1, indent + (CRASH if kernel else 'raise RuntimeError("reached")'))
    return "\n".join(rows)


_grader: Grader | None = None


def _work(job: tuple[str, str, Mutant, tuple[str, ...]]) -> dict[str, Any]:
    """Grade one mutant in a worker process that keeps its grader."""
    global _grader
    task_id, text, mutant, without = job
    row = {"task": task_id} | asdict(mutant)
    _grader = _grader or Grader(without=without)
    begun = time.monotonic()
    options: dict[str, Any] = {"backend": "cpu", "targets": (), "wall": WALL}
    outcome = _grader.grade(task_id, mutant.applied(text), **options)
    survives, reached = outcome.correct, True
    why = reason(task_id, mutant) if survives else None
    if survives and why is None and (broken := crashed(text, mutant.line)) is not None:
        reached = not _grader.grade(task_id, broken, **options).correct
    return row | {
        "verdict": str(outcome.verdict), "survives": survives and reached and why is None, "reached": reached, "why": why,
        "seconds": round(time.monotonic() - begun, 2),
    }  # fmt: skip


def _jobs(
    pattern: str, count: int | None, seed: int, without: tuple[str, ...]
) -> Iterator[tuple[str, str, Mutant, tuple[str, ...]]]:
    """Yield the jobs of the workers; a ``count`` of ``None`` is every mutant, in an order that the seed decides."""
    jobs = []
    for task in load_tasks(pattern=pattern):
        text = expert_source(task.id)
        if text is not None:
            found = mutants(text) if count is None else chosen(task.id, text, count, seed)
            jobs += [(task.id, text, mutant, without) for mutant in found]
    if count is not None:
        yield from jobs
        return
    random.Random(seed).shuffle(jobs)
    seen: set[tuple[str, str, str, str, int]] = set()
    again = []
    for job in jobs:
        text, m = job[1:3]
        change = m.function, m.code, m.before, m.after, m.start - text.rfind("\n", 0, m.start)
        if change in seen:
            again.append(job)
        else:
            seen.add(change)
            yield job
    yield from again


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table of mutants by kind, the reasons of equivalent ones, and the list of survivors.

    Args:
        rows: graded mutants.

    Returns:
        Markdown.
    """
    graded = [r for r in rows if r["reached"]]
    total, alive = Counter(r["kind"] for r in graded), Counter(r["kind"] for r in graded if r["survives"])
    same = Counter(r["kind"] for r in graded if r["why"])
    lines = ["| change | mutants | killed | equivalent | survive |", "|---|---|---|---|---|"]
    for kind in sorted(total):
        killed = total[kind] - same[kind] - alive[kind]
        lines.append(f"| {kind} | {total[kind]} | {killed} | {same[kind]} | {alive[kind]} |")
    killed = len(graded) - same.total() - alive.total()
    lines += [
        f"| **all** | {len(graded)} | {killed} | {same.total()} | {alive.total()} |",
        "",
        f"{len({r['task'] for r in rows})} tasks, {len(rows) - len(graded)} further mutants in code that no case executes, "
        f"{sum(r['seconds'] for r in rows):.0f} s of grading.",
        "",
        "| why a mutant makes no difference | mutants |",
        "|---|---|",
    ]
    reasons = Counter(r["why"] for r in graded if r["why"])
    lines += [f"| {why} | {count} |" for why, count in reasons.most_common()]
    lines += ["", "| task | line | surviving change | code |", "|---|---|---|---|"]
    for r in graded:
        if r["survives"]:
            code = r["code"].replace("|", "\\|")[:110]
            change = f"`{r['before'][:40]}` to `{r['after'][:40]}`".replace("\n", " ").replace("|", "\\|")
            lines.append(f"| {r['task']} | {r['line']} | {change} | `{code}` |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments; by default those of the process.

    Returns:
        Exit status: always 0. A survivor is a question to a person, not a failure.
    """
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tasks", default="*", help="globs over task ids, comma-separated")
    parser.add_argument("--per-task", type=int, default=4, help="mutants of each expert")
    parser.add_argument("--every", action="store_true", help="all mutants instead of --per-task")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after these seconds")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of mutants")
    parser.add_argument("--workers", type=int, default=1, help="gradings at a time")
    parser.add_argument("--without", action="append", default=[], help="a defence layer to leave out, such as derived")
    parser.add_argument("--json", type=Path, help="file for the results, one JSON object a line")
    parser.add_argument("--table", type=Path, nargs="+", metavar="FILE", help="print the table of earlier results and stop")
    options = parser.parse_args(argv)
    if options.table:
        print(table([json.loads(line) for file in options.table for line in file.read_text().splitlines()]))
        return 0
    count = None if options.every else options.per_task
    jobs, begun = list(_jobs(options.tasks, count, options.seed, tuple(options.without))), time.monotonic()
    rows: list[dict[str, Any]] = []
    if options.json and options.json.exists():
        rows = [json.loads(line) for line in options.json.read_text().splitlines()]
        done = {(r["task"], r["start"], r["after"]) for r in rows}
        jobs = [j for j in jobs if (j[0], j[2].start, j[2].after) not in done]
    with ProcessPoolExecutor(options.workers) as pool:
        # As they end, not in order: a changed loop may take a minute.
        running = [pool.submit(_work, job) for job in jobs]
        for future in track(as_completed(running), "mutants", len(jobs)):
            row = future.result()
            rows.append(row)
            if options.json:
                with options.json.open("a") as file:
                    file.write(json.dumps(row) + "\n")
            if time.monotonic() - begun > options.seconds:
                pool.shutdown(wait=False, cancel_futures=True)
                break
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
