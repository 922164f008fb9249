"""No input is known wherever an argument or a dtype is what it is: it would not have to be read there.

Of shapes nothing is asked: a kernel that knows a tensor by its shape would still find it here.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kbx_env.grading import inputs
from kbx_env.spec.catalog import load_task, task_ids
from kbx_env.spec.task import Case, Constant, Eye, Linspace, Literal, Task

FEW = 4
"""Tensors of fewer elements are toys."""
UNREAD = {("activation/tanh", "out_tensor")}
"""Filled, whatever they held."""


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | str)


def _conditions(task: Task, case: Case, timed: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """What a kernel can ask before it reads anything, if many calls answer alike: modes, dtypes, and what timed cases say."""
    params = task.signature.parameters
    bound = {n: p.default for n, p in params.items() if p.default is not p.empty} | dict(case.args)
    found = {(n, repr(v)) for n, v in bound.items() if _plain(v) or (n, repr(v)) in timed}
    found |= {(n, "given") for n, p in params.items() if p.default is None and bound.get(n) is not None}
    return found | {(n, d) for n, d in case.dtypes.items()} | {("out", str(case.out))}


@pytest.mark.parametrize("name", task_ids())
def test_nothing_is_known_under_a_published_condition(name: str) -> None:
    task = load_task(name)
    timed = {(n, repr(v)) for c in task.timed for n, v in c.args.items()}
    seen: dict[tuple[str, tuple[str, str]], list[bool]] = {}
    for case in task.cases:
        a, b = (inputs.draw(task, case, seed) for seed in (11, 12))
        for tensor, x in a.items():
            if isinstance(x, torch.Tensor) and x.numel() >= FEW:
                known = torch.equal(torch.view_as_real(x) if x.is_complex() else x, torch.view_as_real(b[tensor])
                                    if x.is_complex() else b[tensor]) or bool((x != x).all())  # fmt: skip
                for condition in _conditions(task, case, timed):
                    seen.setdefault((tensor, condition), []).append(known)
    wrong = [k for k, known in seen.items() if all(known) and (name, k[0]) not in UNREAD]
    assert not wrong, wrong


@pytest.mark.parametrize("name", task_ids())
def test_nothing_timed_is_known(name: str) -> None:
    task = load_task(name)
    for case in task.timed:
        for tensor, t in task.takes.items():
            law = case.draws.get(tensor) or t.draw or case.draw
            shown = (t.optional and tensor not in case.given) or tensor in case.args or (name, tensor) in UNREAD
            assert shown or not isinstance(law, Literal | Constant | Eye | Linspace), f"{tensor}: {law}"
