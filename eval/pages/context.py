"""The input of a report's document, and cells and sums that its sections share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kbx_env.eval.pages import formatting
from kbx_env.eval.pages.blocks import Block, Cell, Picture
from kbx_env.eval.report_data import PolicyStudy, Row, Study
from kbx_env.eval.stats import Mean, Rate

ANSWERS = 500
"""The most rows of a policy's table of answers; all answers are in tasks.csv."""


@dataclass(frozen=True)
class Material:
    """The input of a report's document.

    Attributes:
        study: the answers.
        beside: policy -> result of ``eval/regrade.py``.
        figures: name -> (SVG, caption).
        pages: task -> its page.
        kernels: (policy, task, sample) -> the file with the answer's source, relative to the report.
        analysis: of `kbx_env.eval.models`.
        comparisons: of two policies each.
        portable: builds for other GPUs.
        missing: what could not be computed, and why.
    """

    study: Study
    beside: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    figures: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    pages: Mapping[str, str] = field(default_factory=dict)
    kernels: Mapping[tuple[str, str, int], str] = field(default_factory=dict)
    analysis: Any = None
    comparisons: Sequence[Any] = ()
    portable: Sequence[Any] = ()
    missing: Sequence[str] = ()


def figure(m: Material, name: str) -> list[Block]:
    """Return the figure of a name as a block, or no block."""
    found = m.figures.get(name)
    return [Picture(name, *found)] if found else []


def kernel(m: Material, policy: str, task: str, sample: int) -> Cell:
    """Return a cell with a link to an answer's source.

    Args:
        m: the material.
        policy: name of the policy.
        task: the task.
        sample: number of the answer, from 0.

    Returns:
        The cell; a missing value where the report has no such file.
    """
    file = m.kernels.get((policy, task, sample))
    return Cell("source", href=file) if file else Cell(formatting.NONE)


def rate(r: Rate, style: str = "") -> Cell:
    """Return a cell with a rate and its counts; the interval shows on hover.

    Args:
        r: the rate.
        style: CSS classes.

    Returns:
        The cell.
    """
    if r.rate is None:
        return Cell(formatting.NONE, style=style)
    return Cell(f"{formatting.percent(r.rate)} ({r.k} of {r.n})", title=f"95 %: {formatting.between(r.low, r.high)}", style=style)


def mean(v: Mean) -> Cell:
    """Return a cell with a mean speedup; the interval shows on hover."""
    interval = formatting.between(v.low, v.high, formatting.times)
    return Cell(formatting.times(v.value), title=f"95 %: {interval}" if interval else "")


def evidence_of(p: PolicyStudy, index: int, category: str) -> str | None:
    """Return the link to a policy's answers of a category.

    Args:
        p: the policy.
        index: of the policy in the report.
        category: of the tasks.

    Returns:
        The link; ``None`` if the page does not show them.
    """
    shown = any(r.category == category for r in p.rows[:ANSWERS])
    return f"#policy-{index}-{category}" if shown else None


def label(r: Row) -> str:
    """Return an answer's task, with the answer's number if it is not the first."""
    return r.task + (f" #{r.sample + 1}" if r.sample else "")


def total(p: PolicyStudy) -> dict[str, Any]:
    """Return sums of the resources of answers; ``None`` for a number that no answer has."""

    def add(name: str) -> float | None:
        known = [r.spent.get(name) for r in p.rows if r.spent.get(name) is not None]
        return sum(known) if known else None  # type: ignore[arg-type]

    names = ("calls", "prompt_tokens", "completion_tokens", "untold", "scripts", "dollars", "gradings", "seconds")
    return {name: add(name) for name in names}
