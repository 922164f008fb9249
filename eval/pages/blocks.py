"""What a report is made of, and how each piece reads as HTML and as Markdown: it is written once, in `document`."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from kbx_env.eval.pages.formatting import NONE


@dataclass(frozen=True)
class Text:
    """A paragraph; ``quiet`` for small print."""

    text: str
    quiet: bool = False


@dataclass(frozen=True)
class Heading:
    """``level`` 2 or 3."""

    text: str
    level: int = 2


@dataclass(frozen=True)
class Cards:
    """Figures to be seen first, as (value, what it is)."""

    cards: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Picture:
    """A figure as inline SVG; Markdown shows the file of the same name."""

    name: str
    svg: str
    caption: str


@dataclass(frozen=True)
class Cell:
    """Text of a table's cell, with a link, a CSS class, a title and a name to link to; HTML shows ``svg`` in the text's place."""

    text: str
    href: str | None = None
    style: str = ""
    title: str = ""
    svg: str = ""
    anchor: str = ""


@dataclass(frozen=True)
class Column:
    """``numeric`` columns are set to the right."""

    name: str
    numeric: bool = False
    title: str = ""


@dataclass(frozen=True)
class Table:
    """A table, folded under ``summary`` where there is one; columns that tell nothing in any row are left out."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell | str]]
    summary: str = ""
    open: bool = True
    style: str = ""

    def told(self) -> tuple[list[Column], list[list[Cell]]]:
        """The columns and rows that are shown."""
        rows = [[Cell(c) if isinstance(c, str) else c for c in row] for row in self.rows]
        kept = [i for i in range(len(self.columns)) if not rows or any(row[i].text not in ("", NONE) for row in rows)]
        return [self.columns[i] for i in kept], [[row[i] for i in kept] for row in rows]


@dataclass(frozen=True)
class Section:
    """Blocks that belong together, found under ``#anchor``."""

    anchor: str
    blocks: Sequence[Block] = field(default_factory=tuple)


Block = Text | Heading | Cards | Picture | Table | Section


def to_html(blocks: Sequence[Block]) -> str:
    """HTML of the blocks, everything escaped but SVG of our own making."""
    return "\n".join(map(_html, blocks))


def _html(b: Block) -> str:
    e = html.escape
    match b:
        case Text():
            return f"<p{' class=manifest' if b.quiet else ''}>{e(b.text)}</p>"
        case Heading():
            return f"<h{b.level}>{e(b.text)}</h{b.level}>"
        case Cards():
            return (
                '<div class="cards">' + "".join(f"<div><b>{e(v)}</b><small>{e(k)}</small></div>" for v, k in b.cards) + "</div>"
            )
        case Picture():
            drawn = f'<div class="wide">{b.svg}</div><figcaption>{e(b.caption)}</figcaption>'
            return f'<figure id="figure-{e(b.name)}">{drawn}</figure>'
        case Section():
            return f'<section id="{e(b.anchor)}">{to_html(b.blocks)}</section>'
    columns, shown = b.told()
    heads = "".join(
        f"<th{' class=num' if c.numeric else ''}{f' title={_quoted(c.title)}' if c.title else ''}>{e(c.name)}</th>"
        for c in columns
    )
    rows = "".join("<tr>" + "".join(_cell(c, k) for c, k in zip(row, columns, strict=True)) + "</tr>" for row in shown)
    table = f'<div class="wide"><table{f" class={_quoted(b.style)}" if b.style else ""}><tr>{heads}</tr>{rows}</table></div>'
    if not b.summary:
        return f'<div class="box">{table}</div>'
    return f"<details{' open' if b.open else ''}><summary>{e(b.summary)}</summary>{table}</details>"


def _cell(c: Cell, column: Column) -> str:
    style = " ".join(filter(None, ("num" if column.numeric else "", c.style)))
    inner = c.svg or html.escape(c.text)
    if c.href:
        inner = f"<a href={_quoted(c.href)}>{inner}</a>"
    title = f" title={_quoted(c.title)}" if c.title else ""
    title += f" id={_quoted(c.anchor)}" if c.anchor else ""
    return f"<td{f' class={_quoted(style)}' if style else ''}{title}>{inner}</td>"


def _quoted(text: str) -> str:
    return f'"{html.escape(text, quote=True)}"'


def to_markdown(blocks: Sequence[Block]) -> str:
    """Markdown of the blocks; figures are files under ``figures/``."""
    return "\n\n".join(map(_markdown, blocks))


def _markdown(b: Block) -> str:
    match b:
        case Text():
            return plain(b.text)
        case Heading():
            return f"{'#' * (b.level - 1)} {plain(b.text)}"
        case Cards():
            return "\n".join(f"- {plain(k)}: {plain(v)}" for v, k in b.cards)
        case Picture():
            return f"![{plain(b.caption)}](figures/{b.name}.png)"
        case Section():
            return to_markdown(b.blocks)
    columns, shown = b.told()
    lines = ["| " + " | ".join(plain(c.name) for c in columns) + " |", "|" + "---|" * len(columns)]
    for cells in shown:
        lines.append("| " + " | ".join(f"[{plain(c.text)}]({c.href})" if c.href else plain(c.text) for c in cells) + " |")
    return (f"**{plain(b.summary)}**\n\n" if b.summary else "") + "\n".join(lines)


def plain(text: str) -> str:
    """Text that means nothing to Markdown: one line, no table bars, no markup or HTML of a policy's own."""
    return re.sub(r"([\\`*\[\]<>|])", r"\\\1", " ".join(text.split()))
