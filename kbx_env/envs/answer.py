"""Extracts the source from a model's answer: prose with a fenced block, or the source alone."""

from __future__ import annotations

import ast
import re

_FENCE = re.compile(r"^[ \t]*```[^\n]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)


def strip_fences(text: str) -> str:
    """Return the largest fenced block that parses as Python, else the largest block, else the whole text."""
    blocks = [m.group(1) for m in _FENCE.finditer(text)]
    if not blocks and "```" in text:
        # An answer cut off at the length limit opens a fence and never closes it.
        blocks = [re.split(r"```[^\n]*\n", text, maxsplit=1)[-1].replace("```", "")]
    for block in sorted(blocks, key=len, reverse=True):
        try:
            ast.parse(block)
        except (SyntaxError, ValueError, RecursionError, MemoryError):  # MemoryError: nested too deeply for the parser
            continue
        return block
    return max(blocks, key=len) if blocks else text
