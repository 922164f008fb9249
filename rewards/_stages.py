"""Shared by the terms on quantization: what the grader saw hold of the scheme (``kbx_env/grading/evidence/stage_credit.py``)."""

from __future__ import annotations

from kbx_env.rewards._guards import earnest

from kbx_env.outcome import Outcome


def held(outcome: Outcome, stage: str) -> float | None:
    """Share of the telling cases that are wrong and hold the stage, as far as the grader looked; 1 for a correct kernel.

    What passes is paid by ``cases``, and more, so that a case set right always raises the reward. ``None`` where the scheme has no
    such stage or nobody could look.
    """
    if outcome.correct:
        return 1.0
    if not earnest(outcome):
        return 0.0
    stages, cases = outcome.evidence.stages if outcome.evidence is not None else None, outcome.cases
    if stages is None or stage not in stages or cases is None or not cases.telling:
        return None
    return stages[stage] * (1 - (cases.telling_passed or 0) / cases.telling)
