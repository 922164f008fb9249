"""Shared by the terms on quantization: credit for stages of a scheme (``grading/evidence/stage_credit.py``)."""

from __future__ import annotations

from kbx_env.rewards._guards import earnest

from kbx_env.outcome import Outcome


def held(outcome: Outcome, stage: str) -> float | None:
    """Return the credit for one stage of the quantization scheme, counted over the wrong telling cases.

    Cases that pass are paid by the term ``cases``, which pays more: correcting a case always raises the reward.

    Args:
        outcome: the graded submission.
        stage: a key of ``Evidence.stages``, such as ``scale``.

    Returns:
        The stage's share (``Evidence.stages``, a mean over some wrong cases) times the share of telling cases that are
        wrong, in [0, 1]; 1 for a correct kernel; ``None`` where the scheme has no such stage or the grader could not
        observe it.
    """
    if outcome.correct:
        return 1.0
    if not earnest(outcome):
        return 0.0
    stages, cases = outcome.evidence.stages if outcome.evidence is not None else None, outcome.cases
    if stages is None or stage not in stages or cases is None or not cases.telling:
        return None
    return stages[stage] * (1 - (cases.telling_passed or 0) / cases.telling)
