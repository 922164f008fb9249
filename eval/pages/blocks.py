"""The pieces of a report. `document` builds them once; `templates/` shows them as HTML and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from kbx_env.eval.pages.formatting import NONE


@dataclass(frozen=True)
class Text:
    """A paragraph.

    Attributes:
        text: of the paragraph.
        quiet: whether it is small print.
    """

    kind: ClassVar[str] = "text"
    text: str
    quiet: bool = False


@dataclass(frozen=True)
class Heading:
    """A heading of level 2 or 3."""

    kind: ClassVar[str] = "heading"
    text: str
    level: int = 2


@dataclass(frozen=True)
class Cards:
    """Key figures in boxes, as (value, name)."""

    kind: ClassVar[str] = "cards"
    cards: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Picture:
    """A figure with its caption: inline SVG of our own making in HTML, the file of the same name in Markdown."""

    kind: ClassVar[str] = "picture"
    name: str
    svg: str
    caption: str


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Attributes:
        text: shown in the cell.
        href: a link on the text.
        style: CSS classes.
        title: shown on hover.
        svg: of our own making, shown instead of the text in HTML.
        anchor: an id for links to the cell.
    """

    text: str
    href: str | None = None
    style: str = ""
    title: str = ""
    svg: str = ""
    anchor: str = ""


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        name: the header.
        numeric: whether it is aligned to the right.
        title: shown on hover.
    """

    name: str
    numeric: bool = False
    title: str = ""


@dataclass(frozen=True)
class Table:
    """A table. Columns without a value in any row are not shown.

    Attributes:
        columns: all columns.
        rows: a cell or text for each column.
        summary: the line under which the table folds; empty for a table that does not fold.
        open: whether it is unfolded at first.
        style: CSS classes.
    """

    kind: ClassVar[str] = "table"
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell | str]]
    summary: str = ""
    open: bool = True
    style: str = ""

    def non_empty(self) -> tuple[list[Column], list[list[Cell]]]:
        """Return the columns with a value in any row, and the rows' cells in them; all columns of a table without rows."""
        rows = [[Cell(c) if isinstance(c, str) else c for c in row] for row in self.rows]
        kept = [i for i in range(len(self.columns)) if not rows or any(row[i].text not in ("", NONE) for row in rows)]
        return [self.columns[i] for i in kept], [[row[i] for i in kept] for row in rows]


@dataclass(frozen=True)
class Section:
    """Blocks that belong together, with the id ``anchor`` for links."""

    kind: ClassVar[str] = "section"
    anchor: str
    blocks: Sequence[Block] = field(default_factory=tuple)


Block = Text | Heading | Cards | Picture | Table | Section
