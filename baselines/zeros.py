"""The policy ``zeros``: a kernel that stores zeros. The grader must find it incorrect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kbx_env.baselines.llm.access import Access

from kbx_env.errors import UsageError
from kbx_env.spec.catalog import load_task

NAME = "zeros"

SOURCE = """\
import torch
import triton
import triton.language as tl


@triton.jit
def _zero(y, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + o, tl.zeros((BLOCK,), tl.float32).to(y.dtype.element_ty), mask=o < n)


def {entry}(*args, **kwargs):
    given = [b for a in (*args, *kwargs.values()) for b in (a if isinstance(a, list) else [a])]
    like = next((a for a in given if isinstance(a, torch.Tensor)), None)
    shape = like.shape if like is not None else args[0] if isinstance(args[0], tuple) else 4
    dtype, device = (torch.float32, kwargs.get("device")) if like is None else (like.dtype, like.device)
    y = torch.empty(shape, dtype=dtype, device=device)
    if y.numel():
        flat = torch.view_as_real(y) if y.is_complex() else y
        _zero[(triton.cdiv(flat.numel(), 1024),)](flat, flat.numel(), BLOCK=1024)
    return y
"""


class Zeros:
    """Answers every task with a source that returns zeros with shape, dtype and device of the first tensor argument."""

    name = NAME
    repeatable = True

    def act(self, observation: Mapping[str, Any]) -> str | None:
        """Return the source, with the name of the task's entry function."""
        return SOURCE.replace("{entry}", load_task(observation["task"]).entry)


def build(argument: str | None, access: Access) -> Zeros:
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
    return Zeros()
