"""Places where the grader reaches into a reference: random masks that it decides, not torch; truths nearer than torch's."""

from __future__ import annotations

from contextvars import ContextVar

import torch
import torch.nn.functional as F

KEEP: ContextVar[bool | torch.Tensor | None] = ContextVar("keep", default=None)
"""None: draw a mask as torch does; True: keep every element; False: drop every element; a tensor: keep where it is True."""
TRUTH: ContextVar[bool] = ContextVar("truth", default=False)
"""Whether the truth is asked for, not torch's own answer: in fp64 cases they have the same dtype."""
DROPPED: ContextVar[list[torch.Tensor] | None] = ContextVar("dropped", default=None)
"""Collects what runs that keep every element would have had dropped, scaled as kept, where somebody looks for it."""
BITS = 22
"""Of each factor of an exact product: twice as many, and 7 for sums of 128, are less than the 53 of fp64."""


def dropout(x: torch.Tensor, p: float, training: bool) -> torch.Tensor:
    """Dropout of ``x`` with drop probability ``p``; kept values are scaled by 1 / (1 - p)."""
    if not training or p == 0.0:
        return x
    keep = KEEP.get()
    if keep is None:
        return F.dropout(x, p, training=True)
    if isinstance(keep, torch.Tensor):
        return torch.where(keep.to(x.device).view(x.shape), x / (1 - p), torch.zeros_like(x))
    kept = x / (1 - p) if keep and p < 1 else torch.zeros_like(x)
    seen = DROPPED.get()
    if keep and seen is not None:
        seen.append(kept)
    return kept


def refined(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
    """The solution ``x`` of a x = b (the inverse of a without b), after a step of refinement where the truth is asked for.

    Truth and submission would else be two fp64 results of the same accuracy, and torch's own error would count as 0.
    The residual is that of twice the precision, so that the truth is right to the last place.
    """
    if not TRUTH.get() or a.dtype != torch.float64 or not x.numel():
        return x
    b = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device) if b is None else b
    a1, x1 = _on_grid(a, -1), _on_grid(x, -2)
    rest = a1 @ (x - x1) + (a - a1) @ x
    return x + torch.linalg.solve(a, b - a1 @ x1 - rest)


def _on_grid(x: torch.Tensor, dim: int) -> torch.Tensor:
    """The leading bits, beside the largest along ``dim``: what such matrices have as a product is no matter of rounding."""
    top = x.abs().amax(dim, keepdim=True)
    step = torch.ldexp(torch.ones_like(top), torch.frexp(top).exponent - BITS)
    return (x / step).round() * step
