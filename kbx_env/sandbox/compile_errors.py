"""Tells errors of Triton's compiler by the lines of the submission's file, not by lines counted from a ``def``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from triton.compiler.errors import CompilationError

SHOWN_VALUE = 24
"""Characters of a constant that a specialisation's description shows."""
_REPR = re.compile(r"^(\w+)\((['\"])(.*)\2\)$", re.DOTALL)
_HEADER = re.compile(r"^at \d+:\d+:\n")


@dataclass(frozen=True)
class Located:
    """An error of the compiler, by the submission's lines.

    Attributes:
        line: line of the file that the compiler refused; ``None`` if it is not known.
        text: the error, the functions that lead to the line, and the line itself.
    """

    line: int | None
    text: str


def locate(error: CompilationError, source: str, launch_line: int | None) -> Located:
    """Find the line of the file and the kernel that an error of the compiler is about.

    Args:
        error: as Triton raised it; it nests one error for each function that the kernel calls.
        source: the submission's text.
        launch_line: line of the launch, if it is known.

    Returns:
        The error with lines of the file.
    """
    chain, cause = [error], error.__cause__
    while isinstance(cause, CompilationError):
        chain.append(cause)
        cause = cause.__cause__
    places = [(_name(e), _line(e, source)) for e in chain]
    inner, (function, line) = chain[-1], places[-1]
    where = f"in {function}" if len(chain) > 1 else f"in kernel {function}"
    for name, at in reversed(places[:-1]):
        kind = "kernel " if name == places[0][0] else ""
        where += f", called by {kind}{name}" + (f" in line {at}" if at else "")
    if launch_line:
        where += f", launched in line {launch_line}"
    what = f"{type(cause).__name__}: {cause}" if cause is not None else _reason(inner)
    return Located(line, f"{what} ({where}){_excerpt(inner)}")


def _name(error: CompilationError) -> str:
    found = re.search(r"def\s+(\w+)", error.src or "")
    return found.group(1) if found else "an unknown function"


def _line(error: CompilationError, source: str) -> int | None:
    """Return the line of the file: Triton counts from the ``def`` of a function whose indentation it has removed."""
    number = int(getattr(error.node, "lineno", 0))
    wanted = [text.strip() for text in (error.src or "").rstrip().split("\n")]
    have = [text.strip() for text in source.split("\n")]
    for start in range(len(have) - len(wanted) + 1) if number and wanted != [""] else ():
        if have[start : start + len(wanted)] == wanted:
            return start + number
    return None


def _reason(error: CompilationError) -> str:
    """Return the compiler's own message, without the representation of an exception around it."""
    text = error.error_message or _HEADER.sub("", str(error)).rpartition("\n")[2]
    found = _REPR.match(text)
    return f"{found.group(1)}: {found.group(3)}" if found else str(text)


def _excerpt(error: CompilationError) -> str:
    """Return the refused line of the source and a mark below its column."""
    number, column = getattr(error.node, "lineno", 0), getattr(error.node, "col_offset", 0)
    lines = (error.src or "").split("\n")
    if not 0 < number <= len(lines):
        return ""
    text = lines[number - 1]
    return f"\n{text}\n{' ' * min(column, len(text))}^"


def described(signature: Mapping[str, str], constants: Mapping[Any, Any], declared: frozenset[str]) -> str:
    """Describe a specialisation of a kernel: the types of its arguments, and the values that are constants in it.

    Args:
        signature: type by argument, ``constexpr`` for constants.
        constants: values by position in the signature.
        declared: arguments that the kernel declares as ``tl.constexpr``.

    Returns:
        Such as ``x *fp16, n i32, stride=1 (made a constant), BLOCK=256``.
    """
    parts = []
    for index, (name, kind) in enumerate(signature.items()):
        if kind != "constexpr":
            parts.append(f"{name} {kind}" if isinstance(kind, str) else f"{name} tuple")
            continue
        value = str(getattr(constants.get((index,)), "value", constants.get((index,))))
        made = "" if name in declared or value == "None" else " (made a constant)"
        parts.append(f"{name}={value[:SHOWN_VALUE]}{made}")
    return ", ".join(parts)
