"""The input and the output of a judge: an answer and a ruling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Answer:
    """The result of one call, decoded by the grader; every field is an untrusted claim of the runner."""

    outputs: tuple[torch.Tensor, ...]
    """The returned tensors."""
    is_tuple: bool
    """Whether a tuple or list was returned."""
    after: Mapping[str, torch.Tensor]
    """Every tensor argument after the call."""
    aliases: tuple[str | None, ...]
    """Per output: the argument whose tensor object was returned."""
    shares: tuple[str | None, ...]
    """Per output: an argument whose storage it overlaps."""
    strides: tuple[tuple[int, ...], ...] | None = None
    """Per output, in elements; ``None`` if they were not requested."""
    grads: tuple[bool, ...] | None = None
    """Per output: ``requires_grad``; checked if the task has a parameter of this name."""


@dataclass(frozen=True)
class Ruling:
    """The decision of a judge."""

    passed: bool
    reason: str = ""
    """Why the answer is wrong."""
    error: float | None = None
    """The largest error."""
    limit: float | None = None
    """The largest allowed error, in the same unit."""

    @property
    def missed(self) -> bool:
        """Whether values exceed an error limit; False for faults of structure, randomness or side effects."""
        return not self.passed and self.error is not None and self.limit is not None


PASSED = Ruling(True)
"""The ruling on a correct answer."""
