"""Formats numbers for people; a missing number is shown as missing, never as 0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kbx_env import versions

NONE = "–"
"""A missing value in a table."""


def percent(value: float | None) -> str:
    """Format a rate."""
    return "not measured" if value is None else f"{100 * value:.1f} %"


def times(value: float | None) -> str:
    """Format a speedup."""
    return "not measured" if value is None else f"{value:.3f}x"


def between(low: float | None, high: float | None, show: Any = percent) -> str:
    """Format a 95 % interval.

    Args:
        low: lower end, or ``None``.
        high: upper end, or ``None``.
        show: formats an end.

    Returns:
        The text, empty without an interval.
    """
    return "" if low is None or high is None else f"{show(low)} to {show(high)}"


def amount(value: float | None, unit: str = "") -> str:
    """Format a count or a sum.

    Args:
        value: the number, or ``None``.
        unit: after the number, with a space before it.

    Returns:
        The text, a dash for ``None``.
    """
    if value is None:
        return NONE
    return f"{value:,.0f}{unit}" if value >= 100 or value == int(value) else f"{value:.2f}{unit}"


def size(value: int | None) -> str:
    """Format a number of bytes."""
    if value is None:
        return NONE
    left, units = float(value), ["B", "KiB", "MiB", "GiB"]
    while left >= 1024 and len(units) > 1:
        left, units = left / 1024, units[1:]
    return f"{left:.0f} B" if units[0] == "B" else f"{left:.1f} {units[0]}"


def reason(message: str, correct: bool) -> str:
    """Return the reason why an answer is not correct, in one line; empty for a correct one."""
    return "" if correct else message.split("\n")[0][:160]


def took(spent: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the resources of answers as (name, amount); always all of them, since methods use different ones."""
    known = spent["prompt_tokens"] is not None and spent["untold"] < spent["calls"]
    tokens = spent["prompt_tokens"] + spent["completion_tokens"] if known else None
    # If some calls did not report their tokens, the sum is a lower bound.
    least = "≥ " if known and spent["untold"] else ""
    return [
        ("LLM calls", amount(spent["calls"])), ("tokens", least + amount(tokens)), ("dollars", amount(spent["dollars"])),
        ("own tests", amount(spent["scripts"])), ("gradings", amount(spent["gradings"])),
        ("wall time", amount(spent["seconds"], " s")),
    ]  # fmt: skip


def about_line(about: Mapping[str, Any]) -> str:
    """Describe a policy's model and what the policy uses besides the task's text."""
    if not about:
        return ""
    needs, sampling = about["needs"], about["sampling"]
    uses = [
        w for k, w in (("grader_feedback", "reads the grader's verdicts"), ("own_tests", "runs tests of its own")) if needs[k]
    ]
    settings = [f"model: {about['model']}", *(f"{k.replace('_', ' ')}: {v}" for k, v in sampling.items() if v is not None)]
    return " · ".join([*settings, f"policy seed: {about['policy_seed']}", "; ".join(uses) or "sees the task only"])


def manifest_line(manifest: Mapping[str, Any]) -> str:
    """Describe task set, device, versions and rules of the grading."""
    shown = dict(manifest)
    if manifest.get("task_set") is not None:
        shown["task_set"] = str(versions.TaskSet(manifest["task_set"], manifest.get("task_set_hash")))
    keys = (
        "task_set", "device", "backend", "torch", "triton", "kbx_env", "grading", "torch_ops", "sizes", "task_split",
        "tasks_asked", "seed_policy",
    )  # fmt: skip
    return " · ".join(f"{k.replace('_', ' ')}: {shown[k]}" for k in keys if shown.get(k) is not None)
