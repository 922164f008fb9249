"""The policy ``expert``: the project's own kernels, which show that every task can be solved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kbx_env.baselines.llm.access import Access

from kbx_env.errors import UsageError
from kbx_env.spec.catalog import expert_source

NAME = "expert"


class Expert:
    """Answers with the expert kernel of a task, ``baselines/experts/<task>.py``."""

    name = NAME
    repeatable = True

    def act(self, observation: Mapping[str, Any]) -> str | None:
        """Return the expert's source; ``None`` for a task without an expert."""
        return expert_source(observation["task"])


def build(argument: str | None, access: Access) -> Expert:
    """Make the policy.

    Args:
        argument: must be empty.
        access: not used.

    Returns:
        The policy.

    Raises:
        UsageError: there is an argument.
    """
    if argument:
        raise UsageError(f"policy {NAME!r} takes no argument, got {argument!r}")
    return Expert()
