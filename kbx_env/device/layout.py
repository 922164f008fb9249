"""How tensors lie in memory."""

from __future__ import annotations

import torch


def flat(value: torch.Tensor) -> torch.Tensor:
    """A tensor's elements and what lies between them, from the first to the last."""
    span = 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
    return value.as_strided((span,), (1,), value.storage_offset())
