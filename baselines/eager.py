"""A torch fallback: the reference itself, as a submission. Correct, and must earn nothing."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping
from typing import Any

from kbx_env.catalog import load_task
from kbx_env.errors import UsageError

NAME = "eager"

_PRELUDE = """\
import torch
import torch.nn.functional as F


def dropout(x, p, training):
    return F.dropout(x, p, training=training)


def int8_symmetric(x, dim):
    x32 = x.float()
    peak = x32.abs().amax(dim=dim, keepdim=True) if x.numel() else x32.sum(dim=dim, keepdim=True)
    scale = torch.where(peak == 0, torch.ones_like(peak), peak / 127)
    return torch.round(x32 / scale).clamp(-127, 127).to(x.dtype), scale.to(x.dtype)


"""


class Eager:
    """The reference's body with its two seams replaced by plain torch."""

    name = NAME
    repeatable = True

    def act(self, observation: Mapping[str, Any]) -> str | None:
        """The reference as a module of its own."""
        module = inspect.getmodule(load_task(observation["task"]).reference)
        assert module is not None
        tree = ast.parse(inspect.getsource(module))
        entry = load_task(observation["task"]).entry
        kept = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == entry]
        kept[0].decorator_list = []
        return _PRELUDE + ast.unparse(kept[0]) + "\n"


def build(argument: str | None) -> Eager:
    """Takes no argument."""
    if argument:
        raise UsageError(f"policy {NAME!r} takes no argument, got {argument!r}")
    return Eager()
