"""Reward term: kernels compile."""

from kbx_env.rewards._term import term

from kbx_env.outcome import Outcome, Verdict

_NOT = (Verdict.MALFORMED, Verdict.REJECTED, Verdict.COMPILE_ERROR)


@term(0.0, 1.0)
def compiles(outcome: Outcome) -> float:
    """Pays 1 for a source that breaks no rule and has kernels that compile: something was launched, or built."""
    if outcome.verdict in _NOT or outcome.violations:
        return 0.0
    launched = outcome.evidence is not None and outcome.evidence.launches > 0
    return 1.0 if launched or any(b.ok for b in outcome.compile) else 0.0
