"""The first stage: reads the source as text, in milliseconds and without running it.

Screen and loader see the same bytes: UTF-8 without coding cookie, bounded in size and nesting. A source that cannot be
screened is malformed; a source that uses a forbidden name is rejected. A forbidden import that nothing in the source uses
is an error of the source, like one that does not compile (``docs/decisions/0026-idle-imports.md``).
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import re
import symtable
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from kbx_env.grading.static.denylist import Violations
from kbx_env.grading.static.lint import slips
from kbx_env.grading.static.syntax_tree import ParsedSource, walked
from kbx_env.outcome import Verdict, Violation
from kbx_env.spec.task import Task

MAX_BYTES = 1 << 20
MAX_NODES = 100_000
_Parsed = TypeVar("_Parsed")
_UTF8 = re.compile(r"utf[-_]?8(-unix)?", re.IGNORECASE)


@dataclass(frozen=True)
class Screened:
    """The result of the screen.

    Attributes:
        text: the decoded source; empty if it is malformed.
        verdict: ``None`` if the source may be compiled; else malformed, rejected, or a compile error.
        message: why it may not.
        violations: the forbidden names.
        slips: errors that are certain where they are reached (``lint.slips``); ``None`` if the source is malformed.
        gate: why the published gate refuses the source (``as_published``); empty if it does not.
    """

    text: str = ""
    verdict: Verdict | None = None
    message: str = ""
    violations: tuple[Violation, ...] = ()
    slips: tuple[str, ...] | None = None
    gate: str = ""


class _Malformed(Exception):
    """The source cannot be screened; the text says why."""


@functools.lru_cache(maxsize=4)  # a source is screened again for its proof on the CPU tier, and in every grading of a proof
def screen(task: Task, source: str | bytes, *, as_published: bool = False) -> Screened:
    """Check the bytes, the syntax, the entry function and the names of a source.

    Args:
        task: declares the entry function.
        source: the submission as it came; text is encoded as UTF-8.
        as_published: ask for no entry and no parameters: the published test calls the entry as it is, and ``Screened.gate``
            says what the published gate wants.

    Returns:
        The verdict, with the decoded text if the source is not malformed.
    """
    try:
        text = _decode(source.encode("utf-8", "surrogatepass") if isinstance(source, str) else source)
        parsed = _parse(task, text, as_published)
        try:
            checked = Violations(parsed)
        except RecursionError:
            raise _Malformed("the source is nested too deeply") from None
    except _Malformed as e:
        return Screened(verdict=Verdict.MALFORMED, message=str(e))
    certain: tuple[str, ...] = ()
    with contextlib.suppress(RecursionError):  # no verdict depends on these
        certain = slips(parsed, checked.names)
    found = tuple(checked.found)
    if found:
        shown = "; ".join(v.detail for v in found[:3])
        return Screened(text, Verdict.REJECTED, shown, (*found, *checked.idle), certain)
    if checked.idle:
        idle = tuple(v.detail for v in checked.idle)
        message = "; ".join(f"{detail}: it cannot be imported and nothing uses it" for detail in idle[:3])
        return Screened(text, Verdict.COMPILE_ERROR, message, (), tuple(sorted({*idle, *certain}, key=_line)))
    return Screened(text, slips=certain, gate=(_gate(task, parsed.tree) or "") if as_published else "")


def _line(slip: str) -> int:
    """Return the line that a slip names, 0 if it names none."""
    found = re.match(r"line (\d+)", slip)
    return int(found.group(1)) if found else 0


def _decode(data: bytes) -> str:
    """Return the text of a source that has nothing but UTF-8 in it, of a bounded size."""
    if not data.strip():
        raise _Malformed("the source is empty")
    if len(data) > MAX_BYTES:
        raise _Malformed(f"the source has {len(data)} bytes; at most {MAX_BYTES}")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as e:
        line = data[: e.start].count(b"\n") + 1
        raise _Malformed(f"line {line}: not UTF-8 text ({e.reason} at byte {e.start})") from None
    control = re.search("[\x00\x0c]", text)
    if control:
        line = text[: control.start()].count("\n") + 1
        raise _Malformed(f"line {line}: control character")
    # Lines as the interpreter counts them: it looks for the cookie in two of these.
    cookies = [re.match(r"^[ \t]*#.*?coding[:=][ \t]*([-\w.]+)", line) for line in re.split("\r\n|\r|\n", text)[:2]]
    if text.startswith("\ufeff") or any(c and not _UTF8.fullmatch(c.group(1)) for c in cookies):
        raise _Malformed("line 1: no byte-order mark and no coding cookie but utf-8, please: the source is read as UTF-8")
    return text


def _parse(task: Task, text: str, as_published: bool) -> ParsedSource:
    """Parse a source that defines the task's entry."""
    tree = _compiled(lambda: ast.parse(text))
    nodes, children = walked(tree)
    if len(nodes) > MAX_NODES:
        raise _Malformed(f"the source has {len(nodes)} syntax nodes; at most {MAX_NODES}")
    try:
        entry = _entry(task, tree, as_published)
    except RecursionError:
        raise _Malformed("the source is nested too deeply") from None
    if entry is not None:
        raise _Malformed(entry)
    return ParsedSource(tree, _compiled(lambda: symtable.symtable(text, "source", "exec")), nodes, children)


def _compiled(parse: Callable[[], _Parsed]) -> _Parsed:
    """Run a part of Python's compiler on the source; whatever it refuses is malformed."""
    try:
        return parse()
    except SyntaxError as e:
        raise _Malformed(f"line {e.lineno}: syntax error: {e.msg}") from None
    except (RecursionError, MemoryError, ValueError) as e:
        raise _Malformed(f"the source cannot be parsed: {type(e).__name__}") from None


def _entry(task: Task, tree: ast.Module, as_published: bool) -> str | None:
    """Return why the entry is missing or has the wrong parameters, or ``None``."""
    if as_published:  # the entry is looked up after the module has run
        return None
    defined: list[ast.FunctionDef] = []
    assigned = False
    for node in _outside(tree):
        if isinstance(node, ast.FunctionDef) and node.name == task.entry:
            defined.append(node)
        bound = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == task.entry
        if bound or (isinstance(node, ast.ClassDef) and node.name == task.entry):
            assigned = True
        if isinstance(node, ast.ImportFrom) and any((a.asname or a.name) == task.entry for a in node.names):
            assigned = True
    if assigned:  # the text does not say what it is; the runner finds out whether it can be called
        return None
    if not defined:
        names = [n.name for n in _outside(tree) if isinstance(n, ast.FunctionDef)]
        return f"no function named {task.entry!r} at the top level (found: {', '.join(names) or 'none'})"
    # Of several definitions, each under its own condition, one that fits is enough.
    wrong = [_mismatch(task, d) for d in defined]
    return None if None in wrong else wrong[-1]


def _gate(task: Task, tree: ast.Module) -> str | None:
    """Return why the published gate refuses a source, or ``None``.

    The gate asks for a top-level function or assignment with the name of the task's file, or ``kernel_function``. The published
    test then calls the entry, which the runner looks up after the module has run.
    """
    wanted = {task.id.rsplit("/", 1)[-1], "kernel_function"}
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        named = {t.id for t in targets if isinstance(t, ast.Name)}
        if wanted & (named | ({node.name} if isinstance(node, ast.FunctionDef) else set())):
            return None
    return f"no function or assignment named {' or '.join(sorted(wanted))} at the top level, which the published gate asks for"


def _mismatch(task: Task, defined: ast.FunctionDef) -> str | None:
    """Return why a function cannot be the entry, or ``None``."""
    if defined.decorator_list and any(_dotted(d).startswith("triton") for d in defined.decorator_list):
        return (
            f"line {defined.lineno}: {task.entry!r} is a Triton kernel; the entry is the host function that launches it"
        )
    where, wanted = f"line {defined.lineno}: {task.entry}", f"{task.entry}{task.signature}"
    a = defined.args
    if a.vararg and a.kwarg:
        return None
    have = [p.arg for p in (*a.posonlyargs, *a.args)]
    every = have + [p.arg for p in a.kwonlyargs]
    for name, p in task.signature.parameters.items():
        keyword = p.kind is inspect.Parameter.KEYWORD_ONLY
        if name in every or (a.kwarg and (keyword or not a.vararg)):
            continue
        return f"{where} lacks the parameter {name!r}; signature: {wanted}"
    order = [n for n, p in task.signature.parameters.items() if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    by_keyword = set(order) <= {p.arg for p in a.kwonlyargs}
    if not a.vararg and not by_keyword and [h for h in have if h in order] != order:
        return f"{where} has its parameters in another order; signature: {wanted}"
    extra = [n for n in have[: len(have) - len(a.defaults)] if n not in task.signature.parameters]
    if extra:
        return f"{where} demands an unknown parameter {extra[0]!r}; signature: {wanted}"
    return None


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    if isinstance(node, ast.Call):
        return _dotted(node.func)
    return node.id if isinstance(node, ast.Name) else ""


def _outside(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that run on module level, in the order of the text: not the bodies of functions and classes."""
    for node in ast.iter_child_nodes(tree):
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield from _outside(node)
