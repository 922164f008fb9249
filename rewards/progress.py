"""Reward term: how far a submission that breaks no rule gets."""

from kbx_env.rewards._term import term
from kbx_env.rewards.compiles import compiles

from kbx_env.outcome import Outcome, Verdict

READ, CALLED, LAUNCHED = 0.3, 0.6, 0.8
"""For a source that defines what is asked for; for one whose kernel reached the compiler; for one that stopped after that."""


@term(0.0, 1.0)
def progress(outcome: Outcome) -> float:
    """Pays for each stage reached: a source that can be read, a kernel that reaches the compiler, one that compiles, an end."""
    denied = outcome.evidence is not None and outcome.evidence.denied_ops
    if outcome.violations or denied or outcome.verdict in (Verdict.MALFORMED, Verdict.REJECTED):
        return 0.0
    if outcome.verdict is Verdict.COMPILE_ERROR:
        return CALLED
    if compiles(outcome) != 1.0:
        return READ
    return 1.0 if outcome.verdict in (Verdict.CORRECT, Verdict.INCORRECT) else LAUNCHED
