"""Reward term: the kernels compile."""

from kbx_env.rewards._term import term

from kbx_env.outcome import Outcome, Verdict

_NOT = (Verdict.MALFORMED, Verdict.REJECTED, Verdict.COMPILE_ERROR)


@term(0.0, 1.0)
def compiles(outcome: Outcome) -> float:
    """Pays 1 for a source that is well formed, breaks no rule and compiles."""
    return 0.0 if outcome.verdict in _NOT or outcome.violations else 1.0
