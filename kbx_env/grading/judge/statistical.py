"""Judges dropout: kept and dropped values must be right, and masks must look random. Any random stream is accepted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kbx_env.grading import reference
from kbx_env.grading.judge import close, randomness
from kbx_env.grading.judge.randomness import Line
from kbx_env.grading.judge.ruling import PASSED, Answer, Ruling
from kbx_env.grading.judge.structure import pairs
from kbx_env.grading.reference import Expected
from kbx_env.spec.criteria import Dropout
from kbx_env.spec.task import Case, Task


def rate_of(task: Task, case: Case) -> tuple[float, bool]:
    """Return the drop probability of a case, and whether anything is random in it."""
    truth = task.truth
    assert isinstance(truth, Dropout)
    bound = {n: p.default for n, p in task.signature.parameters.items()} | dict(case.args)
    p = float(bound[truth.rate])
    return p, (truth.active is None or bool(bound[truth.active])) and 0.0 < p < 1.0


def _patterned(mask: torch.Tensor, clear: torch.Tensor, q: float) -> str | None:
    """Find structure in a mask: rows, columns, periods, reflections, groups.

    Args:
        mask: True where an element was kept.
        clear: True where the mask is known.
        q: keep probability.

    Returns:
        The structure; ``None`` if there is none.
    """
    line = _line(mask, clear, q)
    if mask.dim() >= 2:
        shaped, known = line.values.view(mask.shape), clear.to(torch.float64)
        for axis, name in ((-1, "rows"), (-2, "columns")):
            found = randomness.uneven(shaped.sum(axis).flatten(), known.sum(axis).flatten(), line)
            if found:
                return f"{name} are dropped {found}"
        found = randomness.transposed(shaped, shaped, line, own=True)
        if found:
            return f"elements go together {found}"
    found = randomness.patterned(line)
    if found is None and line.known is None and abs(q - 0.5) < 1e-6:
        bits, periods = randomness.draw_matrices(mask.flatten(), randomness.seed_of(line.values))
        found = randomness.dependent(bits.cpu().numpy(), periods)
    return found


def _line(mask: torch.Tensor, clear: torch.Tensor, q: float) -> Line:
    """Return a mask minus its mean as a line, 0 where it is not known; arguments as for ``_patterned``."""
    values = torch.where(clear, mask.to(torch.float64) - q, 0.0).flatten()
    return Line(values, q * (1 - q), max(q, 1 - q), None if bool(clear.all()) else clear.flatten())


def _mask_of(
    truth: Dropout, kept: Expected, dropped: Expected, answer: Answer, slack: Sequence[torch.Tensor] = (),
    grown: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor] | Ruling:  # fmt: skip
    """Read the mask off an answer.

    Args:
        truth: the criterion.
        kept: the reference's answers with all elements kept.
        dropped: the reference's answers with all elements dropped.
        answer: the answer to judge.
        slack: conditioning of each result, from ``reference.Perturbations``; empty for none.
        grown: from ``close.growth``.

    Returns:
        The mask of output 0 and where it is known, both boolean; or a ruling if an element is neither kept nor dropped.
    """
    found: tuple[torch.Tensor, torch.Tensor] | None = None
    for i, (high, low) in enumerate(zip(pairs(kept, answer), pairs(dropped, answer), strict=True)):
        got = high.got
        if not got.dtype.is_floating_point:
            continue
        extra: torch.Tensor | float = 0.0
        if slack:
            extra = close.loosen(truth.close, slack[i], high.exact.to(torch.float64), got.dtype, grown)
        to_kept, _ = close.misses(truth.close, got, high.exact, high.native, extra)
        to_dropped, _ = close.misses(truth.close, got, low.exact, low.native)
        best = torch.minimum(to_kept, to_dropped)
        if bool((best > 1.0).any()):
            return close.describe(f"{high.name} (neither the kept nor the dropped value)", best, best > 1.0, got)
        # A value determines the mask only where kept and dropped values are far apart; this is the same for every mask.
        apart, _ = close.misses(truth.close, low.exact.to(got.dtype), high.exact, high.native, extra)
        mask, clear = to_kept <= to_dropped, apart > 4.0
        if found is None:
            found = mask, clear
        elif mask.shape == found[0].shape and bool(((mask != found[0]) & clear & found[1]).any()):
            return Ruling(False, f"{high.name} was dropped at other places than output 0")
    return found if found is not None else (torch.zeros(0, dtype=torch.bool), torch.zeros(0, dtype=torch.bool))


def rule_dropout(
    truth: Dropout, task: Task, case: Case, args: Mapping[str, Any], kept: Expected, answers: Sequence[Answer],
    device: str, *, timed: bool = False, earlier: list[Any] | None = None,
) -> Ruling:  # fmt: skip
    """Rule on dropout: right kept values, right dropped values, and a mask that is fresh and unstructured.

    Args:
        truth: the criterion.
        task: the task.
        case: the case.
        args: the arguments of the calls.
        kept: the reference's answers with all elements kept.
        answers: one per call.
        device: where the reference is evaluated.
        timed: the answers are one answer repeated.
        earlier: masks of the grading's other cases; those of this one are added.

    Returns:
        The ruling.
    """
    p, active = rate_of(task, case)
    if not active:
        return close.rule(truth.close, task, case, args, kept, answers[0], device, keep=True)
    if truth.behind is not None:
        return _behind(truth, task, case, args, answers, device, p, timed, earlier)
    if timed:
        answers = answers[:1]  # one answer, repeated: judging it twice costs seconds of the GPU and adds nothing
    dropped = reference.expect(task, case, args, device, keep=False)
    masks: list[tuple[torch.Tensor, torch.Tensor]] = []
    for answer in answers:
        found = _mask_of(truth, kept, dropped, answer)
        if isinstance(found, Ruling):
            # Torch's error may be small by chance: measure how uncertain the values are in any fair order of summation.
            outputs, written = reference.Perturbations(task, case, args, kept, device, keep=True).root_mean_square(reference.DRAWS)
            slack = [*outputs, *written.values()]
            found = _mask_of(truth, kept, dropped, answer, slack, close.growth(truth.close, task, case, kept))
        if isinstance(found, Ruling):
            return found
        masks.append(found)
    return _judge_masks(masks, p, timed, earlier)


def _judge_masks(
    masks: Sequence[tuple[torch.Tensor, torch.Tensor]], p: float, timed: bool, earlier: list[Any] | None = None
) -> Ruling:
    """Rule on the keep rate, structure and freshness of masks.

    Args:
        masks: mask and where it is known, for each call.
        p: drop probability.
        timed: the calls are one call repeated.
        earlier: masks of the grading's other cases; those of this one are added.

    Returns:
        The ruling.
    """
    q = 1 - p
    for mask, clear in masks:
        n = int(clear.sum())
        rate = float(mask[clear].to(torch.float64).mean()) if n else q
        most = randomness.limit(torch.tensor(float(n), dtype=torch.float64), q * (1 - q), max(q, 1 - q), 1)
        if abs(rate - q) * n > float(most):
            return Ruling(False, f"keep rate {rate:.4f}, expected {q:.4f} over {n} elements", abs(rate - q))
        pattern = _patterned(mask, clear, q)
        if pattern:
            return Ruling(False, f"the mask has a pattern: {pattern}")
    if not timed and len(masks) > 1:
        ruling = _fresh(masks[0], masks[1], q)
        if not ruling.passed:
            return ruling
    if randomness.came_before([_line(*m, q) for m in masks], earlier):
        return Ruling(False, "a mask of an earlier call came again: it is not drawn afresh")
    return PASSED


def _behind(
    truth: Dropout, task: Task, case: Case, args: Mapping[str, Any], answers: Sequence[Answer], device: str, p: float,
    timed: bool, earlier: list[Any] | None,
) -> Ruling:  # fmt: skip
    """Rule on dropout that is followed by a matrix product.

    The result is multiplied with the inverse of the matrix to read off the mask. The reference with this mask is the
    exact answer. Arguments as for ``rule_dropout``; ``p`` is the drop probability.

    Returns:
        The ruling.
    """
    from kbx_env.tasks._seams import DROPPED

    seen: list[torch.Tensor] = []
    token = DROPPED.set(seen)
    try:
        reference.expect(task, case, args, device, keep=True)
    finally:
        DROPPED.reset(token)
    assert truth.behind is not None
    kept, matrix = (x.to("cpu", torch.float64) for x in (seen[-1], args[truth.behind]))
    inverse = torch.linalg.inv(matrix)
    clear = kept.abs() > 0.02 * kept.square().mean().sqrt()
    masks = []
    for answer in answers[:1] if timed else answers:
        y = torch.nan_to_num(answer.outputs[0].to("cpu", torch.float64))
        if truth.by_row:
            added = 0.0 if truth.added is None else args[truth.added].to("cpu", torch.float64) @ inverse
            found = _unnormalised(y @ inverse, inverse.sum(-2), torch.as_tensor(added).expand(y.shape), kept)
        else:
            found = y @ inverse
        mask = (found - kept).abs() < found.abs()
        expected = reference.expect(task, case, args, device, keep=mask)
        ruling = close.rule(truth.close, task, case, args, expected, answer, device, keep=mask)
        if not ruling.passed:
            return ruling
        masks.append((mask, clear))
    return _judge_masks(masks, p, timed, earlier)


def _unnormalised(
    divided: torch.Tensor, ones: torch.Tensor, added: torch.Tensor, kept: torch.Tensor, tries: int = 24
) -> torch.Tensor:
    """Undo a normalisation by row: find the row's mean m and standard deviation s > 0 before it.

    The elements were s * divided + m * ones - added, each zero or ``kept``. Two elements, assumed kept or dropped,
    determine s and m; with the right assumption all others are zero or kept too.

    Args:
        divided: the normalised result after the inverse of the matrix, ``(..., n)``.
        ones: the inverse applied to a row of ones, ``(..., n)`` or ``(n,)``.
        added: what was added before the normalisation, after the inverse, ``(..., n)``.
        kept: the elements if kept, ``(..., n)``.
        tries: pairs of elements that are tried.

    Returns:
        The elements of each row by the assumption that fits most of them, ``(..., n)``.
    """
    n = kept.shape[-1]
    draw = randomness.generator(n)
    best, most = torch.zeros_like(kept), torch.full(kept.shape[:-1], -1, dtype=torch.int64)
    for _ in range(tries):
        i, j = torch.randperm(n, generator=draw)[:2].tolist()
        (a, b), (u, v) = (divided[..., i], divided[..., j]), (ones[i], ones[j])
        for guess in range(4):
            f = added[..., i] + kept[..., i] * (guess & 1)
            g = added[..., j] + kept[..., j] * (guess >> 1)
            s, m = (f * v - g * u) / (a * v - b * u), (a * g - b * f) / (a * v - b * u)
            found = s[..., None] * divided + m[..., None] * ones - added
            near = torch.minimum(found.abs(), (found - kept).abs()) < 0.05 * kept.abs()
            fits = torch.where(s > 0, near.sum(-1), -1)
            best, most = torch.where((fits > most)[..., None], found, best), torch.maximum(most, fits)
    return best


def _fresh(a: tuple[torch.Tensor, torch.Tensor], b: tuple[torch.Tensor, torch.Tensor], q: float) -> Ruling:
    """Rule on whether the masks of two calls are independent, at any shift, reflection or XOR of the positions.

    Args:
        a: mask of a call, and where it is known.
        b: the same of another call.
        q: keep probability.

    Returns:
        The ruling.
    """
    x, y = _line(*a, q), _line(*b, q)
    both = a[1] & b[1]
    n = torch.tensor(float(both.sum()), dtype=torch.float64)
    if abs(float((x.values * y.values).sum())) > float(randomness.limit(n, x.var**2, x.most**2, 1)):
        agree = float((a[0] == b[0])[both].to(torch.float64).mean())
        return Ruling(False, f"two calls drop the same elements too often (agreement {agree:.3f})")
    found = randomness.related(x, y) or randomness.transposed(
        x.values.view(a[0].shape), y.values.view(b[0].shape), x, own=False
    )
    return Ruling(False, f"the masks of two calls have elements in common, {found}") if found else PASSED
