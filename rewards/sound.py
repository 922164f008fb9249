"""Reward term: few statically certain errors in a source that does not compile."""

from kbx_env.rewards._term import term
from kbx_env.rewards.compiles import compiles

from kbx_env.outcome import LAUNCHLESS, Outcome, Verdict

STOPPED = (Verdict.COMPILE_ERROR, Verdict.RUNTIME_ERROR)


@term(0.0, 1.0)
def sound(outcome: Outcome) -> float | None:
    """Pays 1 / (1 + statically certain errors) where ``compiles`` pays nothing and the source names a kernel.

    ``compiles`` pays more than this term, so a source that leaves out what does not compile gains nothing. A source
    that names no kernel has no errors to count and earns 0.

    Args:
        outcome: the graded submission.

    Returns:
        A number in [0, 1]; ``None`` for a stored outcome that is older than the search for such errors.
    """
    denied = outcome.evidence is not None and outcome.evidence.denied_ops
    if outcome.violations or denied or outcome.verdict not in STOPPED or compiles(outcome) == 1.0:
        return 0.0
    if outcome.slips is None:
        return None
    return 0.0 if LAUNCHLESS in outcome.slips else 1 / (1 + len(outcome.slips))
