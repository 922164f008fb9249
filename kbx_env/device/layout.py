"""The memory layout of tensors."""

from __future__ import annotations

import torch


def flat(value: torch.Tensor) -> torch.Tensor:
    """Return a one-dimensional view of a tensor's memory from its first to its last element.

    Args:
        value: A tensor with at least one element.

    Returns:
        Its elements and those between them that do not belong to it; same dtype.
    """
    span = 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
    return value.as_strided((span,), (1,), value.storage_offset())
