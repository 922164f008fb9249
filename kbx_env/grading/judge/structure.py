"""Checked before any value: count, dtype, shape, aliasing, and which inputs may have changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kbx_env.grading.judge.ruling import PASSED, Answer, Ruling
from kbx_env.grading.reference import Expected
from kbx_env.task import Case, Task


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit equality of two tensors of one dtype and shape."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.dtype.is_floating_point or a.dtype.is_complex:
        a, b = a.contiguous(), b.contiguous()
        return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
    return torch.equal(a, b)


def rule(task: Task, case: Case, args: Mapping[str, Any], expected: Expected, answer: Answer) -> Ruling:
    """Structure of one answer against the native reference."""
    if len(answer.outputs) != len(expected.native) or answer.is_tuple != expected.is_tuple:
        want = f"a tuple of {len(expected.native)}" if expected.is_tuple else "one tensor"
        got = f"a tuple of {len(answer.outputs)}" if answer.is_tuple else "one tensor"
        return Ruling(False, f"returned {got}, expected {want}")
    for i, (got_t, want_t) in enumerate(zip(answer.outputs, expected.native, strict=True)):
        if got_t.dtype != want_t.dtype:
            return Ruling(False, f"output {i} has dtype {got_t.dtype}, expected {want_t.dtype}")
        if got_t.shape != want_t.shape:
            return Ruling(False, f"output {i} has shape {tuple(got_t.shape)}, expected {tuple(want_t.shape)}")
        alias, want_alias = answer.aliases[i], "out" if case.out and i == 0 else expected.aliases[i]
        if want_alias is not None and alias != want_alias and got_t.numel():
            return Ruling(False, f"output {i} must be the tensor {want_alias!r} itself")
        if want_alias is None and answer.shares[i] is not None:
            return Ruling(False, f"output {i} shares memory with {answer.shares[i]!r}; a new tensor is expected")
    changed = task.written(case.args)
    for name, value in args.items():
        if not isinstance(value, torch.Tensor) or name in changed:
            continue
        if name not in answer.after or not same_bits(answer.after[name], value):
            return Ruling(False, f"the input {name!r} was changed")
    return PASSED


def pairs(expected: Expected, answer: Answer) -> list[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(name, answer, truth, native) for every output and every tensor written in place."""
    rows = [
        (f"output {i}", answer.outputs[i], expected.outputs[i], expected.native[i]) for i in range(len(expected.native))
    ]
    for name, truth in expected.written.items():
        if name in answer.after:
            rows.append((f"{name} after the call", answer.after[name], truth, expected.native_written[name]))
    return rows
