"""The project's own kernels: the ceiling of every report, and the proof that every task can be solved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kbx_env.baselines.llm.access import Access

from kbx_env.errors import UsageError
from kbx_env.spec.catalog import expert_source

NAME = "expert"


class Expert:
    """Answers with ``baselines/experts/<task>.py``."""

    name = NAME
    repeatable = True

    def act(self, observation: Mapping[str, Any]) -> str | None:
        """The expert's source."""
        return expert_source(observation["task"])


def build(argument: str | None, access: Access) -> Expert:
    """Takes no argument."""
    if argument:
        raise UsageError(f"policy {NAME!r} takes no argument, got {argument!r}")
    return Expert()
