"""Reward term: the share of correctness cases passed."""

from kbx_env.rewards._guards import earnest, passes
from kbx_env.rewards._term import term

from kbx_env.outcome import Outcome

STOPPED = 0.9
"""Factor for a submission that an error, a failed build or the time limit ended: it is worth less than one that ran through all
cases and passed as many, and more than one that passed none."""


@term(0.0, 1.0)
def cases(outcome: Outcome) -> float:
    """Pays the share of telling cases passed, nothing once a rule is broken or nothing was launched.

    A case whose result is empty or all zeros is passed by doing nothing; it is not a telling case and pays nothing. Neither
    does one whose result torch or the host computed, so that failing on purpose saves a cheat nothing. Cases that
    were not run, because the submission stopped half-way (crash, compile error, timeout), count as failed.

    Args:
        outcome: the graded submission.

    Returns:
        The share, in [0, 1]; times ``STOPPED`` for a submission that stopped half-way.
    """
    return passes(outcome) * (1.0 if earnest(outcome) else STOPPED)
