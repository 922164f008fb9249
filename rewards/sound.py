"""Reward term: few errors that are certain, in a source that does not compile."""

from kbx_env.rewards._term import term
from kbx_env.rewards.compiles import compiles

from kbx_env.outcome import LAUNCHLESS, Outcome, Verdict

STOPPED = (Verdict.COMPILE_ERROR, Verdict.RUNTIME_ERROR)


@term(0.0, 1.0)
def sound(outcome: Outcome) -> float | None:
    """Pays 1 / (1 + errors that the grader finds certain by reading), where ``compiles`` pays nothing and a kernel is named.

    Once that pays it is worth more than this term, and what was submitted is judged by what it does. A source that names no
    kernel has nothing to be sound. ``None`` for outcomes of before such errors were looked for.
    """
    denied = outcome.evidence is not None and outcome.evidence.denied_ops
    if outcome.violations or denied or outcome.verdict not in STOPPED or compiles(outcome) == 1.0:
        return 0.0
    if outcome.slips is None:
        return None
    return 0.0 if LAUNCHLESS in outcome.slips else 1 / (1 + len(outcome.slips))
