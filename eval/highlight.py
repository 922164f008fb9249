"""Python source as HTML that can do no harm: every character escaped, the invisible ones shown, broken code included."""

from __future__ import annotations

import builtins
import html
import io
import keyword
import re
import token
import tokenize
import warnings
from collections.abc import Iterator

LINE, LINES = 1_000, 4_000
"""The longest line and the most lines that a page shows: a browser lays out a megabyte in one line for minutes."""
_RESTARTS = 60
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f"
    "\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\ud800-\udfff\U000e0000-\U000e0fff]"
)
"""Control characters, changes of the writing direction, characters without width, halves of a character: what a reader would
not see, or would see in another place than the interpreter does."""
_TEXTS = ("STRING", "FSTRING_START", "FSTRING_MIDDLE", "FSTRING_END", "TSTRING_START", "TSTRING_MIDDLE", "TSTRING_END")
_BUILTINS = frozenset(n for n in dir(builtins) if not n.startswith("_"))


def plain(text: str) -> str:
    """A text escaped for HTML; what cannot be seen is written as ``\\xNN``, marked with class ``h``."""
    kept = html.escape(text.replace("\r\n", "\n"))
    return _HIDDEN.sub(lambda m: f'<span class="h">{_named(m[0])}</span>', kept)


def visible(text: str) -> str:
    """A text in which what cannot be seen is written as ``\\xNN``: names of others go to terminals too."""
    return _HIDDEN.sub(lambda m: _named(m[0]), text)


def clip(text: str, line: int = LINE, lines: int = LINES) -> tuple[str, str]:
    """A text cut to what a page can show, and a note on what is missing, empty where nothing is.

    Args:
        text: any.
        line: the most characters of a line.
        lines: the most lines.
    """
    parts = text.replace("\r\n", "\n").split("\n")
    notes = [f"{len(parts) - lines:,} more lines are not shown"] if len(parts) > lines else []
    parts = parts[:lines]
    lost = [len(p) - line for p in parts if len(p) > line]
    if lost:
        notes.append(f"{len(lost):,} long lines are cut after {line:,} characters, {sum(lost):,} are not shown")
    return "\n".join(p[:line] for p in parts), "; ".join(notes)


def highlight(source: str) -> str:
    """Spans of classes k (keyword), s (string), c (comment), n (number), d (what is defined), b (builtin), h (invisible).

    Python's own tokenizer says where tokens are; only the source's own characters are ever written, so that none is lost
    whatever the tokenizer makes of broken code. What it cannot read stays plain.
    """
    lines = source.replace("\r\n", "\n").split("\n")
    out: list[str] = []
    row = column = 0

    def upto(to_row: int, to_column: int, kind: str) -> None:
        nonlocal row, column
        while row <= to_row:
            end = to_column if row == to_row else len(lines[row])
            text = plain(lines[row][column:end])
            out.append(f'<span class="{kind}">{text}</span>' if kind and text else text)
            column = max(end, column)
            if row == to_row:
                return
            out.append("\n")
            row, column = row + 1, 0

    with warnings.catch_warnings():  # about a model's escape sequences, to whoever writes the page
        warnings.simplefilter("ignore")
        marks = list(_marks(lines))
    for kind, (begin, left), (end, right) in marks:
        # Tokenizers disagree about places within f-strings: a mark that steps back or out is none.
        if (row, column) <= (begin, left) <= (end, right) and end < len(lines) and right <= len(lines[end]):
            upto(begin, left, "")
            upto(end, right, kind)
    upto(len(lines) - 1, len(lines[-1]), "")
    return "".join(out)


def _named(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"


def _marks(lines: list[str]) -> Iterator[tuple[str, tuple[int, int], tuple[int, int]]]:
    """(class, first place, end) of tokens, rows from 0. After an error the tokenizer starts anew behind it, some times."""
    # One for one, so that places stay: NUL ends some tokenizers, and form feeds change the others' columns.
    safe = [_HIDDEN.sub("_", line) for line in lines]
    start = 0
    for _ in range(_RESTARTS):
        seen, before = 0, ""
        # CPython's tokenizers raise more than they document (SystemError, UnicodeDecodeError).
        try:
            for t in tokenize.generate_tokens(io.StringIO("\n".join(safe[start:]), newline="\n").readline):
                if kind := _kind(t.type, t.string, before):
                    yield kind, (t.start[0] - 1 + start, t.start[1]), (t.end[0] - 1 + start, t.end[1])
                if t.type == token.NAME or t.string.strip():
                    before = t.string
                seen = max(seen, t.end[0] if t.type not in (token.DEDENT, token.INDENT, token.ENDMARKER) else 0)
            return
        except Exception:
            start += max(seen, 1)
        if start >= len(lines):
            return


def _kind(number: int, text: str, before: str) -> str:
    name = token.tok_name[number]
    if name == "NAME":
        if before in ("def", "class", "@"):
            return "d"
        if keyword.iskeyword(text):
            return "k"
        return "b" if text in _BUILTINS and before != "." else ""
    return {"COMMENT": "c", "NUMBER": "n"}.get(name, "s" if name in _TEXTS else "")
