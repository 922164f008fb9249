"""Compiles a kernel a second time, in a process that has run none of the submission's code.

The functions come from the source text, found by line and name. Decorators, defaults that are no plain values, and annotations
are not executed. Names that the source binds by an import are looked up here; for other names the description says what they
are: another function of the source, a plain value, or something of Triton's.
"""

from __future__ import annotations

import ast
import collections
import contextlib
import importlib
import inspect
import os
import re
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
from triton.runtime.jit import JITFunction

from kbx_env.confinement import confine, unhidden
from kbx_env.protocol import wire
from kbx_env.sandbox import limits
from kbx_env.sandbox.fake_cuda.driver import TARGETS
from kbx_env.sandbox.launches import ttir_of
from kbx_env.sandbox.recipe import OPTIONS

_LOCATIONS = re.compile(r'^#loc.*$|\s*loc\((?:[^()"]|"[^"]*"|\((?:[^()"]|"[^"]*"|\([^()]*\))*\))*\)', re.MULTILINE)
_IMPORTED = ("triton", "math")
"""Top-level packages whose modules a kernel may use."""


class NotInSource(Exception):
    """The description names a function that the source does not have."""


class NotComparable(Exception):
    """The description has something that this module does not rebuild."""


def normalised(text: str) -> str:
    """Return TTIR without source locations, which depend on the folder of the process."""
    return "\n".join(line.rstrip() for line in _LOCATIONS.sub("", text).splitlines() if line.strip())


def compile_again(source: bytes, row: Mapping[str, Any], path: str, target: GPUTarget) -> str:
    """Compile one specialisation from the source.

    Args:
        source: the submission.
        row: the description, as ``sandbox.recipe`` makes it.
        path: a file with the source.
        target: the GPU.

    Returns:
        The TTIR.

    Raises:
        NotInSource: a function is not in the source.
        NotComparable: a value cannot be rebuilt.
    """
    made = _functions(ast.parse(source), row["functions"], path)
    constants = {_path(k): _value(v, made) for k, v in row["constexprs"]}
    attrs = {_path(k): _pairs(v) for k, v in row["attrs"]}
    backend = make_backend(target)
    options = backend.parse_options({k: v for k, v in row["options"].items() if k in OPTIONS})
    signature = {str(k): _tuples(v) for k, v in row["signature"]}
    return ttir_of(ASTSource(made[row["entry"]], signature, constants, attrs), backend, options, target)


def _functions(tree: ast.Module, rows: Sequence[Mapping[str, Any]], path: str) -> list[JITFunction]:
    """Make the functions of a description from the source.

    Args:
        tree: the source.
        rows: the functions, as described.
        path: a file with the source, from which Triton reads their text.

    Returns:
        One function for each row. Their global names have the described values, or those that the source imports.
    """
    imported, made = _imports(tree), list[JITFunction]()
    spaces: list[dict[str, Any]] = [{"__name__": "submission"} for _ in rows]
    for space, f in zip(spaces, rows, strict=True):
        space |= imported
        for name, d in f["names"].items():  # defaults are evaluated where a function is defined
            if name not in imported and not {"f", "x"} & d.keys():
                space[name] = _value(d, made)
        bare = _bare(_definition(tree, f))
        exec(compile(ast.Module([bare], []), path, "exec", dont_inherit=True), space)
        plain = space[bare.name]
        plain.__qualname__ = str(f["qualname"])
        made.append(JITFunction(plain, noinline=True if f["noinline"] is True else None))
    for space, f in zip(spaces, rows, strict=True):
        for name, d in f["names"].items():
            if name not in imported and "x" not in d:
                space[name] = _value(d, made)
    return made


def _has_what_is_not_rebuilt(tree: ast.Module) -> bool:
    """Return whether a source has functions on constants or classes for kernels, which only its own code could make."""
    for node in ast.walk(tree):
        for decorator in getattr(node, "decorator_list", ()):
            if ast.unparse(decorator).rsplit(".", 1)[-1].strip("_").startswith(("constexpr_function", "aggregate")):
                return True
    return False


def _value(d: Mapping[str, Any], made: Sequence[JITFunction]) -> Any:
    """Return the value of a description; ``made`` are the functions of the source."""
    ((kind, v),) = d.items()
    readers: dict[str, Callable[[Any], Any]] = {
        "f": lambda i: made[i], "c": lambda x: x, "float": float.fromhex, "d": tl.dtype, "m": _module,
        "ce": lambda x: tl.constexpr(_value(x, made)), "t": lambda xs: tuple(_value(x, made) for x in xs),
        "a": lambda a: _attribute(_module(a[0]), a[1]), "named": lambda n: _named(n[0], n[1], [_value(x, made) for x in n[2]]),
    }  # fmt: skip
    if kind not in readers:
        raise NotComparable(f"a {v}")
    return readers[kind](v)


def _definition(tree: ast.Module, f: Mapping[str, Any]) -> ast.FunctionDef:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == f["name"]:
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            if first == f["line"]:
                return node
    raise NotInSource(f"no function {str(f['name'])[:60]} at line {str(f['line'])[:10]}")


def _bare(node: ast.FunctionDef) -> ast.FunctionDef:
    """Return a definition without decorators, annotations, and defaults that are no plain values."""
    a = node.args
    for arg in (*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))):
        arg.annotation = None
    a.defaults = [_plain(d) for d in a.defaults]
    a.kw_defaults = [d and _plain(d) for d in a.kw_defaults]
    node.decorator_list, node.returns = [], None
    return node


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


def answer(header: Mapping[str, Any], source: bytes, folder: str) -> dict[str, Any]:
    """Compile what a message describes.

    Args:
        header: ``recipe``, ``target``, and the ``text`` that was executed.
        source: the submission.
        folder: in which the source is written.

    Returns:
        ``same``, whether the texts agree; or ``absent`` or ``unknown`` with the reason.
    """
    path = os.path.join(folder, "submission.py")
    try:
        with open(path, "wb") as f:
            f.write(source)
        made = compile_again(source, header["recipe"], path, TARGETS[header["target"]])
        return {"ok": True, "same": normalised(made) == normalised(str(header["text"]))}
    except NotInSource as e:
        return {"ok": True, "absent": str(e)[:300]}
    except Exception as e:
        if _has_what_is_not_rebuilt(ast.parse(source)):
            return {"ok": True, "unknown": str(e)[-300:]}
        while e.__cause__ is not None:  # Triton nests one error per inlined function
            e = e.__cause__  # type: ignore[assignment]
        return {"ok": True, "absent": f"{type(e).__name__}: {e}"[-300:]}


def serve(sock: socket.socket, settings: Mapping[str, Any]) -> None:
    """Confine this process and compile what one message describes after the other.

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
        while True:
            header, blobs = wire.receive(sock, max_bytes=1 << 26)
            wire.send(sock, answer(header, bytes(blobs[0]), folder))
    except wire.WireError:
        pass
    finally:
        os._exit(0)
