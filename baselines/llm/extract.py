"""What an answer holds: thinking put aside, fences taken off, refusals told from kernels."""

from __future__ import annotations

import ast
import itertools
import json
import re
from typing import Any

from kbx_env.baselines.llm.chat import Finish, Reply

from kbx_env.envs.answer import strip_fences
from kbx_env.errors import NoAnswer

_THINKING = re.compile(r"<(think|thinking|reasoning)>.*?</\1>", re.DOTALL | re.IGNORECASE)
_OPEN = re.compile(r"<(think|thinking|reasoning)>", re.IGNORECASE)
_CLOSE = re.compile(r".*</(?:think|thinking|reasoning)>", re.DOTALL | re.IGNORECASE)
_MARKS = re.compile(r"<\|(?:EOT|im_end|endoftext|eot_id|end_of_sentence)\|>|<｜end▁of▁sentence｜>|</s>\s*$")
_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[^\n]*\n(.*?)^[ \t]*\1", re.DOTALL | re.MULTILINE)
_REFUSES = re.compile(
    r"\b(?:I(?:'m| am) (?:sorry|unable|not able)|I (?:cannot|can't|can not|won't)|as an AI\b|unable to (?:assist|help|provide))",
    re.IGNORECASE,
)

_OBJECTS = 200
"""Braces at which a JSON object is looked for: code is full of braces, and every look reads to the end."""


def without_thinking(text: str) -> str:
    """The answer after the model's thinking. Templates that open the block themselves leave only its end in the text."""
    text = _THINKING.sub("", text)
    text = _CLOSE.sub("", text)
    opened = _OPEN.search(text)  # never closed: all that follows is thinking
    return text[: opened.start()] if opened else text


def blocks(text: str) -> list[str]:
    """The fenced blocks, in order; one that is cut off at the end counts as well."""
    found = [m.group(2) for m in _FENCE.finditer(text)]
    rest = _FENCE.sub("", text)
    opened = re.search(r"^[ \t]*(?:`{3,}|~{3,})[^\n]*\n", rest, re.MULTILINE)
    return found + ([rest[opened.end() :]] if opened else [])


def defines(source: str, name: str) -> bool:
    """Whether a module has a function, class or variable of this name on its own level."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name:
            return True
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            return True
        if isinstance(node, ast.ImportFrom) and any((a.asname or a.name) == name for a in node.names):
            return True
    return False


def kernel_in(reply: Reply, entry: str) -> str:
    """The kernel's source in an answer.

    Of the fenced blocks the longest that defines the entry, the later of equals; else what ``strip_fences`` finds, which the
    grader then judges for what it is; else the whole text, if it reads as code.

    Raises:
        NoAnswer: there is none, and why.
    """
    text = _MARKS.sub("", without_thinking(reply.text))
    if reply.finish is Finish.REFUSAL:
        raise NoAnswer(f"the model refused: {_shown(text)}")
    found = blocks(text)
    entries = [b for b in found if defines(b, entry)]
    if entries:
        return max(reversed(entries), key=len)
    if found:
        return strip_fences(text)
    if defines(text, entry) or _reads_as_code(text):
        return text
    if reply.finish is Finish.LENGTH:
        raise NoAnswer(f"the answer was cut off at the token limit before any code: {_shown(text) or 'still thinking'}")
    if not text.strip():
        raise NoAnswer("the answer is empty" + (", but for its thinking" if reply.thinking or reply.text.strip() else ""))
    if _REFUSES.search(text):
        raise NoAnswer(f"the model refused: {_shown(text)}")
    raise NoAnswer(f"no code in the answer: {_shown(text)}")


def _reads_as_code(text: str) -> bool:
    return bool(re.search(r"^(?:import |from \S+ import |def |@triton)", text, re.MULTILINE)) and "def " in text


def _shown(text: str, most: int = 160) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 3] + "..."


def object_in(text: str) -> dict[str, Any] | None:
    """The first JSON object in an answer, fenced or not, newlines inside its strings forgiven; ``None`` without one."""
    text = _MARKS.sub("", without_thinking(text))
    decoder = json.JSONDecoder(strict=False)
    for start in itertools.islice(re.finditer(r"\{", text), _OBJECTS):
        try:
            value, _ = decoder.raw_decode(text, start.start())
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            return value
    return None
