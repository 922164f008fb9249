"""Errors for users of kbx_env. A message names the thing, the accepted values, and the remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class KbxError(Exception):
    """Base of all errors of kbx_env."""


class UsageError(KbxError, ValueError):
    """The caller passed something that is not accepted. Command lines exit with status 2."""


class UnknownName(UsageError):
    """A task, category, split, backend, preset, policy, ... that does not exist.

    Attributes:
        kind: of the thing.
        got: the unknown name.
        accepted: all accepted names, sorted.
    """

    def __init__(self, kind: str, got: object, accepted: Iterable[str], remedy: str = "") -> None:
        """Make the message. It lists the accepted names, or the nearest ones if there are many.

        Args:
            kind: of the thing, for the message.
            got: the unknown name.
            accepted: the accepted names.
            remedy: ends the message.
        """
        names = sorted(map(str, accepted))
        close = difflib.get_close_matches(str(got), names, n=3, cutoff=0.4)
        last_parts = {n.rsplit("/", 1)[-1]: n for n in names}
        matches = difflib.get_close_matches(str(got).rsplit("/", 1)[-1], last_parts, n=2, cutoff=0.5)
        close += [last_parts[m] for m in matches]
        # A short list is shown in full; of a long list, the nearest names help more.
        close = list(dict.fromkeys(close)) if len(names) > 8 else []
        shown = close or names[:20]
        hint = "did you mean" if close else "accepted"
        more = "" if close or len(names) <= 20 else f" and {len(names) - 20} more"
        super().__init__(f"unknown {kind} {got!r}; {hint}: {', '.join(shown)}{more}{'. ' + remedy if remedy else ''}")
        self.kind, self.got, self.accepted = kind, got, tuple(names)


class DeclarationError(KbxError):
    """A task, reward term or policy file has a wrong declaration."""


class SandboxError(KbxError):
    """The sandbox failed, not the submission. This is an infrastructure fault."""


class NoAnswer(KbxError):
    """A policy has no kernel for a task: a refusal, an empty answer, or one that was cut off. Counts against the policy."""


class ModelError(KbxError):
    """The server of a model failed, not the model. The sample stays unknown, like an infrastructure fault."""


class BudgetSpent(ModelError):
    """A limit on calls, tokens or dollars is reached. No more calls are made; answers that arrived are graded."""
