"""Renders the Jinja2 templates of the report, the task pages and the leaderboard."""

from __future__ import annotations

import base64
import functools
import hashlib
from pathlib import Path
from typing import Any

import jinja2
from kbx_env.eval.escaping import html_text, markdown_text, visible
from kbx_env.eval.highlight import highlight
from markupsafe import Markup

TEMPLATES = Path(__file__).parent / "templates"


def render(name: str, **values: Any) -> str:
    """Render a template.

    Args:
        name: file name in ``templates/``.
        **values: the variables that the comment at the top of the template lists.

    Returns:
        The text. HTML templates escape every value that is no ``Markup``.
    """
    return environment().get_template(name).render(values)


@functools.cache
def environment() -> jinja2.Environment:
    """Return the Jinja2 environment: a missing variable is an error, and ``*.html.j2`` escape by default.

    Its filters are ``visible`` (content of an HTML element, hidden characters marked), ``visible_plain`` (without a
    mark, for the title), ``highlight`` (Python source as HTML) and ``markdown`` (text of one line of Markdown). Its globals
    are ``script`` (report.js) and ``script_hash``, by which a page allows that script and no other.
    """
    found = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True, autoescape=lambda name: name is None or not name.endswith((".md.j2", ".css")),
    )  # fmt: skip
    script = (TEMPLATES / "report.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    found.globals |= {"script": Markup(script), "script_hash": f"sha256-{digest}"}
    found.filters |= {
        "visible": html_text, "visible_plain": lambda text: visible(str(text)), "highlight": highlight, "markdown": markdown_text,
    }  # fmt: skip
    return found
