"""Reward term: kernels compile."""

from kbx_env.rewards._guards import passes
from kbx_env.rewards._term import term

from kbx_env.outcome import Outcome, Verdict

_NOT = (Verdict.MALFORMED, Verdict.REJECTED)


@term(0.0, 1.0)
def compiles(outcome: Outcome) -> float:
    """Pays 1 for a source that breaks no rule and has kernels that compile: something was launched, or built.

    A kernel is compiled anew for other dtypes and for integers that equal 1, so a compile error may come late. It pays 1 if the
    submission passed a telling case before, and 0 otherwise.

    Args:
        outcome: the graded submission.

    Returns:
        1 or 0.
    """
    if outcome.verdict in _NOT or outcome.violations:
        return 0.0
    if outcome.verdict is Verdict.COMPILE_ERROR:
        return 1.0 if passes(outcome) else 0.0
    launched = outcome.evidence is not None and outcome.evidence.launches > 0
    return 1.0 if launched or any(b.ok for b in outcome.compile) else 0.0
