"""Resolve MLIR locations to a Python file and line."""

from __future__ import annotations

import re

_FILE = re.compile(r'"((?:[^"\\]|\\.)*)":(\d+):\d+')
_CALL = re.compile(r"callsite\((.*) at (.*)\)$", re.S)
_NAME = re.compile(r'"(?:[^"\\]|\\.)*"\((.*)\)$', re.S)
_ALIAS = re.compile(r"#loc\d*\b")


def resolve(locs: dict[str, str], text: str, depth: int = 0) -> tuple[str, int]:
    """Resolve a location.

    For a location inside the Triton standard library the call site is returned instead: the author of a kernel cannot
    change Triton's own files.

    Args:
        locs: Location definitions by alias.
        text: The location as MLIR prints it.
        depth: Number of aliases and call sites that led here; more than 64 are not followed.

    Returns:
        The file and the line, ("", 0) when unknown.
    """
    text = text.strip()
    if depth > 64:
        return "", 0
    if text.startswith("loc(") and text.endswith(")"):
        text = text[4:-1].strip()
    if _ALIAS.fullmatch(text):
        return resolve(locs, locs.get(text, ""), depth + 1)
    call = _CALL.match(text)
    if call:
        inner = resolve(locs, call.group(1), depth + 1)
        if inner[1] and "triton/language" not in inner[0]:
            return inner
        return resolve(locs, call.group(2), depth + 1)
    where = _FILE.match(text)
    if where:
        return where.group(1), int(where.group(2))
    name = _NAME.match(text)
    if name:
        return resolve(locs, name.group(1), depth + 1)
    for alias in _ALIAS.findall(text):
        found = resolve(locs, alias, depth + 1)
        if found[1]:
            return found
    return "", 0
