"""Lexical helpers of the TTIR parser: types, constants, attributes, balanced text."""

from __future__ import annotations

import functools
import re
from typing import Any

import numpy as np

from kbx_env.backends.ttir.errors import TtirError
from kbx_env.backends.ttir.frontend.graph import STORAGE, Type

_START = re.compile(r"tensor<|!tt\.ptr<|!tt\.tensordesc<|(?<![\w.%@])(?:i\d+|bf16|f\d+\w*|index|none)\b")
_DIMS = re.compile(r"((?:\d+x)*)(.*)$", re.S)
_ATTR = re.compile(r"([A-Za-z_][\w.]*)\s*=\s*(array<[^>]*>|\x00\d+\x00|[^,}\s]+)")
_STR = re.compile(r'"((?:[^"\\]|\\.)*)"')
VALUE = re.compile(r"%[\w$.\-]+(?:#\d+)?")


def close(s: str, i: int) -> int:
    """Find a closing bracket.

    Args:
        s: The text.
        i: Index of the opening bracket.

    Returns:
        The index of the bracket that closes it.

    Raises:
        TtirError: there is none.
    """
    depth = 0
    for j in range(i, len(s)):
        c = s[j]
        if c in "([{<":
            depth += 1
        elif c in ")]}" or (c == ">" and s[j - 1] != "-"):
            depth -= 1
            if depth == 0:
                return j
    raise TtirError(f"unbalanced text: {s[i : i + 60]}")


@functools.cache
def make_type(s: str) -> Type:
    """Parse one type such as ``tensor<128x64xf32>`` or ``!tt.ptr<f16>``."""
    s = s.strip()
    if s.startswith("tensor<"):
        inner = s[7 : close(s, 6)]
        m = _DIMS.match(inner)
        assert m
        shape = tuple(int(d) for d in m.group(1).split("x") if d)
        elem = m.group(2)
        base = make_type(elem[: close(elem, elem.index("<")) + 1] if elem.startswith("!") else elem.split(",")[0])
        return Type(base.elem, shape, base.pointee)
    if s.startswith("!tt.ptr<"):
        inner = s[8 : close(s, 7)]
        return Type("ptr", (), make_type(inner.split(", ")[0] if not inner.startswith("tensor") else inner))
    if s.startswith("!tt.tensordesc<"):
        inner = s[15 : close(s, 14)]
        if not inner.startswith("tensor"):
            inner = f"tensor<{inner}>"
        return Type("desc", (), make_type(inner))
    return Type(s[1:] if s[:2] in ("si", "ui") else s)


def types_in(s: str) -> list[Type]:
    """Return every type written in ``s``, in order."""
    return list(_types_in(s))


@functools.cache  # an engine parses the kernels of one grading, and most operations have one of a few lists of types
def _types_in(s: str) -> tuple[Type, ...]:
    out = []
    pos = 0
    while m := _START.search(s, pos):
        end = m.end()
        if m.group().endswith("<"):
            end = close(s, m.end() - 1) + 1
        out.append(make_type(s[m.start() : end]))
        pos = end
    return tuple(out)


def split_types(s: str) -> tuple[str, str]:
    """Split an operation's text at its outermost `` : `` into head and types."""
    depth = 0
    for j, c in enumerate(s):
        if c in "([{<":
            depth += 1
        elif c in ")]}" or (c == ">" and s[j - 1] != "-"):
            depth -= 1
        elif c == ":" and depth == 0 and s[j - 1] == " " and s[j + 1 : j + 2] == " ":
            return s[:j], s[j + 1 :]
    return s, ""


def hide_strings(s: str) -> tuple[str, list[str]]:
    """Replace string literals by numbered marks (a number between NUL characters), so that their content is not parsed.

    Args:
        s: The text of an operation.

    Returns:
        The text with marks, and the contents of the literals.
    """
    found: list[str] = []

    def mark(m: re.Match[str]) -> str:
        found.append(re.sub(r"\\([0-9A-Fa-f]{2})", lambda h: chr(int(h.group(1), 16)), m.group(1)))
        return f"\x00{len(found) - 1}\x00"

    return _STR.sub(mark, s), found


def attributes(s: str, strings: list[str]) -> dict[str, Any]:
    """Return the ``name = value`` pairs of an operation.

    Args:
        s: Its text, with literals hidden.
        strings: The contents of the literals.

    Returns:
        Lists of integers, integers, booleans and texts by name.
    """
    out: dict[str, Any] = {}
    for k, v in _ATTR.findall(s):
        if v.startswith("array<"):
            body = v[6:-1].partition(":")[2]
            out[k] = [int(x) for x in body.split(",") if x.strip().lstrip("-").isdigit()]
        elif v[0] == "\x00":
            out[k] = strings[int(v.strip("\x00"))]
        elif v.lstrip("-").isdigit():
            out[k] = int(v)
        else:
            out[k] = {"true": True, "false": False}.get(v, v)
    return out


def _number(s: str, t: Type) -> Any:
    if s in ("true", "false"):
        return s == "true"
    dt = t.dtype
    if t.elem in ("ptr", "index") or t.elem[0] == "i":
        return np.array(int(s, 0) & ((1 << (8 * dt.itemsize)) - 1), f"u{dt.itemsize}").astype(dt)[()]
    if s.lower().startswith("0x"):
        return np.array(int(s, 16), f"u{dt.itemsize}").view(dt)[()]
    return np.array(float(s)).astype(dt)[()]


def constant(text: str, t: Type) -> np.ndarray:
    """Evaluate the value of an ``arith.constant``.

    Args:
        text: The value as MLIR prints it.
        t: Its type.

    Returns:
        An array of shape (1, *t.shape), or of ones where all elements are equal; dtype of ``t``.

    Raises:
        TtirError: a type or a notation that is not supported.
    """
    text = text.strip()
    if t.elem not in STORAGE:
        raise TtirError(f"constant of type {t.elem}")
    rank = len(t.shape)
    if text.startswith("dense<"):
        text = text[6 : close(text, 5)].strip()
        if text.startswith('"0x') and t.elem != "i1":
            # MLIR prints large arrays as the bytes of their elements.
            return np.frombuffer(bytes.fromhex(text[3:-1]), t.dtype).reshape((1,) + t.shape)
        if text.startswith('"'):
            raise TtirError("packed dense constant")
        if text.startswith("["):
            parts = [p for p in re.split(r"[\[\],\s]+", text) if p]
            return np.array([_number(p, t) for p in parts], t.dtype).reshape((1,) + t.shape)
    return np.array(_number(text, t), t.dtype).reshape((1,) * (rank + 1))
