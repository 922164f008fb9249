"""Extracts the source from a model's answer: reasoning and prose around a fenced block, or the source alone."""

from __future__ import annotations

import ast
import re
import threading
from collections.abc import Sequence

REASONING = ("<think>", "</think>")
"""Tags around the reasoning of a thinking model: Qwen3, DeepSeek-R1 and others write these."""
_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})([^`]*)$")
_PARSING = threading.Lock()
_PARSES = 20
"""Attempts at a text whose parsing another thread disturbed."""
_MOST_FENCES = 8
"""Closing fences that are tried for one block: a docstring may have fences of its own."""


def strip_fences(text: str, entry: str | None = None, reasoning: Sequence[str] = REASONING) -> str:
    """Extract the source from an answer.

    Args:
        text: the answer.
        entry: name of the function that the source must define; ``None`` where it is not known.
        reasoning: the tags that begin and end reasoning; empty for none.

    Returns:
        The whole text if it is Python itself. Otherwise reasoning is cut first (``without_reasoning``), and the source is, of
        what is left: all of it if it is Python or has no fence; else the last complete fenced block that is Python and defines
        the entry; else the largest block that is Python; else the largest block.
    """
    if _tree(text) is not None:  # tags in a string and fences in a docstring belong to the source
        return text
    text = without_reasoning(text, reasoning)
    if not ("```" in text or "~~~" in text) or _tree(text) is not None:
        return text
    complete, cut = _blocks(text)
    parsed = [(block, tree) for block in complete if (tree := _tree(block)) is not None]
    defining = [block for block, tree in parsed if entry is not None and _defines(tree, entry)]
    if defining:
        return defining[-1]
    if not complete:  # an answer that was cut off at the length limit opens a fence and never closes it
        return re.split(r"(?:```|~~~)[^\n]*\n", text, maxsplit=1)[-1].replace("```", "")
    return max([block for block, _ in parsed] or [*complete, cut], key=len)


def without_reasoning(text: str, tags: Sequence[str] = REASONING) -> str:
    """Cut the reasoning of a thinking model out of its answer.

    Args:
        text: the answer.
        tags: the tags that begin and end reasoning; empty for none.

    Returns:
        The text without the parts between a tag that begins and the next one that ends. Where an end has no beginning (the chat
        template wrote it), all text before it is reasoning; where a beginning has no end, all text after it.
    """
    if not tags:
        return text
    begin, end = tags
    kept, rest = "", text
    while (at := rest.find(begin)) >= 0 and (to := rest.find(end, at + len(begin))) >= 0:
        kept, rest = kept + rest[:at], rest[to + len(end) :]
    kept += rest
    kept = kept[kept.rfind(end) + len(end) :] if end in kept else kept
    return kept[: kept.find(begin)] if begin in kept else kept


def _blocks(text: str) -> tuple[list[str], str]:
    """Return the complete fenced blocks in order, and the text of a last one that is never closed."""
    lines = text.splitlines(keepends=True)
    marks = [(i, m) for i, line in enumerate(lines) if (m := _FENCE.match(line.rstrip("\r\n")))]
    fences = [(i, m.group(2).strip(), m.group(1)[0]) for i, m in marks]
    found, k = list[str](), 0
    while k < len(fences):
        start = fences[k][0] + 1
        closing = [j for j in range(k + 1, len(fences)) if not fences[j][1] and fences[j][2] == fences[k][2]][:_MOST_FENCES]
        if not closing:
            reopened = [j for j in range(k + 1, len(fences)) if fences[j][1]]
            if reopened:  # another block begins before this one has ended
                k = reopened[-1]
                continue
            return found, "".join(lines[start:])
        texts = ["".join(lines[start : fences[j][0]]) for j in closing]
        whole = next((n for n, t in enumerate(texts) if _tree(t) is not None), None)
        if whole is None and closing[0] > k + 1:
            k += 1
            continue
        found.append(texts[whole or 0])
        k = closing[whole or 0] + 1
    return found, ""


def defines(source: str, name: str) -> bool:
    """Return whether a module defines a function, class or variable of a name at its top level.

    Args:
        source: the module; a source that is no Python defines nothing.
        name: the name.

    Returns:
        Whether it does. An import defines nothing: an example of use imports the kernel.
    """
    tree = _tree(source)
    return tree is not None and _defines(tree, name)


def _defines(tree: ast.Module, name: str) -> bool:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name:
            return True
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        if any(isinstance(t, ast.Name) and t.id == name for t in targets):
            return True
    return False


def _tree(text: str) -> ast.Module | None:
    """Parse a text as Python; ``None`` where it is no Python."""
    # Python 3.11.7 counts the parser's depth for all threads together, and raises a SystemError ("recursion depth mismatch") where
    # two of them parse at once. The lock keeps answers apart, and others may parse too.
    for _ in range(_PARSES):
        try:
            with _PARSING:
                return ast.parse(text)
        except SystemError:
            continue
        except (SyntaxError, ValueError, RecursionError, MemoryError):  # MemoryError: nested too deeply for the parser
            return None
    return None
