"""Lists what each contract promises, and the case that tests each promise.

    python eval/promises.py [--tasks GLOBS] [--missing] [--rare SHARE] [--write] [--check]

A promise is read from the declaration and the text of a task: layouts, numbers of axes, empty tensors, ``out=``,
broadcasting, lengths that need more than one block, values of every argument, dtypes, special values. It is tested by a
declared case or by a family of derived cases, of which the share of draws that test it is shown. ``--write`` writes
``tasks/promises.json``, ``--check`` compares it with the declarations, ``--missing`` lists promises without a case.
``--rare`` lists those that a grading tests with a probability below SHARE. It counts whole gradings, because one derived case of
each grading is contiguous: the shares of single families cannot be multiplied.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from kbx_env.grading import derived_cases, inputs
from kbx_env.spec.catalog import load_tasks
from kbx_env.spec.input_distributions import Choice, Constant, Ints, Literal
from kbx_env.spec.task import Case, DtypeArg, Task, shape_of
from kbx_env.spec.varied import parsed

FILE = Path(__file__).resolve().parent.parent / "tasks" / "promises.json"
DRAWS = 40
"""Draws of each family of derived cases."""
FEW = 0.05
"""A family tests a promise if at least this share of its draws does; rarer ones are luck."""
BLOCK = 129
"""Length from which on an axis needs two blocks of the kernels that policies write for matrices and pictures."""
MATRIX = 49
"""The same for axes of matrices that a kernel holds whole."""
FLAT = 1025
"""The same for tensors of any number of axes."""
WORDS = {
    "fp32": "f32", "float32": "f32", "fp16": "f16", "float16": "f16", "bfloat16": "bf16", "bf16": "bf16", "fp64": "f64",
    "float64": "f64", "int64": "i64", "int32": "i32", "int8": "i8", "complex64": "c64", "complex128": "c128",
}  # fmt: skip
"""Names of dtypes in contracts."""
SHORT_AXES = ("R", "S", "D", "2", "3")
"""Axes that are short by nature: windows, coordinates, channels of a group."""
UNTESTED = "tested|occur"
"""Words of a sentence that excludes something."""

NEW_CONTIGUOUS = "contiguous tensors of no declared shape"
"""The promise that a task is not a list of shapes: strides alone must not tell declared cases from derived ones."""
POINT_OUT = ("fusion/fused_gelu_min", "fusion/fused_sum_std", "reduce/min_gelu")
"""Tasks whose ``out=`` has no axes, and so no strides."""

MISREAD = {
    ("fusion/fused_layer_norm_relu_linear", "normalized_shape=None"): "the contract takes an int or a sequence",
    ("math/logit", "infinities"): "infinite results; infinite inputs are excluded",
}
"""What the rules below take for a promise and is none, with the reason."""

Test = Callable[..., bool]


def sentences(task: Task) -> list[str]:
    """Return the sentences of a contract."""
    return re.split(r"(?<=[.;])\s+", " ".join(task.spec.split()))


def _says(task: Task, pattern: str, unless: str = "") -> bool:
    """Return whether a sentence of the contract matches a pattern, and not another one."""
    return any(re.search(pattern, s) and not (unless and re.search(unless, s)) for s in sentences(task))


def shapes(task: Task, case: Case) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor that a case passes."""
    return {
        name: shape_of(t, case.axes) for name, t in task.takes.items()
        if name not in case.args and (not t.optional or name in case.given)
    }  # fmt: skip


def _bound(task: Task, case: Case, name: str) -> Any:
    """Return the value of a parameter in a case."""
    default = task.signature.parameters[name].default
    value = case.args.get(name, None if default is inspect.Parameter.empty else default)
    return value.name if isinstance(value, DtypeArg) else value


def _draws(case: Case, task: Task) -> list[Any]:
    """Return the distributions of a case's tensors."""
    return [case.draws.get(n) or t.draw or case.draw for n, t in task.takes.items()]


def _holds(case: Case, task: Task, wanted: Callable[[float], bool]) -> bool:
    """Return whether a distribution of a case lists a value of a kind."""
    listed = [d for d in _draws(case, task) if isinstance(d, Choice | Literal | Constant)]
    return any(wanted(v) for d in listed for v in (d.values if not isinstance(d, Constant) else (d.value,)))


def _rearranged(task: Task, case: Case, name: str) -> bool:
    """Return whether a tensor of a case would be another one if it were read as contiguous."""
    if case.layouts.get(name, "offset") == "offset":
        return False
    value = inputs.described(task, case).get(name)
    return isinstance(value, torch.Tensor) and value.numel() > 1 and not value.is_contiguous()


def _both_ways(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Return whether each of two shapes is stretched by the other."""
    rank = max(len(a), len(b))
    wide = [(1,) * (rank - len(s)) + s for s in (a, b)]
    return any(x == 1 < y for x, y in zip(*wide, strict=True)) and any(y == 1 < x for x, y in zip(*wide, strict=True))


def promises(task: Task) -> dict[str, Test]:
    """Read the promises of a contract.

    Args:
        task: the task.

    Returns:
        By text of the promise: whether a case tests it.
    """
    found = dict(_layouts(task)) | dict(_new_shapes(task)) | dict(_sizes(task)) | dict(_arguments(task)) | dict(_values(task))
    return {text: test for text, test in found.items() if (task.id, text) not in MISREAD}


def _layouts(task: Task) -> Iterator[tuple[str, Test]]:
    """Yield the promises on memory layouts and numbers of axes."""
    free = _says(task, r"stride|non-contiguous")
    for name, t in task.takes.items():
        axes = t.axes.split()
        stars = any(a.startswith("*") for a in axes)
        if free and axes:
            yield (
                f"{name}: any strides",
                lambda c, n=name: _rearranged(task, c, n),
            )
        if free and (stars or len(axes) > 2) and _widest(task, name) > 2:
            yield (f"{name}: three or more axes in any order in memory",
                   lambda c, n=name: len(shapes(task, c).get(n, ())) > 2 and parsed(c.layouts.get(n, "offset")) is not None
                   and _rearranged(task, c, n))  # fmt: skip
        if stars and _says(task, rf"any (shape|rank|number of)|\b{name}\b.*any shapes") and len(axes) == 1:
            yield f"{name}: more than three axes", lambda c, n=name: len(shapes(task, c).get(n, ())) > 3
        if (
            name == next(iter(task.takes))
            and stars
            and len(axes) == 1
            and _says(task, r"\b0-d\b.*(empty|non-contiguous|allowed)|(non-contiguous|strides).*\b0-d")
        ):
            yield f"{name}: no axis", lambda c, n=name: shapes(task, c).get(n) == ()
    if task.takes and _says(
        task, r"may be (0|empty)|or empty|are allowed|may have no|which may be empty|can be 0", UNTESTED
    ):
        yield "empty", lambda c: any(math.prod(s) == 0 for s in shapes(task, c).values())
    if "out" in task.signature.parameters:
        yield "out=", lambda c: c.out
        if not derived_cases.contiguous_out(task) and task.id not in POINT_OUT:
            yield "out= of any strides", lambda c: "out" in c.layouts
    for name in task.writes:
        yield f"{name} written in place", lambda c, n=name: n in task.written(c.args)
        if free and name != "out_tensor":
            yield (
                f"{name} written in place, of any strides",
                lambda c, n=name: n in task.written(c.args) and n in c.layouts,
            )
    free_rank = [n for n, t in task.takes.items() if t.axes.startswith("*") and " " not in t.axes]
    pairs = [(a, b) for a in free_rank for b in free_rank if a < b and task.takes[a].axes != task.takes[b].axes]
    if (
        _says(task, r"broadcast (against|by)|broadcasts? (with|as|both)|with broadcasting", "not enlarge|does not")
        and pairs
    ):
        a, b = pairs[0]
        yield (
            "broadcasting both ways",
            lambda c: {a, b} <= set(shapes(task, c)) and _both_ways(*(shapes(task, c)[n] for n in (a, b))),
        )


def _new_shapes(task: Task) -> Iterator[tuple[str, Test]]:
    """Yield the promise that contiguous tensors may have any shape of the contract, not only those of declared cases."""
    declared = [shapes(task, c) for c in task.cases]
    if any(declared):
        yield NEW_CONTIGUOUS, lambda c: not c.layouts and shapes(task, c) not in declared


def _widest(task: Task, name: str) -> int:
    """Return the largest number of axes that a tensor has in declared cases; four where that is free."""
    t = task.takes[name]
    if "*" in t.axes and _says(task, r"any (shape|rank|number of)"):
        return 4
    return max((len(shapes(task, c).get(name, ())) for c in task.cases), default=0)


def _sizes(task: Task) -> Iterator[tuple[str, Test]]:
    """Yield the promises on lengths of axes."""
    named = dict.fromkeys(
        a for t in task.takes.values() for a in t.axes.split() if not a.startswith("*") and not a.isdigit()
    )
    for axis in named:
        if axis in SHORT_AXES and max((c.axes.get(axis, 0) for c in (*task.cases, *task.timed)), default=0) < 16:
            continue
        least = MATRIX if axis in ("n", "m") else 20 if axis == "N" and "C" in named else BLOCK
        if max((c.axes.get(axis, 0) for c in task.timed), default=0) >= least:
            yield f"{axis}: more than one block", lambda c, a=axis, n=least: c.axes.get(a, 0) >= n
    if any("*" in t.axes for t in task.takes.values()) and not named:
        yield (
            "an axis of more than one block",
            lambda c: max((n for s in shapes(task, c).values() for n in s), default=0) >= FLAT,
        )


def _arguments(task: Task) -> Iterator[tuple[str, Test]]:
    """Yield the promises on the values of arguments."""
    quoted = set(re.findall(r'"(\w+)"', task.spec))
    for name, p in task.signature.parameters.items():
        if (
            name in task.takes
            or name in ("out", "layout", "device", "pin_memory", "generator")
            or f"{name}.0" in task.takes
        ):
            continue
        used = [_bound(task, c, name) for c in task.cases]
        kinds = {type(v) for v in used if v is not None}
        if p.default is None and not _says(task, rf"{name}=None.*not occur"):
            yield f"{name}=None", lambda c, n=name: _bound(task, c, n) is None
        if bool in kinds:
            for value in (True, False):
                yield f"{name}={value}", lambda c, n=name, v=value: _bound(task, c, n) is v
        elif str in kinds:
            for word in sorted({v for v in used if isinstance(v, str)} | (quoted & _choices(task, name))):
                yield f"{name}={word}", lambda c, n=name, v=word: _bound(task, c, n) == v
        else:
            common = [v for v in used if v is not None]
            told = {repr(v) for v in common if common.count(v) > 0}
            fixed = name == "dim" and not any("*" in t.axes for t in task.takes.values())  # all axes are declared
            if kinds & {int, float} and len(told) > 1 and not fixed:
                yield (
                    f"{name}: values of no declared case",
                    lambda c, n=name, t=told: _bound(task, c, n) is not None and repr(_bound(task, c, n)) not in t,
                )
            if tuple in kinds and kinds & {int, tuple} and _says(task, rf"\b{name}\b.*(tuple|sequence|pair)"):
                yield f"{name}: tuples", lambda c, n=name: isinstance(_bound(task, c, n), tuple | list)
    for name, t in task.takes.items():
        if t.optional:
            yield f"{name} given", lambda c, n=name: n in c.given
            yield f"{name} left out", lambda c, n=name: n not in c.given


def _choices(task: Task, name: str) -> set[str]:
    """Return the quoted words of the sentences that name a parameter."""
    return {w for s in sentences(task) if re.search(rf"\b{name}\b", s) for w in re.findall(r'"(\w+)"', s)}


def _values(task: Task) -> Iterator[tuple[str, Test]]:
    """Yield the promises on dtypes and special values."""
    reachable = {d for c in task.cases for d in _dtypes(task, c)}
    for word, dtype in WORDS.items():
        if dtype in reachable and re.search(rf"\b{word}\b", task.spec) and WORDS.get(word) == dtype:
            yield f"dtype {dtype}", lambda c, d=dtype: d in _dtypes(task, c)
    if _says(task, r"\bNaN\b", f"{UNTESTED}|must not|become") and not task.writes.get("out_tensor"):
        given = _says(task, r"NaN (gives|stays|counts|stay)|NaN, inf|and NaN (pass|stay)|NaN too")
        if given:
            yield "NaN", lambda c: _holds(c, task, math.isnan) or any(v != v for v in c.args.values())
    if _says(task, r"(infinit\w+|[+-]inf)\b.*(give|stay|pass|become|zero)", f"{UNTESTED}|overflow"):
        yield "infinities", lambda c: _holds(c, task, math.isinf)
    if _says(task, r"64 bits|2\^64"):
        yield "int64 of all bits", lambda c: any(isinstance(d, Ints) and d.low <= -(2**62) for d in _draws(c, task))
    if (
        "i64" in reachable
        and any("i64" in c.dtypes.values() for c in task.cases)
        and task.category in ("reduce", "math")
    ):
        yield (
            "int64 next to the ends of the range",
            lambda c: any(
                isinstance(d, Ints) and (d.low <= -(2**57) or (isinstance(d.high, int) and d.high >= 2**62))
                for d in _draws(c, task)
            ),
        )


def _dtypes(task: Task, case: Case) -> set[str]:
    """Return the dtypes that a case passes, of tensors and as arguments."""
    tensors = {case.dtypes.get(n, task.takes[n].dtype) for n in shapes(task, case)}
    return tensors | {v.name for v in case.args.values() if isinstance(v, DtypeArg)}


def gradings(task: Task) -> list[Sequence[Case]]:
    """Draw the derived cases of gradings: the same ones every time.

    Args:
        task: the task.

    Returns:
        The derived cases of each of ``DRAWS`` gradings.
    """
    return [derived_cases.derive(task, b"promises %d" % k, "eval") for k in range(DRAWS)]


def rates(task: Task, rounds: Sequence[Sequence[Case]]) -> dict[str, float]:
    """Return how often whole gradings test each promise of a task.

    Args:
        task: the task.
        rounds: from ``gradings``.

    Returns:
        By promise: the share of gradings in which a declared or a derived case tests it.
    """
    return {
        text: 1.0 if any(map(test, task.cases)) else sum(any(map(test, cases)) for cases in rounds) / len(rounds)
        for text, test in promises(task).items()
    }


def tested(task: Task, rounds: Sequence[Sequence[Case]] = ()) -> dict[str, list[str]]:
    """Say which cases test each promise of a task.

    Args:
        task: the task.
        rounds: from ``gradings``; drawn by default.

    Returns:
        By promise: the first declared case that tests it, and every family that does; empty if none does. A last family holds
        the contiguous cases of gradings in which no family's case is contiguous.
    """
    rounds = rounds or gradings(task)
    families = [[cases[k] for cases in rounds if len(cases) > k] for k in range(max(map(len, rounds)))]
    found: dict[str, list[str]] = {}
    for text, test in promises(task).items():
        rows = [f"case {k}: {c.label()}" for k, c in enumerate(task.cases) if test(c)][:1]
        for k, cases in enumerate(families):
            share = sum(map(test, cases)) / DRAWS
            if share >= FEW:
                rows.append(f"family {k}: {100 * share:.0f} %")
        found[text] = rows
    return found


def written(tasks: Sequence[Task]) -> str:
    """Return the text of ``tasks/promises.json``."""
    return json.dumps({t.id: tested(t) for t in tasks}, indent=1) + "\n"


def missing(found: Mapping[str, Mapping[str, Sequence[str]]]) -> list[tuple[str, str]]:
    """Return the promises without a case, as (task, promise)."""
    return [(task, text) for task, rows in found.items() for text, cases in rows.items() if not cases]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments; by default those of the process.

    Returns:
        Exit status: 1 if ``--check`` finds a difference.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tasks", default="*", help="globs over task ids, comma-separated")
    parser.add_argument("--missing", action="store_true", help="list only promises without a case")
    parser.add_argument("--rare", type=float, metavar="SHARE", help="list promises that less than this share of gradings tests")
    parser.add_argument("--write", action="store_true", help="write tasks/promises.json")
    parser.add_argument("--check", action="store_true", help="compare tasks/promises.json with the declarations")
    options = parser.parse_args(argv)
    tasks = load_tasks(pattern=options.tasks)
    if options.rare is not None:
        for one in tasks:
            for text, rate in rates(one, gradings(one)).items():
                if rate < options.rare:
                    print(f"{one.id}: {text}: {100 * rate:.0f} %")
        return 0
    found = {t.id: tested(t) for t in tasks}
    if options.write:
        kept = json.loads(FILE.read_text()) if FILE.exists() else {}
        FILE.write_text(json.dumps(dict(sorted((kept | found).items())), indent=1) + "\n")
    if options.check:
        kept = json.loads(FILE.read_text())
        stale = [t for t, rows in found.items() if kept.get(t) != rows]
        print("\n".join(f"{t}: tasks/promises.json is out of date; run eval/promises.py --write" for t in stale))
        return int(bool(stale))
    if options.missing:
        print("\n".join(f"{task}: {text}" for task, text in missing(found)))
        return 0
    for task, rows in found.items():
        print(f"\n## {task}\n\n| promise | tested by |\n|---|---|")
        for text, cases in rows.items():
            print(f"| {text} | {'; '.join(cases) or '**nothing**'} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
