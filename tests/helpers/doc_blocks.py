"""Compares what a page says that a command prints with what it printed."""

from __future__ import annotations

import re

DRAWN = re.compile(r"\d+(,\d{3})+ bytes|at least \d+(,\d{3})+|\d+ launches|\d+(\.\d+)?e[+-]\d+|\d+\.\d s\b")
"""Numbers that depend on the shapes that a grading draws, and times."""


def missing(expected: str, printed: str) -> list[str]:
    """Return the lines of ``expected`` that were not printed; ``...`` stands for anything."""
    got = [" ".join(DRAWN.sub("#", line).split()) for line in printed.splitlines()]
    lines = [" ".join(DRAWN.sub("#", line).split()) for line in expected.splitlines()]
    return [line for line in lines if line not in ("", "...") and line not in got]
