"""Escapes texts of untrusted origin for HTML, Markdown and terminals, and makes hidden characters visible."""

from __future__ import annotations

import html
import re

from markupsafe import Markup

LINE, LINES = 1_000, 4_000
"""The longest line in characters and the most lines that a page shows: a browser needs minutes to lay out a line of a
megabyte."""
HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f"
    "\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\ud800-\udfff\U000e0000-\U000e0fff]"
)
"""Characters that a reader does not see, or sees in another place than the interpreter does: control characters, changes of
the writing direction, characters without width, lone surrogates."""


def visible(text: str) -> str:
    r"""Write each hidden character as ``\xNN``, ``\uNNNN`` or ``\UNNNNNNNN``."""
    return HIDDEN.sub(lambda m: _escape_sequence(m[0]), text)


def mark_hidden(markup: str) -> Markup:
    r"""Write each hidden character of HTML as ``\xNN`` in a ``<span class="h">``.

    Args:
        markup: HTML of which all texts are escaped. Hidden characters may occur in its texts only, not in tags.

    Returns:
        The same HTML without hidden characters.
    """
    return Markup(HIDDEN.sub(lambda m: f'<span class="h">{_escape_sequence(m[0])}</span>', markup))


def html_text(text: str) -> Markup:
    """Escape a text for the content of an HTML element, and show its hidden characters; not for attributes."""
    return mark_hidden(html.escape(text.replace("\r\n", "\n")))


def markdown_text(text: str) -> str:
    """Escape a text for one line of Markdown or a terminal: no line break, table bar, markup or hidden character."""
    escaped = html.escape(visible(" ".join(text.split())), quote=False)
    return "".join(f"\\{c}" if c in "|[]`*\\" else c for c in escaped)


def clip(text: str, line: int = LINE, lines: int = LINES) -> tuple[str, str]:
    """Cut a text to the length that a page can show.

    Args:
        text: any text.
        line: the most characters of a line.
        lines: the most lines.

    Returns:
        The text, and a note on the missing part, empty if nothing is missing.
    """
    parts = text.replace("\r\n", "\n").split("\n")
    notes = [f"{len(parts) - lines:,} more lines are not shown"] if len(parts) > lines else []
    parts = parts[:lines]
    lost = [len(p) - line for p in parts if len(p) > line]
    if lost:
        notes.append(f"{len(lost):,} long lines are cut after {line:,} characters, {sum(lost):,} are not shown")
    return "\n".join(p[:line] for p in parts), "; ".join(notes)


def _escape_sequence(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"
