"""Extracts kernels and JSON objects from answers of models: removes thinking and fences, and recognises refusals."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

from kbx_env.baselines.llm.chat import Finish, Reply

from kbx_env.envs.answer import defines, strip_fences
from kbx_env.errors import NoAnswer

_THINKING = re.compile(r"<(think|thinking|reasoning)>.*?</\1>", re.DOTALL | re.IGNORECASE)
_OPEN = re.compile(r"<(think|thinking|reasoning)>", re.IGNORECASE)
_CLOSE = re.compile(r".*</(?:think|thinking|reasoning)>", re.DOTALL | re.IGNORECASE)
_MARKS = re.compile(r"<\|(?:EOT|im_end|endoftext|eot_id|end_of_sentence)\|>|<｜end▁of▁sentence｜>|</s>\s*$")
_REFUSES = re.compile(
    r"\b(?:I(?:'m| am) (?:sorry|unable|not able)|I (?:cannot|can't|can not|won't)|as an AI\b|unable to (?:assist|help|provide))",
    re.IGNORECASE,
)

_OBJECTS = 200
"""Most opening braces at which a JSON object is tried: code has many braces, and every try may read to the end."""


def without_thinking(text: str) -> str:
    """Return an answer without the model's thinking.

    Where the chat template opens the block of thinking, the text contains only the end of the block: all text before it
    is thinking.
    """
    text = _THINKING.sub("", text)
    text = _CLOSE.sub("", text)
    opened = _OPEN.search(text)  # a block that is never closed: the rest of the text is thinking
    return text[: opened.start()] if opened else text


def kernel_in(reply: Reply, entry: str) -> str:
    """Extract the kernel's source from an answer.

    Args:
        reply: the answer.
        entry: name of the function that the source must define.

    Returns:
        The result of ``strip_fences``, as in training: the last complete fenced block that defines the entry, or what comes
        nearest to it. Without a fence: the whole text if it looks like code.

    Raises:
        NoAnswer: a refusal, no code, an empty answer, or one that was cut off before any code.
    """
    whole = _MARKS.sub("", reply.text)
    # Tags in a string of a module are no thinking.
    text = whole if defines(whole, entry) else without_thinking(whole)
    if reply.finish is Finish.REFUSAL:
        raise NoAnswer(f"the model refused: {_excerpt(text)}")
    source = strip_fences(text, entry, reasoning=())
    if source != text or defines(text, entry) or _looks_like_code(text):
        return source
    if reply.finish is Finish.LENGTH:
        shown = _excerpt(text) or "still thinking"
        raise NoAnswer(f"the answer was cut off at the token limit before any code: {shown}")
    if not text.strip():
        thought = reply.thinking or reply.text.strip()
        raise NoAnswer("the answer is empty" + (", but for its thinking" if thought else ""))
    if _REFUSES.search(text):
        raise NoAnswer(f"the model refused: {_excerpt(text)}")
    raise NoAnswer(f"no code in the answer: {_excerpt(text)}")


def _looks_like_code(text: str) -> bool:
    return bool(re.search(r"^(?:import |from \S+ import |def |@triton)", text, re.MULTILINE)) and "def " in text


def _excerpt(text: str, most: int = 160) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 3] + "..."


def object_in(text: str) -> dict[str, Any] | None:
    """Return the first JSON object in an answer, fenced or not, or ``None``. Its strings may contain raw newlines."""
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
