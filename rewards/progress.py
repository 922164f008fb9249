"""Reward term: the stage that a submission reaches without breaking a rule."""

from kbx_env.rewards._guards import passes
from kbx_env.rewards._term import term
from kbx_env.rewards.compiles import compiles

from kbx_env.outcome import Outcome, Stage, Verdict

READ, COMPILED = 0.3, 0.8
"""Values for a source that defines the entry, and for one with kernels that compile, where the submission stopped after
that stage. There is no value for a kernel that reached the compiler and failed there: only the untrusted process could
report that."""


@term(0.0, 1.0)
def progress(outcome: Outcome) -> float:
    """Pays for each stage reached: a source that can be read, kernels that compile, an end or a telling case that passed."""
    denied = outcome.evidence is not None and outcome.evidence.denied_ops
    late = outcome.stage is Stage.TIME and outcome.verdict is not Verdict.CORRECT  # wrong only when timed
    if outcome.violations or denied or late or outcome.verdict in (Verdict.MALFORMED, Verdict.REJECTED):
        return 0.0
    if compiles(outcome) != 1.0:
        return READ
    return 1.0 if outcome.verdict in (Verdict.CORRECT, Verdict.INCORRECT) or passes(outcome) else COMPILED
