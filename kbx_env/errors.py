"""The errors a user of kbx_env can meet: each names the thing, what was accepted, and the remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class KbxError(Exception):
    """Base of every error raised on purpose."""


class UsageError(KbxError, ValueError):
    """The caller asked for something that cannot be done; command lines exit with status 2."""


class UnknownName(UsageError):
    """A task, category, split, backend, preset or policy that does not exist."""

    def __init__(self, kind: str, got: object, accepted: Iterable[str], remedy: str = "") -> None:
        names = sorted(map(str, accepted))
        close = difflib.get_close_matches(str(got), names, n=3, cutoff=0.4)
        tail = {n.rsplit("/", 1)[-1]: n for n in names}
        close += [tail[m] for m in difflib.get_close_matches(str(got).rsplit("/", 1)[-1], tail, n=2, cutoff=0.5)]
        # A short list is shown whole; of a long one the nearest names help more.
        close = list(dict.fromkeys(close)) if len(names) > 8 else []
        shown = close or names[:20]
        hint = "did you mean" if close else "accepted"
        more = "" if close or len(names) <= 20 else f" and {len(names) - 20} more"
        super().__init__(f"unknown {kind} {got!r}; {hint}: {', '.join(shown)}{more}{'. ' + remedy if remedy else ''}")
        self.kind, self.got, self.accepted = kind, got, tuple(names)


class DeclarationError(KbxError):
    """A task, term or policy file is not declared as the project asks."""


class SandboxError(KbxError):
    """The sandbox itself failed (not the submission): an infrastructure fault."""


class NoAnswer(KbxError):
    """A policy has no kernel for a task, and why: a refusal, an empty answer, one that was cut off. The policy pays."""


class ModelError(KbxError):
    """The model's server failed (not the model): the sample stays unknown, like an infrastructure fault."""


class BudgetSpent(ModelError):
    """A limit on calls, tokens or dollars was reached: no more is asked, what was answered is graded."""
