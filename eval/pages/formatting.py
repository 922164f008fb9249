"""Numbers for people: a missing one is said, never 0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NONE = "–"


def percent(value: float | None) -> str:
    """A rate."""
    return "not measured" if value is None else f"{100 * value:.1f} %"


def times(value: float | None) -> str:
    """A speedup."""
    return "not measured" if value is None else f"{value:.3f}x"


def between(low: float | None, high: float | None, show: Any = percent) -> str:
    """A 95 % interval, empty where there is none."""
    return "" if low is None or high is None else f"{show(low)} to {show(high)}"


def amount(value: float | None, unit: str = "") -> str:
    """A count or a sum; a dash where nobody told it."""
    if value is None:
        return NONE
    return f"{value:,.0f}{unit}" if value >= 100 or value == int(value) else f"{value:.2f}{unit}"


def size(value: int | None) -> str:
    """Bytes."""
    if value is None:
        return NONE
    left, units = float(value), ["B", "KiB", "MiB", "GiB"]
    while left >= 1024 and len(units) > 1:
        left, units = left / 1024, units[1:]
    return f"{left:.0f} B" if units[0] == "B" else f"{left:.1f} {units[0]}"


def reason(message: str, correct: bool) -> str:
    """Why an answer is not correct, in one line."""
    return "" if correct else message.split("\n")[0][:160]


def took(spent: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What answers took, as (name, amount): always all of it, since methods do not spend alike."""
    told = spent["prompt_tokens"] is not None and spent["untold"] < spent["calls"]
    tokens = spent["prompt_tokens"] + spent["completion_tokens"] if told else None
    # A sum over calls of which some told nothing is a lower bound.
    least = "≥ " if told and spent["untold"] else ""
    return [
        ("LLM calls", amount(spent["calls"])), ("tokens", least + amount(tokens)), ("dollars", amount(spent["dollars"])),
        ("own tests", amount(spent["scripts"])), ("gradings", amount(spent["gradings"])),
        ("wall time", amount(spent["seconds"], " s")),
    ]  # fmt: skip


def about_line(about: Mapping[str, Any]) -> str:
    """The model behind a policy, and what the policy uses besides the task's text: methods do not spend equal feedback."""
    if not about:
        return ""
    needs, sampling = about["needs"], about["sampling"]
    uses = [
        w for k, w in (("grader_feedback", "reads the grader's verdicts"), ("own_tests", "runs tests of its own")) if needs[k]
    ]
    told = [f"model: {about['model']}", *(f"{k.replace('_', ' ')}: {v}" for k, v in sampling.items() if v is not None)]
    return " · ".join([*told, f"policy seed: {about['policy_seed']}", "; ".join(uses) or "sees the task only"])


def manifest_line(manifest: Mapping[str, Any]) -> str:
    """Where and under what rules it was graded."""
    keys = ("device", "backend", "torch", "triton", "kbx_env", "grading", "torch_ops", "sizes", "task_split", "seed_policy")
    return " · ".join(f"{k.replace('_', ' ')}: {manifest[k]}" for k in keys if k in manifest)
