"""Decides which conversions between dtypes the host code may make with a copy.

Floats convert to floats and integers or booleans to integers, whoever wrote them. An integer or boolean converts to a
float only while it is the value of an argument, as the caller passed it: a result of a kernel, a constant, or
reinterpreted bytes would make of the conversion a step of a computation by the host
(``docs/decisions/0013-what-torch-may-do.md``).
"""

from __future__ import annotations

import torch

from kbx_env.backends.engine.storage import INPUT, MOVED, View, kind

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Dtypes to which the integers of an argument may be converted. Other floats would round away most of their digits."""


def _category(dtype: torch.dtype) -> str:
    if dtype is torch.bool:
        return "bool"
    return "complex" if dtype.is_complex else "float" if dtype.is_floating_point else "int"


def may_copy(source: torch.dtype, target: torch.dtype) -> bool:
    """Return whether a host copy of any values may convert: floats to floats, integers and booleans to integers."""
    a, b = _category(source), _category(target)
    return source is target or (a, b) in (("float", "float"), ("int", "int"), ("bool", "int"), ("complex", "complex"))


def argument_to_float(source: torch.dtype, target: torch.dtype) -> bool:
    """Return whether a copy converts integers or booleans to floats, which is allowed for values of an argument only."""
    return _category(source) in ("int", "bool") and target in FLOATS


def unmodified(source: View) -> bool:
    """Return whether a view holds elements of an integer argument of this call, as the caller passed them.

    Args:
        source: the view, with at least one element.

    Returns:
        Whether the view has the argument's own dtype, lies in the argument or in a plain copy of it, and nothing else has
        written its bytes.
    """
    storage = source.storage
    if storage.passed is not source.dtype or not storage.kinds <= {kind(source.dtype)}:
        return False
    origin = source.flags(storage.origin)
    moved_or_input = (origin == INPUT) | (origin == MOVED)
    return bool((moved_or_input & ~source.flags(storage.stored)).all())


def passed_on(source: View, target: View) -> torch.dtype | None:
    """Return what ``Storage.passed`` of a copy's target becomes.

    Args:
        source: of the copy.
        target: of the copy, before it is made.

    Returns:
        The dtype of the argument whose elements the target's storage holds afterwards, ``None`` if it holds others too.
    """
    if source.storage.passed is not source.dtype or source.dtype is not target.dtype or not unmodified(source):
        return None
    fresh = not target.storage.kinds and not target.storage.argument
    return source.dtype if fresh or target.storage.passed is source.dtype else None
