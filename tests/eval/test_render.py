"""Templates: everything is escaped, hidden characters are shown, and a missing variable is an error."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import jinja2
import pytest
from kbx_env.eval.escaping import html_text, markdown_text
from kbx_env.eval.pages.blocks import Cards, Cell, Column, Heading, Picture, Section, Table, Text
from kbx_env.eval.pages.render import TEMPLATES, environment, render
from markupsafe import Markup

HOSTILE = "</td></title><script>alert(1)</script>\" onload='x' {{ 7 * 7 }} {% raw %} \x1b[31m\u202e|[x](javascript:1)\n# h"


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}


def test_every_block_escapes_every_text() -> None:
    cell = Cell(HOSTILE, href=HOSTILE, style=HOSTILE, title=HOSTILE, anchor=HOSTILE)
    table = Table([Column(HOSTILE, True, HOSTILE)], [[cell], [HOSTILE]], HOSTILE, style=HOSTILE)
    blocks = [Text(HOSTILE, quiet=True), Heading(HOSTILE), Cards([(HOSTILE, HOSTILE)]), table, Table(table.columns, table.rows),
              Section(HOSTILE, [Picture(HOSTILE, "<svg></svg>", HOSTILE), Text(HOSTILE)])]  # fmt: skip
    page, parser = render("report.html.j2", blocks=blocks, title=HOSTILE), _Tags()
    ours = environment().globals
    assert page.count(f"<script>{ours['script']}</script>") == 1 and f"script-src '{ours['script_hash']}'" in page
    page = page.replace(f"<script>{ours['script']}</script>", "").replace(str(ours["script_hash"]), "")
    parser.feed(page)
    assert "script" not in parser.tags and "svg" in parser.tags, "SVG is our own"
    assert parser.attributes <= {"lang", "charset", "http-equiv", "name", "content", "class", "id", "href", "title", "open"}
    body = re.sub(r'"[^"]*"', "", page)
    assert "\x1b" not in body and "\u202e" not in body and "{{ 7 * 7 }}" in page and "49" not in page
    linked = Table(table.columns, [[Cell(HOSTILE, href="tasks/a.html")]], HOSTILE)  # links are our own
    text = render("report.md.j2", blocks=[*blocks[:3], linked, Text(HOSTILE)])
    assert "<script" not in text and "[x](" not in text and "\x1b" not in text
    assert sum(line.startswith("#") for line in text.splitlines()) == 2 and "](tasks/a.html)" in text


def test_a_missing_variable_is_an_error() -> None:
    for name in ("report.html.j2", "report.md.j2", "task.html.j2", "leaderboard.html.j2", "leaderboard.md.j2"):
        with pytest.raises(jinja2.UndefinedError):
            render(name)


def test_html_templates_escape_by_default() -> None:
    for path in TEMPLATES.glob("*.html.j2"):
        assert environment().get_template(path.name).environment.autoescape(path.name) is True
    assert environment().from_string("{{ x }}").render(x="<b>") == "&lt;b&gt;"


def test_hidden_characters_are_shown_and_escaped_once() -> None:
    assert html_text("a<\u202eb\r\n") == Markup('a&lt;<span class="h">\\u202e</span>b\n')
    assert markdown_text("a\n|<\x1b") == "a \\|&lt;\\\\x1b"
