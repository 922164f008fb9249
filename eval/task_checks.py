"""Checks one task as the tests check the benchmark's own: contract, cases, floors, cheap answers, and its expert.

``kbx check-pack`` shows the faults of a whole pack, and the generator drops a task that has one.
"""

from __future__ import annotations

import inspect
import math
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from kbx_env.eval import audit

from kbx_env.errors import DeclarationError, KbxError
from kbx_env.grading import compulsory_work, derived_cases, inputs, reference, sizes
from kbx_env.outcome import Outcome
from kbx_env.protocol.wire import DTYPES, assembled
from kbx_env.spec.catalog import expert_source
from kbx_env.spec.criteria import Sample
from kbx_env.spec.input_distributions import Constant, Linspace, Literal
from kbx_env.spec.task import Case, Task

TIMED = 3
"""Least number of timed sizes of a task."""
FOOTPRINT = 16 << 30
"""Most bytes of the tensors of a timed call."""
RTOL, ATOL = 1e-3, 1e-5
"""Tolerances of the numbers that an example of a contract shows."""
SURE = 1000
"""Elements of a tensor that is written in place, of which some surely change."""
Grade = Callable[..., Outcome]
"""Grades a source, as ``Grader.grade``."""


def examples(spec: str) -> list[str]:
    """Return the examples of a contract: what follows ``Example:``, each on one line."""
    return [" ".join(e.split()) for e in re.findall(r"^Example: (.*?)(?=\nExample: |\n\n|\Z)", spec, re.S | re.M)]


def call(task: Task, text: str, exact: bool = False) -> tuple[Any, str]:
    """Run an example of a contract.

    Args:
        task: the task.
        text: from ``examples``, such as ``f([1, 2], dim=0) = [...]``.
        exact: compute 16-bit floating point in fp64: an example shows the exact numbers.

    Returns:
        What the reference returns for the call on the left, and the text on the right.
    """
    left, right = text.split(") = ")
    bound: dict[str, Any] = {}
    names = {"torch": torch, "inf": math.inf, "nan": math.nan, "__builtins__": {}}

    def take(*args: Any, **kwargs: Any) -> None:
        bound.update(task.signature.bind(*args, **kwargs).arguments)

    eval(f"{task.entry}{left[left.index('(') :]})", {**names, task.entry: take})
    for name, value in bound.items():
        if f"{name}.0" in task.takes:
            bound[name] = [torch.tensor(v, dtype=DTYPES[task.takes[f"{name}.0"].dtype]) for v in value]
        if name in task.takes and isinstance(value, list | int | float | complex | bool):
            dtype = DTYPES[task.takes[name].dtype]
            if dtype.is_floating_point and torch.tensor(value).is_complex():
                dtype = torch.complex64
            if exact and dtype in reference.HALVES:
                dtype = torch.float64
            bound[name] = torch.tensor(value, dtype=dtype)
    return task.reference(**bound), right


def _signature(task: Task) -> Iterator[str]:
    """Yield faults of the signature and of what the contract says about it."""
    text = " ".join(task.spec.split())
    for name, p in task.signature.parameters.items():
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            yield f"signature: {p} stands for any number of arguments; name every parameter"
        elif not re.search(rf"\b{re.escape(name)}\b", text):
            yield f"contract: it does not mention the parameter {name}"
        elif p.default is None and not re.search(rf"\b{name}\b[^.;]*\bNone\b|\bNone\b[^.;]*\b{name}\b", text):
            yield f"contract: it does not say what {name}=None means"
        if p.default is p.empty and name not in task.takes and f"{name}.0" not in task.takes:
            if any(name not in c.args for c in task.cases):
                yield f"cases: {name} has no default, and some case does not pass it"


def _examples(task: Task) -> Iterator[str]:
    """Yield examples that are missing, cannot be run, or are not what the reference returns."""
    found = examples(task.spec)
    if not found and not isinstance(task.truth, Sample):
        yield f"contract: it has no line 'Example: {task.entry}(...) = ...'"
    for text in found:
        try:
            got, shown = call(task, text, exact=True)
            want = eval(shown, {"__builtins__": {}, "inf": math.inf, "nan": math.nan})
        except Exception as e:
            yield f"example {text!r}: it cannot be run: {type(e).__name__}: {e}"
            continue
        pairs = list(zip(got, want)) if isinstance(got, tuple | list) else [(got, want)]
        for mine, theirs in pairs:
            expected = torch.tensor(theirs)
            kind = torch.complex128 if mine.is_complex() or expected.is_complex() else torch.float64
            close = mine.shape == expected.shape and torch.allclose(
                mine.to(kind), expected.to(kind), rtol=RTOL, atol=ATOL, equal_nan=True
            )
            if not close:
                yield f"example {text!r}: the reference returns {mine.tolist()}"
                break


def _parameters(task: Task) -> Iterator[str]:
    """Yield parameters that no case uses away from their defaults."""
    for name, p in task.signature.parameters.items():
        if name == "out":
            if not any(c.out for c in task.cases):
                yield "cases: none passes out="
        elif name in task.takes:
            if task.takes[name].optional and len({name in c.given for c in task.cases}) < 2:
                yield f"cases: some must pass {name}, and some leave it out"
        elif p.default is not inspect.Parameter.empty:
            used = [c.args[name] for c in task.cases if name in c.args]
            if all(v == p.default and type(v) is type(p.default) for v in used):
                yield f"cases: none passes {name} away from its default {p.default!r}"


def _cases(task: Task) -> Iterator[str]:
    """Yield faults of the lists of cases."""
    yield from _parameters(task)
    if task.takes and not any(c.layouts for c in task.cases):
        yield "cases: every input is contiguous; give one a layout, such as layouts={'input': 'transposed'}"
    known = (Literal, Linspace, Constant)
    if task.takes and all(isinstance(_law(task, c, n), known) for c in task.cases for n in task.takes):
        yield "cases: the values of all inputs are public; draw some at random"
    if len(task.timed) < TIMED:
        yield f"timed: {len(task.timed)} sizes; at least {TIMED}"
    for case in task.timed:
        if (size := 2 * compulsory_work.input_bytes(task, case)) > FOOTPRINT:
            yield f"timed: {case.label()} needs {size / 2**30:.0f} GiB; at most {FOOTPRINT >> 30}"
    if not task.varied:
        yield "varied: no family of derived cases; a policy could learn the list of cases"
    try:
        if task.timed:
            sizes.held_out(task)
    except DeclarationError as e:
        yield f"held_timed: {e}"


def _law(task: Task, case: Case, name: str) -> Any:
    return case.draws.get(name) or task.takes[name].draw or case.draw


def _runs(task: Task) -> Iterator[str]:
    """Yield cases that the reference cannot compute in its own dtypes and in fp64, and floors that cannot be evaluated."""
    secret = b"check"
    derived: list[Case] = []
    try:
        derived = derived_cases.derive(task, secret, "eval")
    except Exception as e:
        yield f"varied: {type(e).__name__}: {e}"
    for index, case in enumerate((*task.cases, *derived)):
        try:
            args = inputs.draw(task, case, index)
            expected = reference.expect(task, case, args, keep=True, generator_seed=7)
        except Exception as e:
            yield f"case {case.label()!r}: the reference fails (it also runs in fp64): {type(e).__name__}: {e}"
            continue
        yield from _untouched(task, case, args)
        for exact, own in zip(expected.outputs, expected.native, strict=True):
            if exact.is_floating_point() and exact.dtype is not torch.float64 and own.is_floating_point():
                yield f"case {case.label()!r}: in fp64 the reference returns {exact.dtype}; it must not fix a dtype"
        try:
            floor = compulsory_work.ideal_bytes(task, case, args, expected)
            work = compulsory_work.flops(task, case, args)
        except Exception as e:
            yield f"cost, case {case.label()!r}: {type(e).__name__}: {e}"
            continue
        # Of few elements written in place, chance may have left all as they were.
        least = min((o.numel() for o in expected.native), default=0)
        if floor <= 0 and least >= (SURE if task.writes else 1):
            yield f"cost, case {case.label()!r}: the floor is {floor} bytes, but there are results"
        if work < 0:
            yield f"cost, case {case.label()!r}: {work} operations"


def _untouched(task: Task, case: Case, args: dict[str, Any]) -> Iterator[str]:
    """Yield tensors that the reference changes although ``writes`` does not name them."""
    if isinstance(task.truth, Sample):
        return
    mine = reference.resolve(args, "cpu")
    with reference.exact_matmul(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        task.reference(**assembled(mine))
    for name, value in args.items():
        if isinstance(value, torch.Tensor) and name not in task.written(case.args) and name != "out":
            if not torch.equal(mine[name].nan_to_num(), value.nan_to_num()):
                yield f"case {case.label()!r}: the reference changes {name}, which writes= does not name"


def _audit(task: Task) -> Iterator[str]:
    """Yield kinds of cheap answers that pass."""
    for kind in audit.kinds_that_pass(task):
        yield f"cheap answers: {kind!r} passes every case"


def _expert(task: Task, grade: Grade, gradings: int) -> Iterator[str]:
    """Yield why the expert is not paid."""
    source = expert_source(task.id)
    if source is None:
        return
    for _ in range(gradings):
        outcome = grade(task.id, source, backend="cpu", targets=(), timing=False)
        evidence = outcome.evidence
        if not outcome.correct:
            where = next((f"{f.case}: {f.reason}" for f in outcome.cases.failures), "") if outcome.cases else ""
            rules = "; ".join(f"{v.rule}: {v.detail}" for v in outcome.violations)
            yield f"expert: {outcome.verdict} at {outcome.stage}: {rules or where or outcome.message}"
            return
        if evidence is None or (evidence.launches or 0) < 1:
            yield "expert: it launches no kernel"
        elif evidence.findings:
            yield f"expert: {evidence.findings[0].text}"
        elif (evidence.ideal_bytes or 0) > (evidence.moved_bytes or 0):
            yield f"cost: the floor is {evidence.ideal_bytes} bytes, but the correct expert moved {evidence.moved_bytes}"
        else:
            continue
        return


def faults(task: Task, grade: Grade | None = None, gradings: int = 1) -> list[str]:
    """Check a task.

    Args:
        task: the task.
        grade: grades the expert, as ``Grader.grade``; ``None`` to leave that out.
        gradings: fresh gradings of the expert, each with new hidden inputs.

    Returns:
        One line for each fault; empty for a sound task. An expert that does not exist is no fault.
    """
    found: list[str] = []
    for check in (_signature, _examples, _cases, _runs):
        found += check(task)
    if found:  # the audit and the grader would report the same again
        return found
    try:
        found += _audit(task)
        if not found and grade is not None:
            found += _expert(task, grade, gradings)
    except KbxError as e:
        found.append(f"{type(e).__name__}: {e}")
    return found

