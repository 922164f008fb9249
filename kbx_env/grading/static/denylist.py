"""What a source may not name: modules, doors out of a runner, builtins that execute text.

Reading text keeps nobody out who builds names at run time; it tells everybody else early and with a line, and leaves
those few to the layers behind.
"""

from __future__ import annotations

import ast
import re
import symtable
from collections.abc import Iterator

from kbx_env.grading.static.aliases import MODULES, Names, forbidden, is_module, step
from kbx_env.grading.static.constant_folding import Folding, assignments
from kbx_env.outcome import Violation

NAMES = frozenset("""
eval exec compile __import__ open breakpoint globals vars memoryview exit quit __builtins__ __loader__ __spec__
""".split())  # fmt: skip
ATTRIBUTES = frozenset("""
__subclasses__ __globals__ __code__ __closure__ __base__ __bases__ __mro__ __builtins__ __loader__ __spec__ __reduce__
__reduce_ex__ __getattribute__ __self__ __annotations__ _C cpp_extension from_numpy from_dlpack to_dlpack __dlpack__
__array__ load_inline _dynamo _inductor knobs settrace setprofile gi_frame gi_code cr_frame ag_frame f_back f_globals
f_locals f_builtins tb_frame cell_contents device_caches _do_compile JITFunction Autotuner set_active
get_type_hints ForwardRef get_field vformat bltns _python_dispatch
CUDAPluggableAllocator change_current_allocator _create_jit_fn _create_multi_output_jit_fn
""".split())  # fmt: skip
FIELDS = frozenset({"_C"})
"""Attributes that a class may have for itself: the channels of (N, C, L)."""
DUNDERS = frozenset(a for a in ATTRIBUTES if a.startswith("__"))
CHAINS = frozenset("""
torch.ops torch.library torch.jit torch.compile torch.utils torch.hub torch.load torch.save torch.multiprocessing
torch.distributed torch.classes torch.package torch.fx torch.export torch.onnx torch.compiler.compile
torch.autograd.inference_mode string.Formatter
""".split())  # fmt: skip
_MOST = 20
_FORMATTED = re.compile(r"\{[^{}]*[.\[](__\w+__)")
_DOTTED = re.compile(r"[\w.\[\]]+")
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_SCOPES: dict[type[ast.AST], str] = {
    ast.FunctionDef: "", ast.AsyncFunctionDef: "", ast.ClassDef: "", ast.Lambda: "lambda", ast.ListComp: "listcomp",
    ast.SetComp: "setcomp", ast.DictComp: "dictcomp", ast.GeneratorExp: "genexpr",
}  # fmt: skip


class Violations:
    """Everything that a source names and may not.

    Args:
        tree: the source.
        table: which names are whose, as the compiler sees it.

    Attributes:
        found: the violations, at most twenty.
        names: what the source's names stand for.
    """

    def __init__(self, tree: ast.Module, table: symtable.SymbolTable) -> None:
        self.found: list[Violation] = []
        self._told: set[tuple[int, str]] = set()
        bound = list(assignments(tree))
        self._folding = Folding(bound)
        self.names = Names(tree, bound, self._folding)
        self._fields = _own_fields(tree)
        self._free = _builtins_used(tree, table)
        for node in ast.walk(tree):
            self._look(node)

    def _add(self, rule: str, node: ast.AST, detail: str) -> None:
        line = getattr(node, "lineno", 0)
        if len(self.found) < _MOST and (line, detail) not in self._told:
            self._told.add((line, detail))
            self.found.append(Violation(rule, f"line {line or '?'}: {detail}"))

    def _look(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name not in MODULES:
                    self._add(
                        "forbidden_import",
                        node,
                        f"import {alias.name} (allowed: torch, triton, math, random, typing, ...)",
                    )
        elif isinstance(node, ast.ImportFrom):
            self._look_from(node)
        elif isinstance(node, ast.Attribute):
            if node.attr in ATTRIBUTES and node not in self._fields:
                self._add("forbidden_name", node, f".{node.attr}")
            elif node.attr == "__dict__" and any(map(is_module, self.names.paths(node.value))):
                self._add("forbidden_name", node, "the __dict__ of a module")
            else:
                self._look_at_paths(node)
        elif isinstance(node, ast.Name):
            if node in self._free:
                self._add("forbidden_name", node, f"{node.id}")
            self._look_at_paths(node)
        elif isinstance(node, ast.Call):
            for _, name in self.names.fetched(node):
                for part in set(name.split(".")) & ATTRIBUTES:
                    self._add("forbidden_name", node, f".{part}, by a string")
            self._look_at_paths(node)
        if isinstance(node, ast.expr):
            self._look_at_strings(node)
        for annotation in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            if annotation is not None:
                self._look_at_annotation(annotation)

    def _look_from(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        if node.level or (module not in MODULES and not module.startswith("triton.language")):
            self._add("forbidden_import", node, f"from {'.' * node.level}{module} import ...")
            return
        for alias in node.names:
            path = step(module, alias.name)
            if path in CHAINS or alias.name in ATTRIBUTES or forbidden(path):
                self._add("forbidden_name", node, f"{module}.{alias.name}")

    def _look_at_paths(self, node: ast.expr) -> None:
        for path in sorted(self.names.paths(node)):
            if path in CHAINS or forbidden(path):
                self._add("forbidden_name", node, path)

    def _look_at_strings(self, node: ast.expr) -> None:
        """Double-underscore names alone in a string, however it is put together, and in the fields of a format."""
        for text in self._folding.strings(node):
            parts = set(re.split(r"[.\[\]]", text)) if _DOTTED.fullmatch(text) else set(_FORMATTED.findall(text))
            for part in sorted(parts & DUNDERS):
                self._add("forbidden_name", node, f"{part!r} in a string")

    def _look_at_annotation(self, node: ast.expr) -> None:
        """An annotation in quotes is code as well: some library functions evaluate it."""
        for text in self._folding.strings(node):
            try:
                inner = ast.parse(text, mode="eval").body
            except (SyntaxError, ValueError, RecursionError, MemoryError):
                continue
            for part in ast.walk(inner):
                if hasattr(part, "lineno"):
                    part.lineno = node.lineno
                if isinstance(part, ast.Name) and part.id in NAMES:
                    self._add("forbidden_name", node, f"{part.id}")
                if not isinstance(part, ast.Constant):
                    self._look(part)


def _own_fields(tree: ast.AST) -> set[ast.AST]:
    """Attributes of ``self`` that its class stores, or keeps a slot for, and that have the name of a door elsewhere."""
    own: set[ast.AST] = set()
    for cls in (n for n in ast.walk(tree) if isinstance(n, ast.ClassDef)):
        seen: list[ast.Attribute] = []
        kept: set[str] = set()
        for method in (n for n in cls.body if isinstance(n, _Function)):
            args = [*method.args.posonlyargs, *method.args.args]
            inside = list(ast.walk(method))
            if not args or any(
                isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store) and n.id == args[0].arg for n in inside
            ):
                continue
            for n in inside:
                if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id == args[0].arg:
                    seen.append(n)
                    kept |= {n.attr} if isinstance(n.ctx, ast.Store) else set()
        own |= {n for n in seen if n.attr in FIELDS & kept}
    return own


def _tables(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    for child in table.get_children():
        yield child
        yield from _tables(child)


def _builtins_used(tree: ast.Module, table: symtable.SymbolTable) -> set[ast.AST]:
    """Where names of forbidden builtins mean these: not the parameters and locals of a function.

    A local that is not bound is an error, and so is a cell; a global, or a name of a class, falls back to the builtin.
    """
    bound: dict[tuple[str, int], set[str]] = {}
    for scope in _tables(table):
        local = scope.get_type() == "function"
        own = {s.get_name() for s in scope.get_symbols() if s.is_free() or (local and s.is_local())}
        key = (scope.get_name(), scope.get_lineno())
        # Two lambdas of one line cannot be told apart: a name must be bound in both.
        bound[key] = bound[key] & own if key in bound else own
    used: set[ast.AST] = set()
    work: list[tuple[ast.AST, set[str]]] = [(tree, set())]
    while work:
        node, own = work.pop()
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in NAMES - own:
            used.add(node)
        if type(node) not in _SCOPES:
            work += [(child, own) for child in ast.iter_child_nodes(node)]
            continue
        name = _SCOPES[type(node)] or str(getattr(node, "name", ""))
        inner = bound.get((name, int(getattr(node, "lineno", 0))), set())
        outside = _evaluated_outside(node)
        work += [(child, own) for child in outside]
        work += [(child, inner) for child in _evaluated_inside(node) if child not in outside]
    return used


def _evaluated_outside(node: ast.AST) -> list[ast.AST]:
    """Parts of a scope that the scope around it evaluates: decorators, defaults, annotations, bases, the first iterable."""
    if isinstance(node, ast.ClassDef):
        return [*node.decorator_list, *node.bases, *node.keywords]
    if isinstance(node, ast.Lambda):
        return [node.args]
    if isinstance(node, _Function):
        return [*node.decorator_list, node.args, *([node.returns] if node.returns else [])]
    return [node.generators[0].iter]  # type: ignore[attr-defined]


def _evaluated_inside(node: ast.AST) -> list[ast.AST]:
    inside: list[ast.AST] = []
    for child in ast.iter_child_nodes(node):
        inside += ast.iter_child_nodes(child) if isinstance(child, ast.comprehension) else [child]
    return inside
