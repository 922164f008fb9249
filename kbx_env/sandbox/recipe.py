"""Describes which kernel a submission launches, so that another process can compile it from the source.

The description names functions and classes of the source by line, and the values of the names that they use. It comes from the
process of the submission and is a claim: ``sandbox.recompile`` takes every function from the source itself. What the description
can choose are values that host code chooses as well: constants, and which function of the source a name stands for.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import types
from collections.abc import Iterator, Mapping
from typing import Any

import triton.language as tl
from triton.runtime.jit import ConstexprFunction, JITFunction

OPTIONS = (
    "num_warps", "num_stages", "num_ctas", "maxnreg", "enable_fp_fusion", "launch_cooperative_grid",
    "default_dot_input_precision", "debug", "sanitize_overflow", "instrumentation_mode",
)  # fmt: skip
"""Compiler options that are passed on; all others have the value of the target."""


def recipe(
    fn: JITFunction, signature: Mapping[str, Any], constexprs: Mapping[Any, Any], attrs: Mapping[Any, Any], options: Any
) -> dict[str, Any]:  # fmt: skip
    """Describe one compiled specialisation.

    Args:
        fn: the kernel.
        signature: types of its parameters, as Triton's ``ASTSource`` takes them.
        constexprs: values of its constant parameters.
        attrs: properties of its parameters, such as divisibility.
        options: compiler options.

    Returns:
        JSON types. What cannot be described has the form ``{"x": type}``. ``evaluates``: whether some name is a function on
        constants, whose results ``evaluated`` collects.
    """
    described = _Described()
    entry = described.function(fn)["f"]
    return {
        "entry": entry,
        "signature": [[k, _nested(v)] for k, v in signature.items()],
        "constexprs": [[list(k) if isinstance(k, tuple) else k, described.ref(v)] for k, v in constexprs.items()],
        "attrs": [[list(k) if isinstance(k, tuple) else k, _nested(v)] for k, v in attrs.items()],
        "options": {k: v for k in OPTIONS if type(v := getattr(options, k, None)) in (bool, int, str)},
        "functions": described.functions, "classes": described.classes, "evaluates": described.evaluates,
    }


class _Described:
    """Collects the functions and classes that a kernel uses.

    Attributes:
        functions: a row for each function of the submission.
        classes: a row for each class for kernels (``aggregate``).
        evaluates: whether some name is a function on constants (``constexpr_function``).
    """

    def __init__(self) -> None:
        self.functions: list[dict[str, Any]] = []
        self.classes: list[dict[str, Any]] = []
        self.evaluates = False
        self._known: dict[int, int] = {}

    def function(self, f: Any) -> dict[str, Any]:
        """Return the reference to a function with ``triton.jit``; describe it on first use."""
        if id(f) not in self._known:
            self._known[id(f)] = len(self.functions)
            row: dict[str, Any] = place(f.fn) | {"noinline": bool(f.noinline), "sha": digest(f.src)}
            self.functions.append(row)
            scope = f.get_capture_scope()
            row["names"] = {n: self.ref(scope[n]) for n in _names(f) if n in scope}
        return {"f": self._known[id(f)]}

    def ref(self, value: Any) -> dict[str, Any]:
        """Describe the value of a name or of a constant."""
        if isinstance(value, JITFunction | ConstexprFunction):
            if value.fn.__module__.startswith("triton."):
                return {"a": [value.fn.__module__, value.fn.__qualname__]}
            if isinstance(value, JITFunction):
                return self.function(value)
            self.evaluates = True
            return {"e": place(value.fn)}
        if isinstance(value, tl.constexpr):
            return {"ce": self.ref(value.value)}
        if isinstance(value, tuple):
            items = [self.ref(v) for v in value]
            return {"named": [type(value).__name__, fields, items]} if (fields := _fields(value)) else {"t": items}
        if type(value) is list:
            return {"l": [self.ref(v) for v in value]}
        if isinstance(value, type) and getattr(value, "__triton_aggregate__", False) and value.__module__ == "submission":
            return self._class(value)
        return _simple(value)

    def _class(self, made: Any) -> dict[str, Any]:
        """Describe a class for kernels: the types of its fields, and its methods."""
        if id(made) not in self._known:
            self._known[id(made)] = len(self.classes)
            own = made.__setattr__  # Triton's wrapper holds the submission's class
            plain = dict(zip(own.__code__.co_freevars, own.__closure__, strict=True))["cls"].cell_contents
            init = plain.__init__
            row: dict[str, Any] = {"name": plain.__name__, "init": place(getattr(init, "fn", init))}
            self.classes.append(row)
            row["fields"] = {n: self.ref(t) for n, t in plain.__annotations__.items()}
            row["methods"] = {
                n: self.ref(m) for n, m in vars(plain).items()
                if n != "__init__" and isinstance(m, JITFunction | ConstexprFunction)
            }  # fmt: skip
        return {"k": self._known[id(made)]}


_NAMES: dict[str, list[str]] = {}
"""The names in each function's text, for ``_names``."""


def _names(f: Any) -> list[str]:
    """Return the names in a function's text, sorted. A function is described again with each specialisation that uses it."""
    if f.src not in _NAMES:
        # Triton parses it: no other code may, while the audit hook is armed.
        _NAMES[f.src] = sorted({n.id for n in ast.walk(f.parse()) if isinstance(n, ast.Name)})
    return _NAMES[f.src]


def place(code: Any) -> dict[str, Any]:
    """Return where the source defines a function: its first line (of the decorators, if it has any) and its names."""
    return {"line": code.__code__.co_firstlineno, "name": code.__name__, "qualname": code.__qualname__}


def digest(text: str) -> str:
    """Return a short hash of a function's text."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


@contextlib.contextmanager
def evaluated() -> Iterator[list[dict[str, Any]]]:
    """Collect the results of the submission's functions on constants while Triton compiles a kernel in the block.

    Yields:
        A row for each call, in order: the function's place and its result ``r``. Functions that a function on constants calls
        itself are not listed.
    """
    rows: list[dict[str, Any]] = []
    plain = ConstexprFunction.__call__

    def call(f: Any, *args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
        result = plain(f, *args, _semantic=_semantic, **kwargs)
        if _semantic is not None and not f.fn.__module__.startswith("triton."):
            described = _Described()
            value = described.ref(result.value if isinstance(result, tl.constexpr) else result)
            rows.append(place(f.fn) | {"r": {"x": "function"} if described.functions or described.classes else value})
        return result

    ConstexprFunction.__call__ = call  # type: ignore[method-assign]
    try:
        yield rows
    finally:
        ConstexprFunction.__call__ = plain  # type: ignore[method-assign]


def _simple(value: Any) -> dict[str, Any]:
    """Describe a plain value, a dtype, a module, or something of Triton's."""
    if isinstance(value, types.ModuleType):
        return {"m": value.__name__}
    if type(value) is tl.dtype:
        return {"d": value.name}
    if value is None or type(value) in (bool, int, str):
        return {"c": value}
    if type(value) is float:
        return {"float": value.hex()}
    module, name = getattr(value, "__module__", None) or "", getattr(value, "__qualname__", "")
    if isinstance(module, str) and isinstance(name, str) and module.startswith("triton.") and name:
        return {"a": [module, name]}
    return {"x": type(value).__name__}


def _nested(value: Any) -> Any:
    """Return tuples and lists as lists, and named tuples with their names."""
    if isinstance(value, tuple) and (fields := _fields(value)):
        return {"named": [type(value).__name__, fields, [_nested(v) for v in value]]}
    return [_nested(v) for v in value] if isinstance(value, tuple | list) else value


def _fields(value: Any) -> list[str]:
    """Return the names of a named tuple's items; empty for another tuple."""
    return list(getattr(type(value), "_fields", ()))
