"""Describes how Triton compiled a kernel of the submission, so that another process can compile the same text again.

The description names functions of the source by line, and the values of the names that they use. It comes from the process of
the submission and is a claim: ``sandbox.recompile`` takes every function from the source itself.
"""

from __future__ import annotations

import ast
import types
from collections.abc import Mapping
from typing import Any

import triton.language as tl
from triton.runtime.jit import JITFunction

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
        JSON types. What cannot be described has the form ``{"x": type}``.
    """
    functions: list[dict[str, Any]] = []
    known: dict[int, int] = {}

    def function(f: Any) -> dict[str, Any]:
        if id(f) not in known:
            known[id(f)] = len(functions)
            code = f.fn.__code__
            row = {
                "line": code.co_firstlineno, "name": f.fn.__name__, "qualname": f.fn.__qualname__, "noinline": bool(f.noinline),
            }  # fmt: skip
            functions.append(row)
            scope = f.get_capture_scope()
            used = {n.id for n in ast.walk(f.parse()) if isinstance(n, ast.Name)}
            row["names"] = {n: ref(scope[n]) for n in sorted(used) if n in scope}
        return {"f": known[id(f)]}

    def ref(value: Any) -> dict[str, Any]:
        if isinstance(value, JITFunction):
            inside = value.fn.__module__.startswith("triton.")
            return {"a": [value.fn.__module__, value.fn.__qualname__]} if inside else function(value)
        if isinstance(value, tl.constexpr):
            return {"ce": ref(value.value)}
        if isinstance(value, tuple):
            items = [ref(v) for v in value]
            return {"named": [type(value).__name__, fields, items]} if (fields := _fields(value)) else {"t": items}
        return _simple(value)

    entry = function(fn)["f"]
    return {
        "entry": entry,
        "signature": [[k, _nested(v)] for k, v in signature.items()],
        "constexprs": [[list(k) if isinstance(k, tuple) else k, ref(v)] for k, v in constexprs.items()],
        "attrs": [[list(k) if isinstance(k, tuple) else k, _nested(v)] for k, v in attrs.items()],
        "options": {k: v for k in OPTIONS if type(v := getattr(options, k, None)) in (bool, int, str)},
        "functions": functions,
    }


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
