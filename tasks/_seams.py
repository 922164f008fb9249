"""Places where the grader reaches into a reference: random masks that it decides, not torch."""

from __future__ import annotations

from contextvars import ContextVar

import torch
import torch.nn.functional as F

KEEP: ContextVar[bool | torch.Tensor | None] = ContextVar("keep", default=None)
"""None: draw a mask as torch does; True: keep every element; False: drop every element; a tensor: keep where it is True."""


def dropout(x: torch.Tensor, p: float, training: bool) -> torch.Tensor:
    """Dropout of ``x`` with drop probability ``p``; kept values are scaled by 1 / (1 - p)."""
    if not training or p == 0.0:
        return x
    keep = KEEP.get()
    if keep is None:
        return F.dropout(x, p, training=True)
    if isinstance(keep, torch.Tensor):
        return torch.where(keep.to(x.device).view(x.shape), x / (1 - p), torch.zeros_like(x))
    return x / (1 - p) if keep and p < 1 else torch.zeros_like(x)
