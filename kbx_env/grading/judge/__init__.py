"""One judge per kind of truth, matched by type. Everything that comes in is a claim; input values never leak out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kbx_env.errors import DeclarationError
from kbx_env.grading import reference
from kbx_env.grading.judge import close, contract, exact, invariant, paper, statistical, structure
from kbx_env.grading.judge.ruling import Answer, Ruling
from kbx_env.task import Case, Task
from kbx_env.truth import Close, Contract, Dropout, Exact, Invariant, Sample

__all__ = ["Answer", "Ruling", "calls_needed", "is_trivial", "judge"]


def calls_needed(task: Task, case: Case) -> int:
    """Calls on the same inputs that the judge must see."""
    if isinstance(task.truth, Sample):
        return 3 if task.truth.generator in case.args else 2
    return 2 if isinstance(task.truth, Dropout) and statistical.rate_of(task, case)[1] else 1


def judge(
    task: Task,
    case: Case,
    args: Mapping[str, Any],
    answers: Sequence[Answer],
    *,
    grading: str = "contract",
    device: str = "cpu",
    generator_seeds: Sequence[int] = (),
    timed: bool = False,
) -> Ruling:
    """Rule on the answers of one case.

    Args:
        task: the task.
        case: the case.
        args: what was sent (never what the runner says it received).
        answers: one per call, ``calls_needed`` of them.
        grading: ``contract`` or ``paper``.
        device: where the reference is evaluated.
        generator_seeds: the seed of the generator argument of each call.
        timed: one answer repeated; statistical comparisons between calls are left out.
    """
    if not answers:
        raise DeclarationError("no answers to judge")
    if grading == "paper":
        return paper.rule(task, reference.expect(task, case, args, device), answers[0])
    truth = task.truth
    if isinstance(truth, Sample):
        return statistical.rule_sample(truth, task, case, args, answers, timed=timed)
    expected = reference.expect(task, case, args, device, keep=True if isinstance(truth, Dropout) else None)
    for answer in answers:
        ruling = structure.rule(task, case, args, expected, answer)
        if not ruling.passed:
            return ruling
    match truth:
        case Close():
            return close.rule(truth, expected, answers[0])
        case Exact():
            return exact.rule(expected, answers[0])
        case Invariant():
            return invariant.rule(truth, case, args, expected, answers[0])
        case Dropout():
            return statistical.rule_dropout(truth, task, case, args, expected, answers, device, timed=timed)
        case Contract():
            return contract.rule(truth, task, case, args, answers[0], device)
    raise DeclarationError(f"no judge for {type(truth).__name__}")


def is_trivial(task: Task, case: Case, args: Mapping[str, Any]) -> bool:
    """Whether zeros, ones or an untouched argument would be right here, so that a pass proves nothing."""
    if isinstance(task.truth, Sample):
        return False
    expected = reference.expect(task, case, args, "cpu", keep=True if isinstance(task.truth, Dropout) else None)
    if all(o.numel() == 0 for o in expected.native):
        return True
    if isinstance(task.truth, Dropout) and statistical.rate_of(task, case)[0] >= 1.0:
        return True
    untouched = {k: v for k, v in args.items() if isinstance(v, torch.Tensor)}
    for fill in (0, 1):
        blank = [torch.full_like(o, fill) for o in expected.native]
        outputs = [untouched[a] if a in untouched else b for a, b in zip(expected.aliases, blank, strict=True)]
        answer = Answer(tuple(outputs), expected.is_tuple, untouched, expected.aliases, expected.aliases)
        if judge(task, case, args, [answer] * calls_needed(task, case), timed=True).passed:
            return True
    return False
