"""Small tasks and answers for the tests of the judges."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from kbx_env.grading import inputs, judge, reference
from kbx_env.grading.judge import Answer, Ruling
from kbx_env.spec.criteria import Published
from kbx_env.spec.task import Case, Cost, Declaration, Task, task

NONE = Case({}, held=True)


def make(function: Callable[..., Any], takes: dict[str, Any], truth: Any, flops: str = "0", **more: Any) -> Task:
    function.__doc__ = function.__doc__ or "A test task."
    first = Case({}, held=False)
    fields = {"difficulty": 1, "takes": takes, "truth": truth, "cost": Cost(flops), "cases": (first, NONE), "timed": ()}
    declared = task(**(fields | more))(function)
    assert isinstance(declared, Declaration)
    return Task(
        id=f"test/{function.__name__}", category="test", entry=function.__name__, spec="",
        signature=inspect.signature(function), reference=function, **declared.fields,
    )  # fmt: skip


def answer(*outputs: torch.Tensor, args: dict[str, Any], is_tuple: bool | None = None, **after: torch.Tensor) -> Answer:
    """A fresh result; arguments stay as they were unless ``after`` says otherwise."""
    tensors = {k: v for k, v in args.items() if isinstance(v, torch.Tensor)} | after
    none = (None,) * len(outputs)
    return Answer(outputs, len(outputs) > 1 if is_tuple is None else is_tuple, tensors, none, none)


def rule(
    t: Task, case: Case, args: dict[str, Any], *outputs: torch.Tensor, grading: str = "contract", **options: Any
) -> Ruling:  # fmt: skip
    """The ruling on one answer; ``paper`` judges it by the published comparison."""
    t = replace(t, truth=Published()) if grading == "paper" else t
    return judge.judge(t, case, args, [answer(*outputs, args=args)], **options)


def canaries_fail(t: Task, case: Case, args: dict[str, Any]) -> None:
    expected = reference.expect(t, case, args)
    for name, canary in judge.canaries(t, case, args, expected).items():
        ruling = judge.judge(t, case, args, [canary] * judge.calls_needed(t, case))
        assert not ruling.passed, name


def tf32(x: torch.Tensor) -> torch.Tensor:
    """Round to 10 mantissa bits, as a tensor core does with fp32 operands."""
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


draw = inputs.draw
