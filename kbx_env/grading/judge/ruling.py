"""What goes into a judge and what comes out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Answer:
    """What one call returned, decoded by the grader; every field is the runner's claim."""

    outputs: tuple[torch.Tensor, ...]
    is_tuple: bool
    after: Mapping[str, torch.Tensor]
    """Every tensor argument after the call."""
    aliases: tuple[str | None, ...]
    """Per output: the argument whose very tensor was returned."""
    shares: tuple[str | None, ...]
    """Per output: an argument whose storage it overlaps."""
    strides: tuple[tuple[int, ...], ...] | None = None
    """Per output, in elements; ``None`` where nobody asked."""
    grads: tuple[bool, ...] | None = None
    """Per output: ``requires_grad``; looked at where the task has a parameter of this name."""


@dataclass(frozen=True)
class Ruling:
    """Passed, or why not. ``error`` is the worst error, ``limit`` the most that is allowed, in the same unit."""

    passed: bool
    reason: str = ""
    error: float | None = None
    limit: float | None = None

    @property
    def missed(self) -> bool:
        """Whether values are wrong, measured against a limit: not their structure, their chance or what the call did elsewhere."""
        return not self.passed and self.error is not None and self.limit is not None


PASSED = Ruling(True)
