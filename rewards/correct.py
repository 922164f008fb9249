"""Reward term: the verdict is "correct"."""

from kbx_env.rewards._term import term

from kbx_env.outcome import Outcome


@term(0.0, 1.0)
def correct(outcome: Outcome) -> float:
    """Pays 1 for the verdict "correct": every case passed, no rule broken, Triton did the work."""
    return 1.0 if outcome.correct else 0.0
