"""Reward term: few errors that are certain, in a source of which no kernel compiled."""

from kbx_env.rewards._term import term
from kbx_env.rewards.compiles import compiles

from kbx_env.outcome import LAUNCHLESS, Outcome, Verdict

STOPPED = (Verdict.COMPILE_ERROR, Verdict.RUNTIME_ERROR)


@term(0.0, 1.0)
def sound(outcome: Outcome) -> float | None:
    """Pays 1 / (1 + errors that the grader finds certain by reading), where no kernel compiled and some is to be launched.

    Once a kernel compiled there is more to be paid for that than this term is worth, and what was submitted is judged by what it
    does. A source without a launch has nothing to be sound. ``None`` for outcomes of before such errors were looked for.
    """
    denied = outcome.evidence is not None and outcome.evidence.denied_ops
    if outcome.violations or denied or outcome.verdict not in STOPPED or compiles(outcome) == 1.0:
        return 0.0
    if outcome.slips is None:
        return None
    return 0.0 if LAUNCHLESS in outcome.slips else 1 / (1 + len(outcome.slips))
