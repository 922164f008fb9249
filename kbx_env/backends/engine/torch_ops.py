"""With ``torch_ops="allow"`` the host code may compute in torch: the engine does what was recorded, on the real values."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

from kbx_env.backends.engine.storage import DTYPES, MOVED, TraceError, View, kind

_NAME = re.compile(r"[A-Za-z_]\w{0,80}")
_REFUSED = ("from_file", "_print", "_dynamo")
"""Operations that reach beyond tensors."""


class NotRecordable(Exception):
    """What an operation gives cannot be said before its values are known: a shape that depends on data."""


def run(find: Callable[[Any], View], name: Any, overload: Any, args: Any, kwargs: Any, outs: Any) -> None:
    """Do one ``aten`` operation.

    Args:
        find: checks a view.
        name: of the operation, without ``aten::``.
        overload: ``default`` or another.
        args: encoded by the recorder: ``{"t": view}``, ``{"d": dtype}``, ``{"c": [re, im]}``, lists and plain values.
        kwargs: the same by name.
        outs: views of the results.

    Raises:
        TraceError: no such operation, or its arguments make no sense.
        NotRecordable: the results have other shapes than the recorder saw.
    """
    if not all(isinstance(n, str) and _NAME.fullmatch(n) for n in (name, overload)) or name.startswith(_REFUSED):
        raise TraceError(f"operation {str(name)[:40]!r}")
    try:
        op = getattr(getattr(torch.ops.aten, name), overload)
    except AttributeError:
        raise TraceError(f"operation {name}.{overload}") from None
    held: list[View] = []

    def decode(x: Any) -> Any:
        if isinstance(x, list):
            return [decode(v) for v in x]
        if isinstance(x, dict) and len(x) == 1:
            ((what, v),) = x.items()
            if what == "t":
                view = find(v)
                held.append(view)
                return view.values()
            if what == "d" and v in DTYPES:
                return DTYPES[v]
            if what == "c":
                return complex(float(v[0]), float(v[1]))
        if x is None or type(x) in (bool, int, float, str):
            return x
        raise TraceError(f"argument {str(x)[:40]!r}")

    given, named = decode(args), {str(k): decode(v) for k, v in dict(kwargs).items()}
    views = [find(v) for v in outs]
    try:
        results = op(*given, **named)
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError) as e:
        raise TraceError(f"{name}: {e}"[:300]) from e
    flat = [r for r in (results if isinstance(results, tuple | list) else [results]) if isinstance(r, torch.Tensor)]
    if len(flat) != len(views) or any(tuple(r.shape) != v.shape or r.dtype != v.dtype for r, v in zip(flat, views)):
        raise NotRecordable(f"{name} gives a result whose shape depends on values")
    for result, view in zip(flat, views, strict=True):
        if not view.numel:
            continue
        target = view.values()
        if target.data_ptr() != result.data_ptr():
            target.copy_(result)
        s = view.storage
        view.mark(s.initialised, True)
        view.mark(s.stored, False)
        view.mark(s.origin, MOVED)
        s.kinds.add(kind(view.dtype))
        for v in held:
            s.inputs |= v.storage.inputs
            s.dots |= v.storage.dots
