"""Gives cheap answers to every task: python eval/audit.py [--tasks GLOB] [--json FILE].

A cheap answer must not pass all cases of any task. The audit needs no GPU and runs no submission: answers are made from
the reference and go straight to the judge.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kbx_env.grading import inputs, judge, reference
from kbx_env.grading.judge.close import Measured
from kbx_env.grading.reference import Expected
from kbx_env.spec.catalog import load_task, load_tasks
from kbx_env.spec.criteria import Dropout, Sample
from kbx_env.spec.task import Case, Task

Args = Mapping[str, Any]
KINDS = (
    "zeros", "ones", "nan", "copy of an input", "previous output", "mean", "lower precision", "first half",
    "contiguous only",
)  # fmt: skip
LISTED: Mapping[tuple[str, str], str] = {
    (
        "math/signbit",
        "lower precision",
    ): "rounding keeps the sign: what reads fewer bits of a number reads its sign bit",
}
"""(task, kind) -> why that cheap answer is right by definition."""


def answer(
    task: Task, case: Case, args: Args, expected: Expected, make: Callable[[int, torch.Tensor], torch.Tensor]
) -> Any:
    """Return an answer that leaves the inputs unchanged.

    Args:
        task: the task.
        case: one of its cases.
        args: the inputs.
        expected: the right outputs.
        make: returns output i from i and the right output.

    Returns:
        The answer, as the judge takes it.
    """
    changed = task.written(case.args)
    after = {k: v for k, v in args.items() if isinstance(v, torch.Tensor)}
    outputs = tuple(make(i, o) for i, o in enumerate(expected.native))
    written = {n: make(len(outputs) + k, v) for k, (n, v) in enumerate(expected.native_written.items())}
    after = after | written
    aliases = tuple(
        "out" if case.out and i == 0 else a if a in changed else None for i, a in enumerate(expected.aliases)
    )
    outputs = tuple(after[a] if a in written else o for a, o in zip(aliases, outputs, strict=True))
    return judge.Answer(outputs, expected.is_tuple, after, aliases, aliases)


def _expect(task: Task, case: Case, args: Args) -> Expected:
    keep = True if isinstance(task.truth, Dropout) else None
    return reference.expect(task, case, args, keep=keep, exact=False, generator_seed=7)


def _low(x: torch.Tensor) -> torch.Tensor:
    """Round to the next lower precision: TF32 for fp32, fp32 for fp64, half of the mantissa bits for 16-bit types."""
    if x.is_complex():
        return torch.view_as_complex(_low(torch.view_as_real(x.resolve_conj())).contiguous())
    if x.dtype is torch.float64:
        return x.to(torch.float32).to(torch.float64)
    if x.dtype is torch.float32:
        bits = x.contiguous().view(torch.int32)
        return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)
    if x.dtype in reference.HALVES:
        bits = x.contiguous().view(torch.int16)
        return (bits & ~(0x1F if x.dtype is torch.float16 else 0x7)).view(x.dtype)
    return x


def _dense(x: torch.Tensor) -> torch.Tensor:
    """Return the values that a kernel reads if it takes a tensor's memory as dense."""
    if not x.numel() or x.is_contiguous():
        return x
    span = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    flat = x.as_strided((span,), (1,), x.storage_offset())
    if flat.numel() < x.numel():
        flat = flat.repeat(-(-x.numel() // flat.numel()))
    return flat[: x.numel()].view(x.shape)


_Make = Callable[[int, torch.Tensor], torch.Tensor]
"""Makes an output from its index and the right one."""


@dataclass(frozen=True)
class _Drawn:
    """A case with drawn inputs and the right outputs."""

    task: Task
    case: Case
    index: int
    args: Args
    expected: Expected
    known: judge.Known

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The arguments that are tensors."""
        return {k: v for k, v in self.args.items() if isinstance(v, torch.Tensor)}

    def with_inputs(self, changed: Args) -> Expected:
        """Return the right outputs for other inputs."""
        return _expect(self.task, self.case, {**self.args, **changed})


def _constant(value: float) -> _Make:
    return lambda i, o: torch.full_like(o, value)


def _outputs_of(other: Expected) -> _Make:
    """Answer with the right outputs for other inputs, with zeros where they do not fit."""
    every = [*other.native, *other.native_written.values()]
    return lambda i, o: every[i] if every[i].shape == o.shape and every[i].dtype == o.dtype else torch.zeros_like(o)


def _inexact(x: torch.Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _nan(d: _Drawn) -> list[_Make]:
    if not any(map(_inexact, d.expected.native)):
        return []
    return [lambda i, o: torch.full_like(o, float("nan") if _inexact(o) else 0)]


def _means(d: _Drawn) -> list[_Make]:
    # The mean of a single number would be the right answer.
    if not any(o.numel() > 1 for o in d.expected.native):
        return []
    return [lambda i, o: _mean(o) if o.numel() > 1 else torch.zeros_like(o)]


def _previous(d: _Drawn) -> list[_Make]:
    return [_outputs_of(_expect(d.task, d.case, inputs.draw(d.task, d.case, 5000 + d.index)))] if d.tensors else []


def _lower_precision(d: _Drawn) -> list[_Make]:
    if not any(map(_inexact, d.tensors.values())):
        return []
    try:
        low = _outputs_of(d.with_inputs({k: _low(v) for k, v in d.tensors.items()}))
    except RuntimeError:  # torch.linalg refuses the rounded matrix
        return [_constant(0.0)]
    return [lambda i, o: _low(low(i, o))]


def _first_half(d: _Drawn) -> list[_Make]:
    right = _outputs_of(d.expected)
    return [lambda i, o: _half(right(i, o))]


def _contiguous_only(d: _Drawn) -> list[_Make]:
    tensors = d.tensors
    if not tensors:
        return []
    if all(v.is_contiguous() for v in tensors.values()):
        return [_outputs_of(d.expected)]
    dense = {k: _dense(v) for k, v in tensors.items()}
    # The memory between strided elements is NaN, which LAPACK does not survive, or an index out of range.
    if not any(bool(v.isnan().any()) for k, v in dense.items() if not bool(tensors[k].isnan().any())):
        try:
            return [_outputs_of(d.with_inputs(dense))]
        except (RuntimeError, IndexError):
            pass
    return [_constant(0.0)]


_MAKERS: Mapping[str, Callable[[_Drawn], list[_Make]]] = {
    "zeros": lambda d: [_constant(0.0)], "ones": lambda d: [_constant(1.0)], "nan": _nan, "mean": _means,
    "copy of an input": lambda d: [functools.partial(_copied, v) for v in d.tensors.values()],
    "previous output": _previous, "lower precision": _lower_precision, "first half": _first_half,
    "contiguous only": _contiguous_only,
}  # fmt: skip
"""Kind of cheap answer -> the answers of that kind for a case, none where the kind makes no sense."""


def draw(task: Task, index: int) -> _Drawn:
    """Draw the inputs of a case, and compute the right outputs.

    Args:
        task: the task.
        index: of the case; it seeds the inputs.

    Returns:
        The same for every call, so that one draw serves all kinds.
    """
    case = task.cases[index]
    args = inputs.draw(task, case, 1000 + index)
    return _Drawn(task, case, index, args, _expect(task, case, args), judge.Known(measured=Measured()))


def cheap(drawn: _Drawn, kind: str) -> Iterator[Any]:
    """Yield cheap answers of a kind for one case, none where the kind makes no sense.

    Args:
        drawn: the case.
        kind: one of ``KINDS``.

    Yields:
        The answers.
    """
    for make in _MAKERS[kind](drawn):
        yield answer(drawn.task, drawn.case, drawn.args, drawn.expected, make)


def _copied(v: torch.Tensor, i: int, o: torch.Tensor) -> torch.Tensor:
    return v.clone() if (v.dtype, v.shape) == (o.dtype, o.shape) else torch.zeros_like(o)


def _mean(o: torch.Tensor) -> torch.Tensor:
    if o.is_floating_point() or o.is_complex():
        finite = o[torch.isfinite(o)]
        return torch.full_like(o, finite.mean().item() if finite.numel() else 0.0)
    return torch.full_like(o, round(float(o.to(torch.float64).mean())))


def _half(o: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(o).reshape(-1)
    n = (o.numel() + 1) // 2
    out[:n] = o.reshape(-1)[:n]
    # A single element has no second half; zero is then the wrong answer.
    return out.view(o.shape) if o.numel() > 1 else torch.zeros_like(o)


def passes(task: Task, kind: str, drawn: dict[int, _Drawn] | None = None) -> bool:
    """Return whether a cheap answer of a kind is right in every case in which it makes sense.

    Args:
        task: the task.
        kind: one of ``KINDS``.
        drawn: cases that were drawn for other kinds, by index; the others are added.
    """
    drawn = {} if drawn is None else drawn
    alive: dict[int, bool] = {}
    looked = False
    order = sorted(range(len(task.cases)), key=lambda i: bool(task.cases[i].args or task.cases[i].layouts))
    for index in order:
        if index not in drawn:
            drawn[index] = draw(task, index)
        for k, made in enumerate(cheap(drawn[index], kind)):
            if alive.get(k, True):
                looked = True
                alive[k] = _right(drawn[index], made)
        if alive and not any(alive.values()):
            return False
    return looked and any(alive.values())


def _right(drawn: _Drawn, made: Any) -> bool:
    try:
        answers = [made] * judge.calls_needed(drawn.task, drawn.case)
        return judge.judge(drawn.task, drawn.case, drawn.args, answers, timed=False, known=drawn.known).passed
    except RuntimeError:  # a factor with which no library can compute on is wrong
        return False


def audit(task_id: str) -> list[str]:
    """Return the kinds of cheap answers that pass a task and are not listed."""
    return kinds_that_pass(load_task(task_id))


def kinds_that_pass(task: Task) -> list[str]:
    """Return the kinds of cheap answers that pass a task and are not listed."""
    if isinstance(task.truth, Sample):
        task = replace(task, cases=tuple(c for c in task.cases if c.axes))
    drawn: dict[int, _Drawn] = {}
    return [k for k in KINDS if (task.id, k) not in LISTED and passes(task, k, drawn)]


def main() -> int:
    """Print each task that a cheap answer passes, and the totals; return exit status 1 if there is one."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    p.add_argument("--tasks", default="*", help="glob over task ids")
    p.add_argument("--json", type=Path)
    a = p.parse_args()
    torch.set_num_threads(1)
    found = {t.id: audit(t.id) for t in load_tasks(pattern=a.tasks)}
    for t, kinds in found.items():
        if kinds:
            print(f"{t}: {', '.join(kinds)}")
    print(f"{len(found)} tasks, {len(KINDS)} kinds of cheap answers: {sum(map(len, found.values()))} pass")
    if a.json:
        a.json.write_text(json.dumps(found, indent=1))
    return 1 if any(found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
