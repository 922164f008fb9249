"""Compiles the kernels of a submission, in a process that has run none of the submission's code (CPU tier).

The submission's process describes what it launches (``sandbox.recipe``), and this process returns the TTIR that the engine
executes. The functions come from the source text, found by line and name. Decorators, defaults that are no plain values, and
annotations are not executed. Names that the source binds by an import are looked up here; for other names the description says
what they are: another function or class of the source, a plain value, or something of Triton's. Functions on constants
(``constexpr_function``) are host code, and not executed here: the description lists their results, as it gives the values of
other constants.
"""

from __future__ import annotations

import ast
import collections
import contextlib
import copy
import dataclasses
import importlib
import inspect
import json
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.language.core import _aggregate
from triton.runtime.jit import ConstexprFunction, JITFunction

from kbx_env.confinement import confine, unhidden
from kbx_env.protocol import wire
from kbx_env.sandbox import limits
from kbx_env.sandbox.fake_cuda.driver import TARGETS
from kbx_env.sandbox.recipe import OPTIONS, digest
from kbx_env.sandbox.specialised import kernel_row, ttir_of, with_divisors

_IMPORTED = ("triton", "math")
"""Top-level packages whose modules a kernel may use."""


class NotInSource(Exception):
    """The description names a function that the source does not have."""


class NotComparable(Exception):
    """The description has something that this module does not rebuild."""


class Changed(Exception):
    """The submission's process has another text of a function than the source."""


@dataclasses.dataclass
class _Made:
    """Functions and classes made from the source for one description.

    Attributes:
        functions: in the order of the description.
        classes: the same.
        results: those of functions on constants that are still to be used.
    """

    functions: list[JITFunction] = dataclasses.field(default_factory=list)
    classes: list[Any] = dataclasses.field(default_factory=list)
    results: collections.deque[Mapping[str, Any]] = dataclasses.field(default_factory=collections.deque)


class Source:
    """One submission, of which kernels are compiled.

    Args:
        text: the submission.
        path: a file with the same text, from which Triton reads the functions.
    """

    def __init__(self, text: bytes, path: str) -> None:
        self.path, self.tree = path, ast.parse(text)
        self.imported = _imports(self.tree) | {"__name__": "submission"}
        self._places: dict[tuple[int, str], ast.FunctionDef] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef):
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                self._places.setdefault((first, node.name), node)
        self._made: dict[str, _Made] = {}
        self._texts: dict[str, str] = {}

    def compile(self, row: Mapping[str, Any], target: GPUTarget) -> dict[str, Any]:
        """Compile one specialisation.

        Args:
            row: the description, as ``sandbox.recipe`` makes it; ``results`` lists what functions on constants have returned.
            target: the GPU.

        Returns:
            What the engine needs, as ``specialised.kernel_row`` returns it.

        Raises:
            NotInSource: a function is not in the source.
            Changed: a function of the submission's process has another text.
            NotComparable: a value cannot be rebuilt.
        """
        kind = json.dumps([row["functions"], row["classes"]], sort_keys=True)
        if kind not in self._made:
            self._made[kind] = self._functions(row["functions"], row["classes"])
        made = self._made[kind]
        made.results = collections.deque(row.get("results") or ())
        constants = {_path(k): _value(v, made) for k, v in row["constexprs"]}
        attrs = {_path(k): _pairs(v) for k, v in row["attrs"]}
        backend = make_backend(target)
        options = backend.parse_options({k: v for k, v in row["options"].items() if k in OPTIONS})
        signature = {str(k): _tuples(v) for k, v in row["signature"]}
        same = json.dumps([{k: v for k, v in row.items() if k != "attrs"}, target.arch], sort_keys=True)
        text = with_divisors(self._texts[same], signature, attrs) if same in self._texts else None
        if text is None:
            text = ttir_of(ASTSource(made.functions[row["entry"]], signature, constants, attrs), backend, options, target)
            self._texts[same] = text
        return kernel_row(text, options)

    def _functions(self, rows: Sequence[Mapping[str, Any]], classes: Sequence[Mapping[str, Any]]) -> _Made:
        """Make the functions and classes of a description from the source.

        Args:
            rows: the functions, as described.
            classes: the classes, as described.

        Returns:
            One for each row. Their global names have the described values, or those that the source imports.
        """
        made = _Made()
        spaces = [dict(self.imported) for _ in rows]
        for space, f in zip(spaces, rows, strict=True):
            self._fill(space, f["names"], made, {"f", "e", "k"})  # defaults are evaluated where a function is defined
            plain = self._plain(f, space)
            made.functions.append(JITFunction(plain, noinline=True if f["noinline"] is True else None))
            if digest(made.functions[-1].src) != f["sha"]:
                raise Changed(f"the text of {f['name']} at line {f['line']} was replaced")
        for c in classes:
            made.classes.append(self._class(c, made))
        for space, f in zip(spaces, rows, strict=True):
            self._fill(space, f["names"], made, set())
        return made

    def _definition(self, f: Mapping[str, Any]) -> ast.FunctionDef:
        """Return the function at a place of the source."""
        node = self._places.get((f["line"], f["name"]))
        if node is None:
            raise NotInSource(f"no function {str(f['name'])[:60]} at line {str(f['line'])[:10]}")
        return node

    def _fill(self, space: dict[str, Any], names: Mapping[str, Any], made: _Made, later: set[str]) -> None:
        """Bind names of a function, but none that the source imports, and none of the kinds in ``later``."""
        for name, d in names.items():
            if name not in self.imported and not later & d.keys():
                with contextlib.suppress(NotComparable, IndexError):  # it may be used in dead code only; else compiling fails
                    space[name] = self._constant(d["e"], made) if "e" in d else _value(d, made)

    def _plain(self, f: Mapping[str, Any], space: dict[str, Any]) -> Any:
        """Return the Python function at a place of the source, with ``space`` as its globals."""
        bare = _bare(self._definition(f))
        exec(compile(ast.Module([bare], []), self.path, "exec", dont_inherit=True), space)
        plain = space.pop(bare.name)
        plain.__qualname__ = str(f["qualname"])
        return plain

    def _constant(self, f: Mapping[str, Any], made: _Made) -> ConstexprFunction:
        """Return a function on constants that gives the described results, one after the other."""
        where = {k: f[k] for k in ("line", "name", "qualname")}
        return _Recalled(self._plain(f, dict(self.imported)), where, made)

    def _class(self, c: Mapping[str, Any], made: _Made) -> Any:
        """Make a class for kernels (``aggregate``) from its place in the source."""
        node = next((
            n for n in ast.walk(self.tree)
            if isinstance(n, ast.ClassDef) and n.name == c["name"] and self._definition(c["init"]) in n.body
        ), None)  # fmt: skip
        if node is None:
            raise NotInSource(f"no class {str(c['name'])[:60]}")
        space: dict[str, Any] = dict(self.imported)
        _only_sets_fields(self._definition(c["init"]))
        init = self._plain(c["init"], space)
        names = [n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)]
        fields = {n: _value(c["fields"][n], made) for n in names}
        methods = {n: self._constant(d["e"], made) if "e" in d else _value(d, made) for n, d in c["methods"].items()}
        held = {**methods, "__annotations__": fields, "__init__": init, "__module__": "submission"}
        return _aggregate(type(str(c["name"]), (), held))


class _Recalled(ConstexprFunction):
    """A function on constants whose results are known."""

    def __init__(self, plain: Any, where: Mapping[str, Any], made: _Made) -> None:
        super().__init__(plain)
        self._where, self._made = where, made

    def __call__(self, *args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
        """Return the next result; the description must list it for this function."""
        if not self._made.results:
            raise NotComparable(f"a result of {self._where['name']} that the description lacks")
        row = self._made.results.popleft()
        if {k: row[k] for k in self._where} != self._where:
            raise NotComparable(f"a result of {row['name']} where {self._where['name']} is called")
        return tl.constexpr(_value(row["r"], self._made))


def _only_sets_fields(node: ast.FunctionDef) -> None:
    """Refuse the constructor of a class for kernels unless it only assigns parameters and constants to fields.

    It is Python code that would run here.
    """
    parameters = {a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}

    def plain(v: ast.expr) -> bool:
        if isinstance(v, ast.Call) and ast.unparse(v.func) in ("tl.constexpr", "constexpr") and not v.keywords:
            return len(v.args) == 1 and plain(v.args[0])
        return isinstance(v, ast.Constant) or (isinstance(v, ast.Name) and v.id in parameters)

    for s in node.body:
        text = isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant)
        value = s.value if isinstance(s, ast.Assign | ast.AnnAssign) else None
        targets = s.targets if isinstance(s, ast.Assign) else [s.target] if isinstance(s, ast.AnnAssign) else []
        fields = all(isinstance(t, ast.Attribute) and isinstance(t.value, ast.Name) for t in targets)
        if not text and not (value is not None and fields and plain(value)):
            raise NotComparable(f"a constructor of a class for kernels that computes (line {s.lineno}): it may only set fields")


def _value(d: Mapping[str, Any], made: _Made) -> Any:
    """Return the value of a description."""
    ((kind, v),) = d.items()
    readers: dict[str, Callable[[Any], Any]] = {
        "f": lambda i: made.functions[i], "k": lambda i: made.classes[i], "c": lambda x: x, "float": float.fromhex, "d": tl.dtype,
        "m": _module, "ce": lambda x: tl.constexpr(_value(x, made)), "t": lambda xs: tuple(_value(x, made) for x in xs),
        "l": lambda xs: [_value(x, made) for x in xs],
        "a": lambda a: _attribute(_module(a[0]), a[1]), "named": lambda n: _named(n[0], n[1], [_value(x, made) for x in n[2]]),
    }  # fmt: skip
    if kind not in readers:
        raise NotComparable(f"a {v}")
    return readers[kind](v)


def _bare(node: ast.FunctionDef) -> ast.FunctionDef:
    """Return a definition without decorators, annotations, and defaults that are no plain values; it shares the body."""
    node, a = copy.copy(node), copy.copy(node.args)
    a.posonlyargs, a.args, a.kwonlyargs = ([_unannotated(arg) for arg in args] for args in (a.posonlyargs, a.args, a.kwonlyargs))
    a.vararg, a.kwarg = a.vararg and _unannotated(a.vararg), a.kwarg and _unannotated(a.kwarg)
    a.defaults = [_plain(d) for d in a.defaults]
    a.kw_defaults = [d and _plain(d) for d in a.kw_defaults]
    node.args, node.decorator_list, node.returns = a, [], None
    return node


def _unannotated(arg: ast.arg) -> ast.arg:
    return ast.copy_location(ast.arg(arg.arg), arg)


def _plain(node: ast.expr) -> ast.expr:
    plain = (ast.Constant, ast.Name, ast.Attribute, ast.Tuple, ast.UnaryOp, ast.BinOp, ast.expr_context, ast.operator, ast.unaryop)
    if not all(isinstance(n, plain) for n in ast.walk(node)):
        raise NotComparable("a default that is no plain value")
    return node


def _imports(tree: ast.Module) -> dict[str, Any]:
    """Return what the import statements of the source bind, as far as kernels may use it."""
    found: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in _IMPORTED:
                    module = _module(alias.name)
                    found[alias.asname or alias.name.split(".")[0]] = module if alias.asname else _module(alias.name.split(".")[0])
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in _IMPORTED and not node.level:
            for alias in node.names:
                with contextlib.suppress(NotComparable):
                    found[alias.asname or alias.name] = _attribute(_module(node.module), alias.name)
    return found


def _module(name: Any) -> Any:
    if not isinstance(name, str) or name.split(".")[0] not in _IMPORTED:
        raise NotComparable(f"module {str(name)[:60]}")
    try:
        return importlib.import_module(name)
    except ImportError as e:
        raise NotComparable(str(e)[-200:]) from e


def _attribute(owner: Any, path: str) -> Any:
    for part in path.split("."):
        if inspect.ismodule(owner):
            owner = _module(owner.__name__)  # on the way, too: modules of Triton have imported others
        if inspect.ismodule(owner) and not hasattr(owner, part):
            return _module(f"{owner.__name__}.{part}")
        owner = getattr(owner, part)
    if inspect.ismodule(owner):
        return _module(owner.__name__)
    return owner


def _path(key: Any) -> Any:
    return tuple(key) if isinstance(key, list) else key


def _named(name: str, fields: Sequence[str], values: Sequence[Any]) -> Any:
    return collections.namedtuple(name, fields)(*values)


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        name, fields, values = value["named"]
        return _named(name, fields, [_tuples(v) for v in values])
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value


def _pairs(value: Any) -> Any:
    return [list(v) if isinstance(v, list) else v for v in value]


def answer(header: Mapping[str, Any], source: Source | None) -> dict[str, Any]:
    """Compile what a message describes.

    Args:
        header: ``recipe`` and ``target``.
        source: the submission; ``None`` where it cannot be parsed.

    Returns:
        ``kernel``, what the engine needs. Otherwise ``changed`` (the submission's process has replaced a function) or ``error``,
        with the reason.
    """
    try:
        if source is None:
            raise NotInSource("the source cannot be parsed")
        return {"ok": True, "kernel": source.compile(header["recipe"], TARGETS[header["target"]])}
    except Changed as e:
        return {"ok": True, "changed": str(e)[:300]}
    except Exception as e:
        found: BaseException = e
        while found.__cause__ is not None:  # Triton nests one error per inlined function
            found = found.__cause__
        name = "" if isinstance(found, NotComparable | NotInSource) else f"{type(found).__name__}: "
        return {"ok": True, "error": f"{name}{found}"[-300:]}


def _written(folder: str, text: bytes) -> Source | None:
    """Return the source, written to a file as in the submission's process."""
    path = os.path.join(folder, "submission.py")
    with open(path, "wb") as f:
        f.write(text)
    with contextlib.suppress(SyntaxError, ValueError, RecursionError):
        return Source(text, path)
    return None


def serve(sock: socket.socket, settings: Mapping[str, Any]) -> None:
    """Confine this process, take the source, and compile what one message after the other describes.

    Args:
        sock: the connection to the grader.
        settings: from the grader: ``folder``.
    """
    try:
        folder = os.path.realpath(settings["folder"])
        os.environ["TRITON_CACHE_DIR"] = triton.knobs.cache.dir = os.path.join(folder, "triton")
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        os.chdir(folder)
        confine(folder, unhidden(os.path.dirname(os.path.dirname(folder))))
        limits.limit("cpu")
        sys.setrecursionlimit(5000)
        wire.send(sock, {"ok": True, "ready": True})
        source = None
        while True:
            header, blobs = wire.receive(sock, max_bytes=1 << 26)
            if "source" in header:
                source = _written(folder, bytes(blobs[0]))
                wire.send(sock, {"ok": True})
            else:
                wire.send(sock, answer(header, source))
    except wire.WireError:
        pass
    finally:
        os._exit(0)
