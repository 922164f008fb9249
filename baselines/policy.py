"""What a policy is, and how one is made from its name on a command line."""

from __future__ import annotations

import importlib
import os
import pathlib
import sys
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from kbx_env.errors import UnknownName, UsageError

_HERE = pathlib.Path(__file__).parent


@runtime_checkable
class Policy(Protocol):
    """Answers an observation with kernel source.

    Two optional members matter to reports: ``samples(task) -> int``, how many answers are graded (default 1), and
    ``repeatable = True``, when the policy answers alike every time (a resumed report may then ask it again).
    """

    name: str

    def act(self, observation: Mapping[str, Any]) -> str | None:
        """Source text, or ``None`` where the policy has no answer.

        Args:
            observation: at least ``task`` (id), ``prompt``, ``feedback`` and ``turn``; in reports ``sample`` too.
        """


def policies() -> tuple[str, ...]:
    """Names of the policies in ``baselines/``: one file each, with ``NAME`` and ``build``."""
    names = (p.stem for p in _HERE.glob("*.py") if not p.stem.startswith("_") and p.stem != "policy")
    return tuple(sorted(names))


def make_policy(spec: str) -> Policy:
    """``expert``, ``eager``, ``zeros``, ``replay:FILE.jsonl`` or ``python:module:attribute``.

    Raises:
        UnknownName: no such policy.
        UsageError: a missing or unusable argument.
    """
    name, _, argument = spec.partition(":")
    if name == "python":
        module, _, attribute = argument.partition(":")
        if "" not in sys.path and os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())  # a script has its own folder on the path, not the user's
        try:
            made = getattr(importlib.import_module(module), attribute)
            policy = made() if isinstance(made, type) else made
        except Exception as e:  # the user's own module may fail in any way
            raise UsageError(f"policy {spec!r}: {type(e).__name__}: {e}; expected python:module:attribute") from e
        if not isinstance(policy, Policy):
            raise UsageError(f"policy {spec!r} has no name and act(observation)")
        return policy
    if name not in policies():
        raise UnknownName("policy", spec, [*policies(), "python:module:attribute"])
    built: Policy = importlib.import_module(f"kbx_env.baselines.{name}").build(argument or None)
    return built
