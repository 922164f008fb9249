"""What a report is written from, and the pieces that its sections share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kbx_env.eval.pages import formatting
from kbx_env.eval.pages.blocks import Block, Cell, Picture
from kbx_env.eval.report_data import PolicyStudy, Row, Study
from kbx_env.eval.stats import Mean, Rate

ANSWERS = 500
"""Rows of a policy's table of answers; all of them are in tasks.csv."""


@dataclass(frozen=True)
class Material:
    """What a report is written from.

    ``beside`` maps a policy to what ``eval/regrade.py`` found; ``figures`` a name to (SVG, caption); ``pages`` a task to its
    page; ``missing`` says what could not be computed, and why.
    """

    study: Study
    beside: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    figures: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    pages: Mapping[str, str] = field(default_factory=dict)
    analysis: Any = None
    comparisons: Sequence[Any] = ()
    portable: Sequence[Any] = ()
    missing: Sequence[str] = ()


def figure(m: Material, name: str) -> list[Block]:
    """The figure of this name, or nothing."""
    found = m.figures.get(name)
    return [Picture(name, *found)] if found else []


def rate(r: Rate, style: str = "") -> Cell:
    """A rate with its counts; the interval shows on hover."""
    if r.rate is None:
        return Cell(formatting.NONE, style=style)
    return Cell(f"{formatting.percent(r.rate)} ({r.k} of {r.n})", title=f"95 %: {formatting.between(r.low, r.high)}", style=style)


def mean(v: Mean) -> Cell:
    """A mean speedup; the interval shows on hover."""
    told = formatting.between(v.low, v.high, formatting.times)
    return Cell(formatting.times(v.value), title=f"95 %: {told}" if told else "")


def evidence_of(p: PolicyStudy, index: int, category: str) -> str | None:
    """Where the page shows a policy's answers of a category; ``None`` where it does not."""
    shown = any(r.category == category for r in p.rows[:ANSWERS])
    return f"#policy-{index}-{category}" if shown else None


def label(r: Row) -> str:
    """An answer's task, with its number where there are several."""
    return r.task + (f" #{r.sample + 1}" if r.sample else "")


def total(p: PolicyStudy) -> dict[str, Any]:
    """Sums of what the answers took; ``None`` where no answer tells."""

    def add(name: str) -> float | None:
        told = [r.spent.get(name) for r in p.rows if r.spent.get(name) is not None]
        return sum(told) if told else None  # type: ignore[arg-type]

    names = ("calls", "prompt_tokens", "completion_tokens", "untold", "scripts", "dollars", "gradings", "seconds")
    return {name: add(name) for name in names}
