"""Checked before any value: count, dtype, shape, aliasing, and which inputs may have changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from kbx_env.grading.judge.ruling import PASSED, Answer, Ruling
from kbx_env.grading.reference import Expected, real_view
from kbx_env.spec.task import Case, Task


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit equality of two tensors of one dtype and shape."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    a, b = a.resolve_conj(), b.resolve_conj()
    a, b = a.contiguous().reshape(-1), b.to(a.device).contiguous().reshape(-1)
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8)) if a.numel() else True


def overlaps(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether two elements lie in one place, as with an expanded tensor (or may do: strides that interleave)."""
    reach = 0
    for s, n in sorted((abs(s), n) for n, s in zip(shape, stride, strict=True) if n > 1):
        if s <= reach:
            return True
        reach += s * (n - 1)
    return False


def dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the elements lie one after the other, row-major."""
    expected = 1
    for n, s in zip(reversed(shape), reversed(stride), strict=True):
        if n > 1 and s != expected:
            return False
        expected *= n
    return True


def rule(task: Task, case: Case, args: Mapping[str, Any], expected: Expected, answer: Answer) -> Ruling:
    """Structure of one answer against the native reference."""
    count = len(expected.native)
    counts = {len(answer.outputs), len(answer.aliases), len(answer.shares)}
    if counts != {count} or answer.is_tuple != expected.is_tuple:
        want = f"a tuple of {count}" if expected.is_tuple else "one tensor"
        got = f"a tuple of {len(answer.outputs)}" if answer.is_tuple else "one tensor"
        return Ruling(False, f"returned {got}, expected {want}")
    grad = bool(case.args.get("requires_grad"))
    if "requires_grad" in task.signature.parameters and answer.grads is not None and set(answer.grads) != {grad}:
        return Ruling(False, f"the result has requires_grad={not grad}, asked for was {grad}")
    changed = task.written(case.args)
    for i, (got_t, want_t) in enumerate(zip(answer.outputs, expected.native, strict=True)):
        if got_t.dtype != want_t.dtype:
            return Ruling(False, f"output {i} has dtype {got_t.dtype}, expected {want_t.dtype}")
        if got_t.shape != want_t.shape:
            return Ruling(False, f"output {i} has shape {tuple(got_t.shape)}, expected {tuple(want_t.shape)}")
        if not got_t.numel():
            continue
        stride = answer.strides[i] if answer.strides is not None and i < len(answer.strides) else None
        if stride is not None and overlaps(got_t.shape, stride):
            return Ruling(
                False, f"output {i} has elements that share memory (strides {stride}); a new tensor is expected"
            )
        if stride is not None and task.moves and not case.out and not changed and not dense(got_t.shape, stride):
            return Ruling(
                False, f"output {i} has strides {stride}; where moving values is the task it must be contiguous"
            )
        must = "out" if case.out and i == 0 else expected.aliases[i] if expected.aliases[i] in changed else None
        if must is not None and answer.aliases[i] != must:
            return Ruling(False, f"output {i} must be the tensor {must!r} itself")
        # Where torch itself hands out a view of an input (or the input), a view and a copy are both right.
        if must is None and answer.shares[i] is not None and answer.shares[i] != expected.shares[i]:
            return Ruling(False, f"output {i} shares memory with {answer.shares[i]!r}; a new tensor is expected")
    for name, value in args.items():
        if not isinstance(value, torch.Tensor):
            continue
        after = answer.after.get(name)
        if after is None or after.dtype != value.dtype or after.shape != value.shape:
            return Ruling(False, f"the argument {name!r} has another dtype or shape after the call")
        if name not in changed and not same_bits(after, value):
            return Ruling(False, f"the input {name!r} was changed")
    return PASSED


class Row(NamedTuple):
    """One tensor to judge."""

    name: str
    got: torch.Tensor
    exact: torch.Tensor
    native: torch.Tensor


def pairs(expected: Expected, answer: Answer) -> list[Row]:
    """Every output and every tensor written in place, after ``rule`` has passed; complex ones as pairs of reals."""
    threes = zip(answer.outputs, expected.outputs, expected.native, strict=True)
    rows = [Row(f"output {i}", *map(real_view, three)) for i, three in enumerate(threes)]
    for name, truth in expected.written.items():
        three = (answer.after[name], truth, expected.native_written[name])
        rows.append(Row(f"{name} after the call", *map(real_view, three)))
    return rows
