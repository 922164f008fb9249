"""The policy ``eager``: a task's reference in torch, as a submission. It is correct, and the grader must reject it."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping
from typing import Any

from kbx_env.baselines.llm.access import Access

from kbx_env.errors import UsageError
from kbx_env.spec.catalog import load_task

NAME = "eager"

_PRELUDE = """\
import torch
import torch.nn.functional as F


def dropout(x, p, training):
    return F.dropout(x, p, training=training)


def symmetric(x, dim, top):
    x32 = x.float()
    peak = x32.abs().amax(dim=dim, keepdim=True) if x.numel() else x32.sum(dim=dim, keepdim=True)
    scale = torch.where(peak == 0, torch.ones_like(peak), peak / top)
    return torch.round(x32 / scale).clamp(-top, top), scale


def int8_symmetric(x, dim):
    return symmetric(x, dim, 127)


def int4_symmetric(x, dim):
    return symmetric(x, dim, 7)


def rounded(x, relative):
    return torch.round(x), torch.zeros_like(x)


def report_slack(slack):
    pass


def operand(q):
    return q


def packed(q):
    return q


def refined(x, a, b=None):
    return x


def total(q):
    return q.sum(-1, keepdim=True)


def jump(q):
    return torch.ones_like(q)


class TRUTH:
    @staticmethod
    def get():
        return False


"""


class Eager:
    """Answers with the reference and the definitions that it uses; shared helpers are replaced by plain torch."""

    name = NAME
    repeatable = True

    def act(self, observation: Mapping[str, Any]) -> str | None:
        """Return the task's reference as a self-contained module."""
        module = inspect.getmodule(load_task(observation["task"]).reference)
        assert module is not None
        tree = ast.parse(inspect.getsource(module))
        entry = load_task(observation["task"]).entry
        defined: dict[str, Any] = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)}
        assignments = [n for n in tree.body if isinstance(n, ast.Assign)]
        defined |= {t.id: n for n in assignments for t in n.targets if isinstance(t, ast.Name)}
        needed, unvisited = {entry}, [entry]
        defined[entry].decorator_list = []
        while unvisited:
            names = {n.id for n in ast.walk(defined[unvisited.pop()]) if isinstance(n, ast.Name)}
            used = names & set(defined) - needed
            needed |= used
            unvisited += used
        kept = [n for n in tree.body if _imports_torch(n) or any(n is defined[name] for name in needed)]
        return _PRELUDE + "\n\n\n".join(map(ast.unparse, kept)) + "\n"


def _imports_torch(node: ast.stmt) -> bool:
    names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
    names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
    return any(n in ("torch", "math") or n.startswith("torch.") for n in names)


def build(argument: str | None, access: Access) -> Eager:
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
    return Eager()
