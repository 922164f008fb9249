"""With ``torch_ops="allow"`` the host code may compute in torch: the engine executes the recorded operations."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kbx_env.backends.engine.storage import DTYPES, MOVED, TraceError, View, kind

_NAME = re.compile(r"[A-Za-z_]\w{0,80}")
_REFUSED = ("from_file", "_print", "_dynamo")
"""Prefixes of operations that have effects outside tensors."""


class NotRecordable(Exception):
    """The shape of an operation's result depends on values, which the recorder does not know."""


def run(find: Callable[[Any], View], name: Any, overload: Any, args: Any, kwargs: Any, outs: Any) -> None:
    """Execute one ``aten`` operation.

    Args:
        find: Checks a view.
        name: Name of the operation, without ``aten::``.
        overload: ``default`` or another one.
        args: Arguments as the recorder encodes them: ``{"t": view}``, ``{"d": dtype}``, ``{"c": [re, im]}``, lists and
            plain values.
        kwargs: The same by name.
        outs: Views of the results.

    Raises:
        TraceError: there is no such operation, or its arguments make no sense.
        NotRecordable: the results have other shapes than the recorder saw.
    """
    op = _operation(name, overload)
    operands: list[View] = []
    positional = _decode(args, find, operands)
    named = {str(k): _decode(v, find, operands) for k, v in dict(kwargs).items()}
    views = [find(v) for v in outs]
    try:
        results = op(*positional, **named)
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError) as e:
        raise TraceError(f"{name}: {e}"[:300]) from e
    flat = [r for r in (results if isinstance(results, tuple | list) else [results]) if isinstance(r, torch.Tensor)]
    if len(flat) != len(views) or any(tuple(r.shape) != v.shape or r.dtype != v.dtype for r, v in zip(flat, views)):
        raise NotRecordable(f"{name} gives a result whose shape depends on values")
    for result, view in zip(flat, views, strict=True):
        if view.numel:
            _store(result, view, operands)


def _operation(name: Any, overload: Any) -> Any:
    if not all(isinstance(n, str) and _NAME.fullmatch(n) for n in (name, overload)) or name.startswith(_REFUSED):
        raise TraceError(f"operation {str(name)[:40]!r}")
    try:
        return getattr(getattr(torch.ops.aten, name), overload)
    except AttributeError:
        raise TraceError(f"operation {name}.{overload}") from None


def _decode(x: Any, find: Callable[[Any], View], operands: list[View]) -> Any:
    """Decode an argument; the views of its tensors are appended to ``operands``."""
    if isinstance(x, list):
        return [_decode(v, find, operands) for v in x]
    if isinstance(x, dict) and len(x) == 1:
        ((key, v),) = x.items()
        if key == "t":
            view = find(v)
            operands.append(view)
            return view.values()
        if key == "d" and v in DTYPES:
            return DTYPES[v]
        if key == "c":
            return complex(float(v[0]), float(v[1]))
    if x is None or type(x) in (bool, int, float, str):
        return x
    raise TraceError(f"argument {str(x)[:40]!r}")


def _store(result: torch.Tensor, view: View, operands: Sequence[View]) -> None:
    """Copy a result to its view, unless the operation wrote it there, and update what is known of the bytes."""
    target = view.values()
    if target.data_ptr() != result.data_ptr():
        target.copy_(result)
    s = view.storage
    view.mark(s.initialised, True)
    view.mark(s.stored, False)
    view.mark(s.origin, MOVED)
    s.kinds.add(kind(view.dtype))
    for v in operands:
        s.inputs |= v.storage.inputs
        s.dots |= v.storage.dots
