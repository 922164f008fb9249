"""The derived cases of one grading: one of each family that a task declares (``spec/varied.py``), in random layouts.

They are part of the grading by contract only. The secret of the grading decides them, so that a seed repeats them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from kbx_env.errors import DeclarationError
from kbx_env.grading import inputs
from kbx_env.grading import judge as judges
from kbx_env.spec.task import Case, Task, shape_of
from kbx_env.spec.varied import Family, Pick

ATTEMPTS = 50
"""Draws of a case whose sizes are not those of a held-out case; the first draw nearly always qualifies."""


def derive(task: Task, secret: bytes, split: str) -> list[Case]:
    """Draw one case of each family.

    Args:
        task: the task.
        secret: of the grading; equal secrets give equal cases.
        split: ``train`` or ``eval``. In ``train`` no case has the sizes of a held-out one.

    Returns:
        The cases, in the order of ``task.varied``.

    Raises:
        DeclarationError: a family draws nothing but sizes of held-out cases, or names what the task lacks.
    """
    held = [dict(c.axes) for c in task.cases if c.held and c.axes] if split == "train" else []
    return [_drawn(task, family, k, secret, split, held) for k, family in enumerate(task.varied)]


def _drawn(
    task: Task, family: Family, number: int, secret: bytes, split: str, held: Sequence[dict[str, object]]
) -> Case:  # fmt: skip
    """Draw a case of one family; arguments as for ``derive``."""
    for attempt in range(ATTEMPTS):
        seed = inputs.case_seed(secret, task.id, f"{split} derived", number, attempt)
        pick = Pick(seed, task.cases)
        case = family(pick)
        if dict(case.axes) not in held:
            return laid_out(task, case, pick)
    raise DeclarationError(f"{task.id}: family {number} of varied draws the sizes of held-out cases only")


def laid_out(task: Task, case: Case, pick: Pick) -> Case:
    """Return a case with a random layout for every tensor that has none yet, and for ``out``.

    Args:
        task: the task.
        case: the case; a layout that it declares stays.
        pick: makes the choices.

    Returns:
        The case.

    Raises:
        DeclarationError: the case names a tensor, argument or layout that the task lacks.
    """
    params = task.signature.parameters
    for key in {*case.draws, *case.dtypes, *case.given} - set(task.takes):
        raise DeclarationError(f"{task.id}: case {case.label()!r} names {key!r}; tensors: {', '.join(task.takes)}")
    for key in set(case.args) - set(params):
        raise DeclarationError(f"{task.id}: case {case.label()!r} passes {key!r}; parameters: {', '.join(params)}")
    layouts = dict(case.layouts)
    passed = [n for n, t in task.takes.items() if n not in case.args and (not t.optional or n in case.given)]
    for name in passed:
        if name not in layouts and (found := pick.layout(len(shape_of(task.takes[name], case.axes)))):
            layouts[name] = found
    # Declared cases have contiguous inputs, so not all of a derived case are contiguous.
    ranks = {n: len(shape_of(task.takes[n], case.axes)) for n in passed}
    if not layouts and any(ranks.values()):
        name = pick.among(*(n for n, rank in ranks.items() if rank))
        layouts[name] = str(pick.layout(ranks[name], contiguous=0.0))
    if case.out and "out" not in layouts and not contiguous_out(task):
        # The rank of the result follows from the inputs; the reference gives it.
        rank = judges.result_rank(task, case, inputs.draw(task, case, 1))
        if found := pick.layout(rank):
            layouts["out"] = found
    return replace(case, layouts=layouts)


def contiguous_out(task: Task) -> bool:
    """Return whether the contract says that ``out`` is contiguous; where it is silent, ``out`` may have any strides."""
    sentences = re.split(r"[.;](?:\s|$)", " ".join(task.spec.split()))
    return any(re.search(r"\bout\b", s) and "contiguous" in s and "non-contiguous" not in s for s in sentences)


def is_telling(task: Task, case: Case) -> bool:
    """Return whether no constant and no copy of an input would be right in a derived case, as the judge sees it.

    Random sizes and arguments make some cases trivial: a deviation over one element, an integer that is rounded.
    """
    return not judges.is_trivial(task, case, inputs.draw(task, case, 2**32))
