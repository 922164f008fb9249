"""Highlights Python source as HTML: Pygments finds the tokens, and hidden characters are shown.

The spans are not written by Pygments' HtmlFormatter, because it leaves quotes and hidden characters as they are.
"""

from __future__ import annotations

import functools
import html
import itertools
import re
from collections.abc import Iterator
from typing import Any

from kbx_env.eval.escaping import HIDDEN, mark_hidden
from markupsafe import Markup
from pygments.lexers import PythonLexer
from pygments.token import STANDARD_TYPES, Comment, Keyword, Name, Number, Operator, String, Text

HIGHLIGHTED = 64_000
"""Characters of a source that are highlighted; the rest stays plain. Some rules of Pygments scan to the end of the source from
every line, so that their time grows with the square of a hostile source's length."""
_SHOWN = (Keyword, String, Comment, Number)
_DEFINED = (Name.Function, Name.Class, Name.Decorator)
_BUILTINS = (Name.Builtin, Name.Exception)


def highlight(source: str) -> Markup:
    """Highlight Python source, which may be broken or hostile.

    Pygments reads a copy in which hidden characters are replaced one for one. Its tokens only say where a span begins and
    ends: the source's own characters are written, all of them, escaped.

    Args:
        source: of any content; ``clip`` bounds its length before.

    Returns:
        HTML with spans of Pygments' classes k (keyword), s (string), c (comment), m (number), nf (defined or decorating name)
        and nb (builtin), and of class h for a hidden character.
    """
    text = source.replace("\r\n", "\n")
    out = []
    for kind, tokens in itertools.groupby(_tokens(text[:HIGHLIGHTED]), key=lambda token: token[0]):
        written = mark_hidden(html.escape("".join(value for _, value in tokens)))
        out.append(f'<span class="{STANDARD_TYPES[kind]}">{written}</span>' if STANDARD_TYPES[kind] else written)
    # Joined as plain text: a Markup would escape the tags.
    return Markup("".join([*out, mark_hidden(html.escape(text[HIGHLIGHTED:]))]))


def _tokens(text: str) -> Iterator[tuple[Any, str]]:
    """Yield (type, text) of a source's tokens, of the types that the page colours or else ``Text``."""
    # One for one, so that positions stay. Blank lines too: a rule skips over any number of them from each one's start.
    safe = re.sub(r"^[^\S\n]+$", lambda m: "_" * len(m[0]), HIDDEN.sub("_", text), flags=re.MULTILINE)
    end = 0
    for start, kind, value in PythonLexer().get_tokens_unprocessed(safe):
        end = start + len(value)
        yield _shown_type(kind), text[start:end]
    yield Text, text[end:]


@functools.cache
def _shown_type(kind: Any) -> Any:
    """Return the type by which the page colours a token."""
    if any(kind in t for t in _DEFINED):
        return Name.Function
    if any(kind in t for t in _BUILTINS):
        return Name.Builtin
    if kind in Operator.Word:  # in, is, and, or, not
        return Keyword
    return next((t for t in _SHOWN if kind in t), Text)
