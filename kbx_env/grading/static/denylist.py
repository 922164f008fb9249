"""Finds the names that a source may not use: modules, attributes that lead out of a runner, builtins that execute text.

A source can build names at run time that its text does not show; the layers behind the screen stop those. The screen
reports all others early and with a line.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

from kbx_env.grading.static.aliases import MODULES, Names, forbidden, is_module, step
from kbx_env.grading.static.constant_folding import Folding, assignments
from kbx_env.grading.static.scopes import FunctionNode, ScopeKey, inner_tables, key_of, names_read
from kbx_env.grading.static.syntax_tree import ParsedSource
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
"""Forbidden attributes that a class of the source may define for its own instances: the channels of (N, C, L)."""
DUNDERS = frozenset(a for a in ATTRIBUTES if a.startswith("__"))
CHAINS = frozenset("""
torch.ops torch.library torch.jit torch.compile torch.utils torch.hub torch.load torch.save torch.multiprocessing
torch.distributed torch.classes torch.package torch.fx torch.export torch.onnx torch.compiler.compile
torch.autograd.inference_mode string.Formatter
""".split())  # fmt: skip
_ALLOWED = "allowed: torch, triton, math, random, typing, ..."
_MAX_VIOLATIONS = 20
_ANNOTATED = (ast.arg, ast.AnnAssign, ast.FunctionDef, ast.AsyncFunctionDef)
"""Nodes with an annotation, in ``annotation`` or ``returns``."""
_WORD = re.compile(r"[^\W\d]\w*")
_FORMATTED = re.compile(r"\{[^{}]*[.\[](__\w+__)")
_DOTTED = re.compile(r"[\w.\[\]]+")


class Violations:
    """The forbidden names of a source.

    Args:
        source: the source, parsed.

    Attributes:
        found: the violations, at most twenty.
        idle: imports of modules that may not be imported, whose names nothing in the source mentions again.
        names: the module paths that names of the source stand for.
    """

    def __init__(self, source: ParsedSource) -> None:
        self.found: list[Violation] = []
        self.idle: list[Violation] = []
        self._mentioned = _mentioned(source.nodes)
        self._reported: set[tuple[int, str]] = set()
        bound = list(assignments(source.nodes))
        self._folding = Folding(bound)
        self.names = Names(source.nodes, bound, self._folding)
        self._fields = _own_fields(source)
        self._free = _builtins_used(source)
        for node in source.nodes:
            self._look(node)

    def _add(self, rule: str, node: ast.AST, detail: str, *, idle: bool = False) -> None:
        line, found = getattr(node, "lineno", 0), self.idle if idle else self.found
        if len(found) < _MAX_VIOLATIONS and (line, detail) not in self._reported:
            self._reported.add((line, detail))
            found.append(Violation(rule, f"line {line or '?'}: {detail}"))

    def _look(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            self._look_at_import(node)
        elif isinstance(node, ast.ImportFrom):
            self._look_at_import_from(node)
        elif isinstance(node, ast.Attribute):
            self._look_at_attribute(node)
        elif isinstance(node, ast.Name):
            if node in self._free:
                self._add("forbidden_name", node, f"{node.id}")
            self._look_at_paths(node)
        elif isinstance(node, ast.Call):
            self._look_at_call(node)
        if isinstance(node, ast.expr):
            self._look_at_strings(node)
        elif isinstance(node, _ANNOTATED):
            annotation = node.returns if isinstance(node, FunctionNode) else node.annotation
            if annotation is not None:
                self._look_at_annotation(annotation)

    def _look_at_import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name not in MODULES:
                bound = alias.asname or alias.name.partition(".")[0]
                self._add("forbidden_import", node, f"import {alias.name} ({_ALLOWED})", idle=bound not in self._mentioned)

    def _look_at_attribute(self, node: ast.Attribute) -> None:
        if node.attr in ATTRIBUTES and node not in self._fields:
            self._add("forbidden_name", node, f".{node.attr}")
        elif node.attr == "__dict__" and any(map(is_module, self.names.paths(node.value))):
            self._add("forbidden_name", node, "the __dict__ of a module")
        else:
            self._look_at_paths(node)

    def _look_at_call(self, node: ast.Call) -> None:
        for _, name in self.names.fetched(node):
            for part in set(name.split(".")) & ATTRIBUTES:
                self._add("forbidden_name", node, f".{part}, by a string")
        self._look_at_paths(node)

    def _look_at_import_from(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        if node.level or (module not in MODULES and not module.startswith("triton.language")):
            bound = {alias.asname or alias.name for alias in node.names}
            idle = not bound & (self._mentioned | {"*"})
            self._add("forbidden_import", node, f"from {'.' * node.level}{module} import ... ({_ALLOWED})", idle=idle)
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
        """Check for forbidden double-underscore names in strings: the whole text, or the fields of a format."""
        for text in self._folding.strings(node):
            parts = set(re.split(r"[.\[\]]", text)) if _DOTTED.fullmatch(text) else set(_FORMATTED.findall(text))
            for part in sorted(parts & DUNDERS):
                self._add("forbidden_name", node, f"{part!r} in a string")

    def _look_at_annotation(self, node: ast.expr) -> None:
        """Check annotations in quotes: they are code as well, which some library functions evaluate."""
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


def _mentioned(nodes: Sequence[ast.AST]) -> set[str]:
    """Return every name that the source mentions outside of its imports, also as a word of a string."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.Global | ast.Nonlocal):
            found.update(node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.update(_WORD.findall(node.value))
    return found


def _own_fields(source: ParsedSource) -> set[ast.AST]:
    """Return the attribute nodes that use a name of ``FIELDS`` on ``self`` in a class that assigns it itself."""
    own: set[ast.AST] = set()
    for cls in (n for n in source.nodes if isinstance(n, ast.ClassDef)):
        seen: list[ast.Attribute] = []
        kept: set[str] = set()
        for method in (n for n in cls.body if isinstance(n, FunctionNode)):
            args = [*method.args.posonlyargs, *method.args.args]
            inside = list(source.below(method))
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


def _builtins_used(source: ParsedSource) -> set[ast.AST]:
    """Return the nodes where the name of a forbidden builtin means the builtin, not a parameter or local of a function.

    A local that is not bound is an error, and so is a cell; a global, or a name of a class, falls back to the builtin.
    """
    bound: dict[ScopeKey, set[str]] = {}
    for scope in inner_tables(source.table):
        local = scope.get_type() == "function"
        own = {s.get_name() for s in scope.get_symbols() if s.is_free() or (local and s.is_local())}
        key = key_of(scope)
        # Two lambdas of one line cannot be told apart: a name must be bound in both.
        bound[key] = bound[key] & own if key in bound else own
    return {node for node, own in names_read(source, bound, set()) if node.id in NAMES - own}
