"""Extracts the source from a model's answer: prose with a fenced block, or the source alone."""

from __future__ import annotations

import ast
import re

_FENCE = re.compile(r"^[ \t]*```[^\n]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)


def strip_fences(text: str) -> str:
    """Extract the source from an answer.

    Args:
        text: the answer.

    Returns:
        The whole text if it is Python itself; else its largest fenced block that parses as Python, else the largest block,
        else the whole text.
    """
    if "```" not in text or _parses(text):  # fences in a docstring belong to the source
        return text
    blocks = [m.group(1) for m in _FENCE.finditer(text)]
    if not blocks:
        # An answer cut off at the length limit opens a fence and never closes it.
        blocks = [re.split(r"```[^\n]*\n", text, maxsplit=1)[-1].replace("```", "")]
    for block in sorted(blocks, key=len, reverse=True):
        if _parses(block):
            return block
    return max(blocks, key=len)


def _parses(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # MemoryError: nested too deeply for the parser
        return False
    return True
