"""The first stage: reads the source as text, in milliseconds and without running anything.

Screen and loader see the same bytes: UTF-8 without coding cookie, bounded in size and nesting. What cannot be
screened is malformed; what names a forbidden module or door is rejected.
"""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import dataclass

from kbx_env.outcome import Verdict, Violation
from kbx_env.task import Task

MAX_BYTES = 1 << 20
MAX_NODES = 100_000
MODULES = frozenset("""
__future__ math cmath random typing collections collections.abc functools itertools operator dataclasses enum abc
warnings contextlib copy logging numbers string re time typing_extensions types
torch torch.nn torch.nn.functional torch.autograd torch.cuda torch.types torch.testing torch.nn.modules
triton triton.language triton.language.extra triton.language.extra.cuda triton.language.extra.libdevice
triton.language.extra.cuda.libdevice triton.language.math triton.language.standard triton.language.core
triton.runtime triton.runtime.jit triton.runtime.autotuner triton.runtime.driver triton.tools triton.testing
triton.tools.tensor_descriptor triton.compiler
""".split())  # fmt: skip
NAMES = frozenset("eval exec compile __import__ open breakpoint globals vars memoryview exit quit".split())
ATTRIBUTES = frozenset("""
__subclasses__ __globals__ __code__ __closure__ __bases__ __mro__ __builtins__ __loader__ __spec__ __reduce__
__reduce_ex__ __getattribute__ _C cpp_extension from_numpy from_dlpack to_dlpack __dlpack__ __array__
load_inline _dynamo _inductor knobs settrace setprofile gi_frame f_back f_globals tb_frame device_caches
_do_compile JITFunction Autotuner set_active
""".split())  # fmt: skip
CHAINS = frozenset("""
torch.ops torch.library torch.jit torch.compile torch.utils torch.hub torch.load torch.save torch.multiprocessing
torch.distributed torch.classes torch.package torch.fx torch.export torch.onnx torch.inference_mode
""".split())  # fmt: skip


@dataclass(frozen=True)
class Screened:
    """The verdict of the screen; ``verdict`` is ``None`` when the source may go on."""

    text: str = ""
    verdict: Verdict | None = None
    message: str = ""
    violations: tuple[Violation, ...] = ()


def _bad(message: str) -> Screened:
    return Screened(verdict=Verdict.MALFORMED, message=message)


def screen(task: Task, source: str | bytes) -> Screened:
    """Check the bytes, the syntax, the entry and what the source names."""
    data = source.encode("utf-8", "surrogatepass") if isinstance(source, str) else source
    if not data.strip():
        return _bad("the source is empty")
    if len(data) > MAX_BYTES:
        return _bad(f"the source has {len(data)} bytes; at most {MAX_BYTES}")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as e:
        line = data[: e.start].count(b"\n") + 1
        return _bad(f"line {line}: not UTF-8 text ({e.reason} at byte {e.start})")
    control = re.search("[\x00\x0c]", text)
    if control:
        line = text[: control.start()].count("\n") + 1
        return _bad(f"line {line}: control character")
    if text.startswith("\ufeff") or any(
        re.match(r"^[ \t]*#.*?coding[:=][ \t]*([-\w.]+)", line) for line in text.splitlines()[:2]
    ):
        return _bad("line 1: no byte-order mark and no coding cookie, please: the source is read as UTF-8")
    try:
        tree = ast.parse(text)
    except SyntaxError as e:
        return _bad(f"line {e.lineno}: syntax error: {e.msg}")
    except (RecursionError, MemoryError, ValueError) as e:
        return _bad(f"the source cannot be parsed: {type(e).__name__}")
    nodes = sum(1 for _ in ast.walk(tree))
    if nodes > MAX_NODES:
        return _bad(f"the source has {nodes} syntax nodes; at most {MAX_NODES}")
    entry = _entry(task, tree)
    if entry is not None:
        return _bad(entry)
    found = tuple(_violations(tree))
    if found:
        shown = "; ".join(v.detail for v in found[:3])
        return Screened(text, Verdict.REJECTED, shown, found)
    return Screened(text)


def _entry(task: Task, tree: ast.Module) -> str | None:
    """Why the entry is missing or has the wrong parameters, or ``None``."""
    defined: ast.FunctionDef | None = None
    assigned = False
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == task.entry and node.col_offset == 0:
            defined = node
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == task.entry for t in node.targets):
            assigned = True
        if isinstance(node, ast.ImportFrom) and any((a.asname or a.name) == task.entry for a in node.names):
            assigned = True
    if defined is None:
        if assigned:
            return None
        names = [n.name for n in tree.body if isinstance(n, ast.FunctionDef)]
        return f"no function named {task.entry!r} at the top level (found: {', '.join(names) or 'none'})"
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
    if (
        not a.vararg
        and have[: len(order)] != order
        and not set(order) <= {p.arg for p in a.kwonlyargs} | set(have[len(have) :])
    ):
        if [h for h in have if h in order] != order:
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


def _violations(tree: ast.Module) -> list[Violation]:
    out: list[Violation] = []

    def add(rule: str, node: ast.AST, detail: str) -> None:
        if len(out) < 20:
            out.append(Violation(rule, f"line {getattr(node, 'lineno', '?')}: {detail}"))

    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name not in MODULES:
                    add(
                        "forbidden_import",
                        node,
                        f"import {alias.name} (allowed: torch, triton, math, random, typing, ...)",
                    )
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            inside = module.startswith("triton.language")
            if node.level or (module not in MODULES and not inside):
                add("forbidden_import", node, f"from {'.' * node.level}{module} import ...")
            for alias in node.names:
                if f"{module}.{alias.name}" in CHAINS or alias.name in ATTRIBUTES:
                    add("forbidden_name", node, f"{module}.{alias.name}")
        elif isinstance(node, ast.Attribute):
            if node.attr in ATTRIBUTES:
                add("forbidden_name", node, f".{node.attr}")
            elif _dotted(node) in CHAINS:
                add("forbidden_name", node, _dotted(node))
        elif isinstance(node, ast.Name) and node.id in NAMES and isinstance(node.ctx, ast.Load):
            add("forbidden_name", node, f"{node.id}")
    return out
