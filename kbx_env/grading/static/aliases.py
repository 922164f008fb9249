"""Resolves the names of a source to module paths, through imports, aliases and assignments.

Every module gives access to the modules that it imports itself (``logging.os``), so a list of allowed imports needs the
paths through them as well. Modules are looked up in this process, where they are the same as in a runner. Attributes are
read from the modules' dictionaries; nothing of the source runs.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import importlib.util
import types
from collections import defaultdict
from collections.abc import Iterable

from kbx_env.grading.static.constant_folding import Folding, elements

MODULES = frozenset("""
__future__ math cmath random typing collections collections.abc functools itertools operator dataclasses enum abc
warnings contextlib copy logging numbers string re time typing_extensions types bisect heapq weakref
packaging packaging.version
torch torch.nn torch.nn.functional torch.autograd torch.cuda torch.types torch.testing torch.nn.modules
torch.amp torch.cuda.amp torch.version torch.compiler torch.profiler torch.cuda.nvtx torch.autograd.function
triton triton.language triton.language.extra triton.language.extra.cuda triton.language.extra.libdevice
triton.language.extra.cuda.libdevice triton.language.math triton.language.standard triton.language.core
triton.runtime triton.runtime.jit triton.runtime.autotuner triton.runtime.driver triton.runtime.errors triton.tools
triton.testing triton.tools.tensor_descriptor triton.compiler triton.compiler.errors triton.errors
""".split())  # fmt: skip
"""Modules that a source may import."""
_REACHED = frozenset("""
torch.accelerator torch.ao torch.autograd.functional torch.autograd.profiler torch.backends torch.cpu torch.cuda.graphs
torch.cuda.memory torch.cuda.profiler torch.cuda.random torch.cuda.streams torch.distributions torch.fft torch.func
torch.functional torch.linalg torch.masked torch.mps torch.mtia torch.nested torch.optim torch.quantization
torch.random torch.return_types torch.signal torch.sparse torch.special torch.torch_version torch.xpu
triton.compiler.compiler
""".split())  # fmt: skip
"""Modules that a path may pass through: they give access to nothing but functions that the firewall checks."""
_FAMILIES = ("triton.language.", "torch.nn.", "torch.backends.", "torch.optim.", "torch.distributions.")
GETATTR, ATTRGETTER, METHODCALLER = "builtins.getattr", "operator.attrgetter", "operator.methodcaller"
_NAMED = frozenset(("getattr", "setattr", "delattr"))
_seen_modules: set[str] = set()
"""Names of modules that a path has resolved to in this process."""


def allowed(module: str) -> bool:
    """Whether a module may be named."""
    hidden = any(part.startswith("_") and part != "__future__" for part in module.split("."))
    return module in MODULES or module in _REACHED or (module.startswith(_FAMILIES) and not hidden)


@functools.lru_cache(1 << 14)
def module_at(path: str) -> types.ModuleType | None:
    """Return the module at a path, or ``None`` for anything else and for modules that are not allowed."""
    if allowed(path):
        with contextlib.suppress(Exception):  # not installed, or not on this platform: the runner reports it
            return importlib.import_module(path)
    return None


def step(path: str, name: str) -> str:
    """Return the path of an attribute of the object at a path.

    Args:
        path: the path of a module.
        name: the attribute.

    Returns:
        A module's own name, by whatever path it was reached; else the module's name and the attribute. Empty if ``path``
        is no allowed module.
    """
    module = module_at(path)
    if module is None:
        return ""
    value = module.__dict__.get(name)
    if isinstance(value, types.ModuleType):
        _seen_modules.add(value.__name__)
        return value.__name__
    return f"{module.__name__}.{name}"


def is_module(path: str) -> bool:
    """Whether a path leads to a module, already imported in this process or not."""
    return path in _seen_modules or module_at(path) is not None or _to_be_imported(path)


@functools.lru_cache(1 << 14)
def _to_be_imported(path: str) -> bool:
    parent, _, name = path.rpartition(".")
    package = module_at(parent) if parent else None
    if package is None or not hasattr(package, "__path__") or name in package.__dict__:
        return False
    with contextlib.suppress(Exception):
        return importlib.util.find_spec(path) is not None
    return False


def forbidden(path: str) -> bool:
    """Whether a path leads to a module that may not be named."""
    return is_module(path) and not allowed(path)


class Names:
    """The paths that names and expressions of a source may stand for; in doubt rather too many than too few.

    Args:
        nodes: of the source.
        bound: pairs of a target and the value assigned to it.
        folding: the values of string expressions.

    Attributes:
        imported: the modules that the source imports.
    """

    def __init__(self, nodes: Iterable[ast.AST], bound: Iterable[tuple[ast.expr, ast.expr]], folding: Folding) -> None:
        self._folding = folding
        self._known: dict[str, set[str]] = defaultdict(set)
        for name in _NAMED:
            self._known[name].add(f"builtins.{name}")
        self.imported: set[str] = set()
        for node in nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    self.imported.add(alias.name)
                    path = alias.name if alias.asname else alias.name.partition(".")[0]
                    self._known[alias.asname or path].add(path)
            elif isinstance(node, ast.ImportFrom) and not node.level:
                for alias in node.names:
                    self._from(node.module or "", alias)
        pairs = [(t.id, v) for t, v in bound if isinstance(t, ast.Name)]
        for _ in range(3):
            for name, value in pairs:
                found = self.paths(value)
                if found and len(self._known[name]) < 64:
                    self._known[name] |= found

    def _from(self, module: str, alias: ast.alias) -> None:
        if alias.name == "*":
            inside = module_at(module)
            for name in inside.__dict__ if inside is not None else ():
                self._known[name].add(step(module, name))
            return
        path = step(module, alias.name)
        self._known[alias.asname or alias.name].add(path)
        if path and is_module(path):
            self.imported.add(path)

    def paths(self, node: ast.expr) -> set[str]:
        """Return the paths that an expression may stand for; empty where the text does not say."""
        return self._paths(node) - {""}

    def _paths(self, node: ast.expr) -> set[str]:
        if isinstance(node, ast.Name):
            return set(self._known.get(node.id, ()))
        if isinstance(node, ast.Attribute):
            return {step(p, node.attr) for p in self.paths(node.value)}
        if isinstance(node, ast.NamedExpr):
            return self.paths(node.value)
        if isinstance(node, ast.IfExp):
            return self.paths(node.body) | self.paths(node.orelse)
        if isinstance(node, ast.BoolOp):
            return set().union(*(self.paths(v) for v in node.values))
        if isinstance(node, ast.Subscript):
            return set().union(*(self.paths(v) for v in elements(node.value)))
        if isinstance(node, ast.Call):
            return {p for base, name in self.fetched(node) for p in self._walk(base, name)}
        return set()

    def _walk(self, base: ast.expr | None, name: str) -> set[str]:
        """Return where a dotted name leads from an expression, or from any imported module if that is ``None``."""
        here = self.imported if base is None else self.paths(base)
        found = set()
        for part in name.split("."):
            here = {step(p, part) for p in here} - {""}
            found |= {p for p in here if is_module(p) or base is not None}
        return found

    def fetched(self, node: ast.Call) -> list[tuple[ast.expr | None, str]]:
        """Return the attributes that a call reads by a string (``getattr``, ``attrgetter``, ``methodcaller``).

        Args:
            node: the call.

        Returns:
            Pairs of an object, ``None`` where the text does not name it, and the dotted name of the attribute.
        """
        called = self.paths(node.func)
        if called & {f"builtins.{n}" for n in _NAMED} and len(node.args) >= 2:
            return [(node.args[0], s) for s in self._folding.strings(node.args[1])]
        if called & {ATTRGETTER, METHODCALLER}:
            given = node.args if ATTRGETTER in called else node.args[:1]
            return [(None, s) for a in given for s in self._folding.strings(a)]
        if isinstance(node.func, ast.Call) and node.args and ATTRGETTER in self.paths(node.func.func):
            return [(node.args[0], s) for a in node.func.args for s in self._folding.strings(a)]
        return []
