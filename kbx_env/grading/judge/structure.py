"""Judges the structure of an answer before its values: count, dtype, shape, aliasing, and changed inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from kbx_env.grading.judge.ruling import PASSED, Answer, Ruling
from kbx_env.grading.reference import Expected, real_view
from kbx_env.spec.task import Case, Task


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors have the same dtype, shape and bits."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    a, b = a.resolve_conj(), b.resolve_conj()
    # A single element counts as contiguous whatever its strides, and only a stride of 1 can be read as bytes.
    a, b = (x.to(a.device).contiguous().as_strided((x.numel(),), (1,)) for x in (a, b))
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8)) if a.numel() else True


def overlaps(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether two elements share, or by interleaving strides may share, an address, as in an expanded tensor.

    Args:
        shape: sizes of the tensor.
        stride: strides in elements.

    Returns:
        False only if all addresses are certainly different.
    """
    reach = 0
    for s, n in sorted((abs(s), n) for n, s in zip(shape, stride, strict=True) if n > 1):
        if s <= reach:
            return True
        reach += s * (n - 1)
    return False


def dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether a tensor of this shape and these strides (in elements) is contiguous, row-major."""
    expected = 1
    for n, s in zip(reversed(shape), reversed(stride), strict=True):
        if n > 1 and s != expected:
            return False
        expected *= n
    return True


def rule(task: Task, case: Case, args: Mapping[str, Any], expected: Expected, answer: Answer) -> Ruling:
    """Compare the structure of one answer with that of torch's own answer.

    Args:
        task: the task.
        case: the case.
        args: the arguments of the call.
        expected: the reference's answers.
        answer: the answer to judge.

    Returns:
        The ruling.
    """
    count = len(expected.native)
    counts = {len(answer.outputs), len(answer.aliases), len(answer.shares)}
    if counts != {count} or answer.is_tuple != expected.is_tuple:
        want = f"a tuple of {count}" if expected.is_tuple else "one tensor"
        got = f"a tuple of {len(answer.outputs)}" if answer.is_tuple else "one tensor"
        return Ruling(False, f"returned {got}, expected {want}")
    grad = bool(case.args.get("requires_grad"))
    if "requires_grad" in task.signature.parameters and answer.grads is not None and set(answer.grads) != {grad}:
        return Ruling(False, f"the result has requires_grad={not grad}, asked for was {grad}")
    wrong = next((w for i in range(count) if (w := _wrong_output(task, case, expected, answer, i))), "")
    wrong = wrong or _wrong_argument(task, case, args, answer)
    return Ruling(False, wrong) if wrong else PASSED


def _wrong_output(task: Task, case: Case, expected: Expected, answer: Answer, i: int) -> str:
    """Return what is wrong with output ``i``; empty if nothing is."""
    got, want = answer.outputs[i], expected.native[i]
    if got.dtype != want.dtype:
        return f"output {i} has dtype {got.dtype}, expected {want.dtype}"
    if got.shape != want.shape:
        return f"output {i} has shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    changed = task.written(case.args)
    must = "out" if case.out and i == 0 else expected.aliases[i] if expected.aliases[i] in changed else None
    if not got.numel():
        return f"output {i} must be the tensor {must!r} itself" if must not in (None, answer.aliases[i]) else ""
    stride = answer.strides[i] if answer.strides is not None and i < len(answer.strides) else None
    if stride is not None and overlaps(got.shape, stride):
        return f"output {i} has elements that share memory (strides {stride}); a new tensor is expected"
    if stride is not None and task.moves and not case.out and not changed and not dense(got.shape, stride):
        return f"output {i} has strides {stride}; where moving values is the task it must be contiguous"
    if must is not None and answer.aliases[i] != must:
        return f"output {i} must be the tensor {must!r} itself"
    # Where torch itself returns an input or a view of one, a view and a copy are both right.
    if must is None and answer.shares[i] is not None and answer.shares[i] != expected.shares[i]:
        return f"output {i} shares memory with {answer.shares[i]!r}; a new tensor is expected"
    return ""


def _wrong_argument(task: Task, case: Case, args: Mapping[str, Any], answer: Answer) -> str:
    """Return what is wrong with the first argument that a call must not change; empty if nothing is."""
    changed = task.written(case.args)
    for name, value in args.items():
        if not isinstance(value, torch.Tensor):
            continue
        after = answer.after.get(name)
        if after is None or after.dtype != value.dtype or after.shape != value.shape:
            return f"the argument {name!r} has another dtype or shape after the call"
        if name not in changed and after is not value and not same_bits(after, value):
            return f"the input {name!r} was changed"
    return ""


class Row(NamedTuple):
    """One tensor to judge."""

    name: str
    """For messages."""
    got: torch.Tensor
    """The answer."""
    exact: torch.Tensor
    """The exact answer, in fp64."""
    native: torch.Tensor
    """Torch's own answer."""
    size: torch.Tensor | None = None
    """Size of each element where it is not the absolute value of ``exact``: both parts of a complex element have its
    modulus."""


def pairs(expected: Expected, answer: Answer) -> list[Row]:
    """Return the tensors to judge: every output and every tensor written in place, complex ones as pairs of reals.

    Args:
        expected: the reference's answers.
        answer: an answer that ``rule`` has passed.

    Returns:
        One row for each tensor.
    """
    triples = zip(answer.outputs, expected.outputs, expected.native, strict=True)
    rows = [_row(f"output {i}", *triple) for i, triple in enumerate(triples)]
    for name, truth in expected.written.items():
        rows.append(_row(f"{name} after the call", answer.after[name], truth, expected.native_written[name]))
    return rows


def _row(name: str, got: torch.Tensor, exact: torch.Tensor, native: torch.Tensor) -> Row:
    size = exact.abs().unsqueeze(-1) if exact.is_complex() else None
    return Row(name, real_view(got), real_view(exact), real_view(native), size)
