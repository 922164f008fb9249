"""The derived cases of one grading: one of each family that a task declares (``spec/varied.py``), in random layouts.

They are part of the grading by contract only. The secret of the grading decides them, so that a seed repeats them.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kbx_env.errors import DeclarationError
from kbx_env.grading import inputs
from kbx_env.grading import judge as judges
from kbx_env.spec.input_distributions import Distribution, Normal, Outlier
from kbx_env.spec.task import Case, Task, shape_of
from kbx_env.spec.varied import Pick, contiguous, parsed, reshapable

ATTEMPTS = 50
"""Draws of a case whose sizes are not those of a held-out case; the first draw nearly always qualifies."""
REDRAWS = 40
"""Further draws of each family; one of them takes the place of the first where more parameters then have a new value. If one
draw in eight has such a value, 199 of 200 gradings do."""
ALIKE = 0.3
"""Share of the cases in which tensors with equally many axes have one layout."""
NEAR_ZERO_SHARE, NEAR_ZERO = 1 / 8, 2.0**-14
"""Share of the elements of normal numbers around zero that are smaller by a factor, and the factor."""
BLOCK = 1024
"""Elements that one program of a simple kernel handles: in a smaller case no kernel can leave out its last block."""
MANY_AXES = 3
"""Axes from which on their order in memory is a promise of its own."""


def derive(task: Task, secret: bytes, split: str) -> list[Case]:
    """Draw one case of each family, so that arguments have values that no declared case has.

    One in eight normal numbers is near zero. In one case all tensors are contiguous: otherwise a kernel could
    tell declared cases, whose shapes can be learned, from derived ones by their strides.

    Args:
        task: the task.
        secret: of the grading; equal secrets give equal cases.
        split: ``train`` or ``eval``. In ``train`` no case has the sizes of a held-out one.

    Returns:
        The cases, in the order of ``task.varied``. Where no large one of them can spare its layouts, one more case follows.

    Raises:
        DeclarationError: a family draws nothing but sizes of held-out cases, or names what the task lacks.
    """
    held = [dict(c.axes) for c in task.cases if c.held and c.axes] if split == "train" else []
    bases = reshapable(task.cases)
    seeds = [_seeds(task, bases, k, secret, split) for k in range(len(task.varied))]
    drawn = [_drawn(task, k, seeds[k], held) for k in range(len(task.varied))]
    known = _declared_values(task)
    # A flag of which both values are declared can have no new one.
    settable = {name for name, values in known.items() if name not in task.takes and not {"True", "False"} <= values}
    for k, family in enumerate(task.varied):
        elsewhere = set().union(*(_new_values(known, case) for case, _ in (*drawn[:k], *drawn[k + 1 :])))
        found = elsewhere | _new_values(known, drawn[k][0])
        for pick in itertools.islice(seeds[k], 0 if found >= settable else REDRAWS):
            case = family(pick)
            more = elsewhere | _new_values(known, case)
            if more > found and dict(case.axes) not in held:
                drawn[k], found = (case, pick), more
                if found >= settable:
                    break
    drawn = [(_some_near_zero(case), pick) for case, pick in drawn]
    cases = [laid_out(task, case, pick, alike=pick.chance(ALIKE)) for case, pick in drawn]
    pick = Pick(inputs.case_seed(secret, task.id, f"{split} contiguous", 0, 0))
    free = [k for k, (case, _) in enumerate(drawn) if not case.layouts and task.takes]
    large = [k for k in free if drawn[k][0].elements() > BLOCK]
    if spare := [k for k in large or free if _can_spare(task, cases, k)]:
        k = pick.among(*_large([case for case, _ in drawn], spare))
        cases[k] = replace(cases[k], layouts={})
    elif free:
        k = pick.among(*_large([case for case, _ in drawn], free))
        first, *others = (_drawn(task, k, seeds[k], held)[0] for _ in range(REDRAWS))
        cases.append(next((case for case in (first, *others) if _ends_in_block(case)), first))
    return cases


def _ends_in_block(case: Case) -> bool:
    """Return whether a case is larger than a block of a kernel, and ends within one."""
    return case.elements() > BLOCK and case.elements() % 16 > 0


def _large(cases: Sequence[Case], numbers: Sequence[int]) -> list[int]:
    """Return those of some cases that are larger than a block of a kernel; the largest, if none is."""
    return [k for k in numbers if cases[k].elements() > BLOCK] or [max(numbers, key=lambda k: cases[k].elements())]


def _some_near_zero(case: Case) -> Case:
    """Return a case in which some normal numbers are near zero: a kernel that takes small numbers for zero is wrong there."""

    def mixed(draw: Distribution) -> Distribution:
        if isinstance(draw, Normal) and draw.mean == 0 and draw.clamp is None:
            return Outlier(NEAR_ZERO_SHARE, NEAR_ZERO, base=draw.scale)
        return draw

    return replace(case, draw=mixed(case.draw), draws={name: mixed(draw) for name, draw in case.draws.items()})


def _can_spare(task: Task, cases: Sequence[Case], number: int) -> bool:
    """Return whether other cases lay out every tensor that a case lays out, with as many axes (up to ``MANY_AXES``)."""

    def axes(case: Case, name: str) -> int:
        found = parsed(case.layouts[name])
        return min(MANY_AXES, len(found[0])) if found is not None else 0

    case, others = cases[number], [*cases[:number], *cases[number + 1 :]]
    written = task.written(case.args)
    return all(
        any(
            name in c.layouts and axes(c, name) >= axes(case, name) and (name not in written or name in task.written(c.args))
            for c in others
        )
        for name in case.layouts
    )  # fmt: skip


def _seeds(task: Task, cases: Sequence[Case], number: int, secret: bytes, split: str) -> Iterator[Pick]:
    """Yield sources of choices for one family; ``cases`` may be reshaped."""
    for attempt in itertools.count():
        yield Pick(inputs.case_seed(secret, task.id, f"{split} derived", number, attempt), cases)


def _drawn(
    task: Task, number: int, picks: Iterator[Pick], held: Sequence[Mapping[str, object]]
) -> tuple[Case, Pick]:  # fmt: skip
    """Draw a case of one family, whose sizes are not those of a held-out case."""
    for pick in itertools.islice(picks, ATTEMPTS):
        case = task.varied[number](pick)
        if dict(case.axes) not in held:
            return case, pick
    raise DeclarationError(f"{task.id}: family {number} of varied draws the sizes of held-out cases only")


def _declared_values(task: Task) -> dict[str, set[str]]:
    """Return the values that declared cases pass for each parameter, and its default."""
    return {
        name: {repr(p.default)} | {repr(c.args[name]) for c in task.cases if name in c.args}
        for name, p in task.signature.parameters.items()
    }  # fmt: skip


def _new_values(known: Mapping[str, set[str]], case: Case) -> set[str]:
    """Return the parameters for which a case passes a value that no declared case passes."""
    return {name for name, value in case.args.items() if name in known and repr(value) not in known[name]}


def laid_out(task: Task, case: Case, pick: Pick, alike: bool = False) -> Case:
    """Return a case with a random layout for every tensor that has none yet, and for ``out``.

    Args:
        task: the task.
        case: the case; a layout that it declares stays.
        pick: makes the choices.
        alike: give one layout to all tensors with equally many axes: kernels that find equal strides take other paths.

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
    shapes = {
        n: shape_of(t, case.axes)
        for n, t in task.takes.items() if n not in case.args and (not t.optional or n in case.given)
    }  # fmt: skip
    common: dict[int, str] = {}

    def lay(name: str, shape: tuple[int, ...]) -> None:
        shared = common.get(len(shape)) if alike else None
        if shared is not None and not contiguous(shape, *(parsed(shared) or ())):
            layouts[name] = shared
        elif found := pick.layout(shape):
            layouts[name] = common[len(shape)] = found

    for name, shape in shapes.items():
        if name not in layouts:
            lay(name, shape)
    if case.out and "out" not in layouts and not contiguous_out(task):
        # The shape of the result follows from the inputs; the reference gives it.
        lay("out", judges.result_shape(task, case, inputs.draw(task, case, 1)))
    return replace(case, layouts=layouts)


def contiguous_out(task: Task) -> bool:
    """Return whether the contract says that ``out`` is contiguous; where it is silent, ``out`` may have any strides."""
    sentences = re.split(r"[.;](?:\s|$)", " ".join(task.spec.split()))
    return any(re.search(r"\bout\b", s) and "contiguous" in s and "non-contiguous" not in s for s in sentences)


def is_telling(task: Task, case: Case, args: Mapping[str, Any] | None = None, known: judges.Known | None = None) -> bool:
    """Return whether no constant and no copy of an input would be right in a derived case, as the judge sees it.

    Random sizes and arguments make some cases trivial: a deviation over one element, an integer that is rounded.

    Args:
        task: the task.
        case: the case.
        args: the arguments of the call; by default some are drawn.
        known: receives what was found about the call, for the ruling on its answer.
    """
    args = inputs.draw(task, case, 2**32) if args is None else args
    return not judges.is_trivial(task, case, args, known)
