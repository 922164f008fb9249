"""Shared by the terms on fusion: they count telling cases that passed, since little work for a wrong result is no merit."""

from __future__ import annotations

from collections.abc import Callable

from kbx_env.rewards._guards import earnest

from kbx_env.outcome import Outcome, Passing


def in_passing(outcome: Outcome, share: Callable[[Passing], float]) -> float | None:
    """Weigh a measure of the work in passing cases by the share of telling cases that passed.

    Args:
        outcome: the graded submission.
        share: maps the work of the passing cases to a number, which is clamped to [0, 1].

    Returns:
        A number in [0, 1]; 0 without a telling case that passed; ``None`` where the CPU tier has not executed the
        kernel.
    """
    if not earnest(outcome):
        return 0.0
    evidence, cases = outcome.evidence, outcome.cases
    if evidence is None or evidence.passing is None:
        return None
    if cases is None or not cases.telling or not cases.telling_passed:
        return 0.0
    work = evidence.passing
    if not work.cases or not work.launches or not work.moved_bytes:
        return 0.0
    return min(1.0, max(0.0, share(work))) * cases.telling_passed / cases.telling
