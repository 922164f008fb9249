"""Random results: dropout masks and samples. Any stream will do; what it must look like is checked.

Every threshold is at 6 standard deviations (p = 2e-9) or more, so that an honest kernel practically never fails.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from scipy.stats import binom

from kbx_env.errors import DeclarationError
from kbx_env.grading import reference
from kbx_env.grading.judge import close
from kbx_env.grading.judge.ruling import PASSED, Answer, Ruling
from kbx_env.grading.judge.structure import pairs, same_bits
from kbx_env.grading.reference import Expected
from kbx_env.task import Case, Task
from kbx_env.truth import Dropout, Sample

SIGMAS = 6.0
LAG_SIGMAS = 9.0
"""Correlations are looked at for every distance up to half the length: millions of looks need a wider bound."""
MOST = 1 << 21
"""Elements that enter the tests of structure."""


def rate_of(task: Task, case: Case) -> tuple[float, bool]:
    """(drop probability, whether chance decides anything) of a case."""
    truth = task.truth
    assert isinstance(truth, Dropout)
    bound = {n: p.default for n, p in task.signature.parameters.items()} | dict(case.args)
    p = float(bound[truth.rate])
    return p, (truth.active is None or bool(bound[truth.active])) and 0.0 < p < 1.0


def worst_lag(a: torch.Tensor, b: torch.Tensor, var: float, *, own: bool) -> tuple[float, int]:
    """Largest |z| of the products of ``a`` and ``b`` (zero mean, variance ``var``) a distance apart, and the distance.

    ``own``: ``a`` is ``b``, distance 0 is left out. One FFT looks at every distance.
    """
    n = min(a.numel(), MOST)
    x, y = (torch.fft.rfft(t[:n].to(torch.float64), 2 * n) for t in (a, b))
    lags = max(2, n // 2)
    sums = torch.fft.irfft(x.conj() * y, 2 * n)[:lags]
    terms = torch.arange(n, n - lags, -1, dtype=torch.float64, device=a.device)
    z = (sums / (var * terms.clamp_min(1).sqrt())).abs()
    if own:
        z[0] = 0.0
    lag = int(z.argmax())
    return float(z[lag]), lag


def _rate_off(observed: float, p: float, n: int) -> bool:
    return n > 0 and abs(observed - p) > SIGMAS * math.sqrt(p * (1 - p) / n) + 1.0 / n


def _patterned(mask: torch.Tensor, clear: torch.Tensor, q: float) -> str | None:
    """Structure in a mask that keeps with probability ``q``: rows, columns, periods."""
    var = q * (1 - q)
    centred = torch.where(clear, mask.to(torch.float64) - q, 0.0)
    if mask.dim() >= 2 and int(clear.sum()) * var > 200:
        for axis, name in ((-1, "rows"), (-2, "columns")):
            counts = clear.sum(axis).flatten()
            sums = centred.sum(axis).flatten()[counts * var > 5]
            counts = counts[counts * var > 5]
            if counts.numel() < 2:
                continue
            dof = counts.numel()
            chi = float((sums.square() / (counts * var)).sum())
            if chi > dof + 8 * math.sqrt(2 * dof) + 40:
                return f"{name} are dropped together"
    flat = centred.flatten()
    # Rare drops make rare coincidences, whose counts are far from normal: below 50 of them nothing is said.
    if float(clear.to(torch.float64).mean()) > 0.3 and min(flat.numel(), MOST) / 2 * var * var > 50:
        kept = flat[clear.flatten()] if not bool(clear.all()) else flat
        for line in (flat, kept):
            z, lag = worst_lag(line, line, var, own=True)
            if z > LAG_SIGMAS:
                return f"elements {lag} apart are dropped together"
    return None


def _mask_of(
    truth: Dropout, kept: Expected, dropped: Expected, answer: Answer, slack: Sequence[torch.Tensor] = (),
    grown: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor] | Ruling:  # fmt: skip
    """(mask, where it can be told) of output 0, or what is wrong with an element."""
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
        # Only where kept and dropped are far apart does the value tell the mask; this depends on no mask.
        apart, _ = close.misses(truth.close, low.exact.to(got.dtype), high.exact, high.native, extra)
        mask, clear = (to_kept <= to_dropped).cpu(), (apart > 4.0).cpu()
        if found is None:
            found = mask, clear
        elif mask.shape == found[0].shape and bool(((mask != found[0]) & clear & found[1]).any()):
            return Ruling(False, f"{high.name} was dropped at other places than output 0")
    return found if found is not None else (torch.zeros(0, dtype=torch.bool), torch.zeros(0, dtype=torch.bool))


def rule_dropout(
    truth: Dropout, task: Task, case: Case, args: Mapping[str, Any], kept: Expected, answers: Sequence[Answer],
    device: str, *, timed: bool = False,
) -> Ruling:  # fmt: skip
    """Kept values right, dropped values right, and a mask that is fresh and unstructured."""
    p, active = rate_of(task, case)
    if not active:
        return close.rule(truth.close, task, case, args, kept, answers[0], device, keep=True)
    if truth.by_row:
        return _by_row(truth, task, case, args, answers, device, p, timed)
    dropped = reference.expect(task, case, args, device, keep=False)
    masks: list[tuple[torch.Tensor, torch.Tensor]] = []
    for answer in answers:
        found = _mask_of(truth, kept, dropped, answer)
        if isinstance(found, Ruling):
            # Torch may have been lucky; ask how uncertain the values are in any fair order of summation.
            outputs, written = reference.sensitivity(task, case, args, kept, device, keep=True)
            slack = [*outputs, *written.values()]
            found = _mask_of(truth, kept, dropped, answer, slack, close.growth(task, case, kept))
        if isinstance(found, Ruling):
            return found
        masks.append(found)
    return _judge_masks(masks, p, timed)


def _judge_masks(masks: Sequence[tuple[torch.Tensor, torch.Tensor]], p: float, timed: bool) -> Ruling:
    """Keep rate, structure, and freshness of the masks of several calls."""
    q = 1 - p
    for mask, clear in masks:
        n = int(clear.sum())
        rate = float(mask[clear].to(torch.float64).mean()) if n else q
        if _rate_off(rate, q, n):
            return Ruling(False, f"keep rate {rate:.4f}, expected {q:.4f} over {n} elements", abs(rate - q))
        pattern = _patterned(mask, clear, q)
        if pattern:
            return Ruling(False, f"the mask has a pattern: {pattern}")
    if not timed and len(masks) > 1:
        return _fresh(masks[0], masks[1], q)
    return PASSED


def _by_row(
    truth: Dropout, task: Task, case: Case, args: Mapping[str, Any], answers: Sequence[Answer], device: str, p: float,
    timed: bool,
) -> Ruling:  # fmt: skip
    """Read the mask off each row's smallest values; the reference with that mask is the truth."""
    masks = []
    for answer in answers:
        y = torch.nan_to_num(answer.outputs[0].to("cpu", torch.float64))
        low, high = y.amin(-1, keepdim=True), y.amax(-1, keepdim=True)
        mask = y > (low + high) / 2
        # A row that kept everything has no dropped element at its bottom: its spread is that of the kept values.
        whole = reference.expect(task, case, args, device, keep=True).outputs[0].to("cpu")
        mask = mask | ((y - whole).abs().amax(-1, keepdim=True) < 1e-3)
        expected = reference.expect(task, case, args, device, keep=mask)
        ruling = close.rule(truth.close, task, case, args, expected, answer, device, keep=mask)
        if not ruling.passed:
            return ruling
        masks.append((mask, torch.ones_like(mask)))
    return _judge_masks(masks, p, timed)


def _fresh(a: tuple[torch.Tensor, torch.Tensor], b: tuple[torch.Tensor, torch.Tensor], q: float) -> Ruling:
    """Two calls must not share their masks, at any shift."""
    clear = a[1] & b[1]
    n, var = int(clear.sum()), q * (1 - q)
    if n * var <= 50:
        return PASSED
    agree = float((a[0] == b[0])[clear].to(torch.float64).mean())
    # The agreement also varies with each mask's own rate; the product of the centred masks varies by chance alone.
    x, y = ((m[clear].to(torch.float64) - q) for m, _ in (a, b))
    if abs(float((x * y).sum())) / (var * math.sqrt(n)) > (SIGMAS if n * var * var > 50 else 2 * SIGMAS):
        return Ruling(False, f"two calls drop the same elements too often (agreement {agree:.3f})")
    if min(n, MOST) / 2 * var * var > 50:
        for first, second in ((x, y), (y, x)):
            z, _ = worst_lag(first, second, var, own=False)
            if z > LAG_SIGMAS:
                return Ruling(False, "the mask of one call is the shifted mask of another")
    return PASSED


def _binomial(args: Mapping[str, Any], y: torch.Tensor, draw: torch.Generator) -> torch.Tensor | str:
    """Uniform numbers, if the samples are what they should be: F(k - 1) + U (F(k) - F(k - 1)) with fresh uniform U."""
    both, n = args["input"] & args["other"], args["total_count"].to(torch.float64)
    p = args["probs"].to(torch.float64) if "probs" in args else torch.sigmoid(args["logits"].to(torch.float64))
    both, n, p, y = (t.flatten()[:MOST] for t in torch.broadcast_tensors(*(t.cpu() for t in (both, n, p, y))))
    k = y.to(torch.float64) / both.to(torch.float64)
    if bool((y[both == 0] != 0).any()):
        return "not zero where input & other is zero"
    k, n, p = k[both != 0], n[both != 0], p[both != 0]
    if not bool(((k == k.round()) & (k >= 0) & (k <= n)).all()):
        return "not (input & other) times a whole number from 0 to total_count"
    below, at = (torch.from_numpy(binom.cdf(q.numpy(), n.numpy(), p.numpy())) for q in (k - 1, k))
    return below + torch.rand(k.shape, generator=draw, dtype=torch.float64) * (at - below)


def rule_sample(
    truth: Sample, case: Case, args: Mapping[str, Any], answers: Sequence[Answer], generator_seeds: Sequence[int] = (),
    *, timed: bool = False,
) -> Ruling:  # fmt: skip
    """Samples: distribution, resolution, independence, and the generator's promise."""
    if truth.law == "binomial":
        draw = torch.Generator().manual_seed(0x81)
        made = [_binomial(args, a.outputs[0], draw) for a in answers[: 1 if timed else None]]
        for numbers in made:
            if isinstance(numbers, str):
                return Ruling(False, numbers)
            found = _uniform01(numbers, coarse=True)
            if found:
                return Ruling(False, f"as probabilities of the samples: {found}")
        if len(made) > 1 and _correlated(made[0], made[1]):  # type: ignore[arg-type]
            return Ruling(False, "two calls gave correlated samples")
        return PASSED
    if truth.law not in LAWS:
        raise DeclarationError(f"unknown law {truth.law!r}; accepted: binomial, {', '.join(LAWS)}")
    for answer in answers[: 1 if timed else None]:
        found = LAWS[truth.law](answer.outputs[0])
        if found:
            return Ruling(False, found)
    draws = [a.outputs[0] for a in answers]
    if timed or not draws[0].numel():
        return PASSED
    seeded = truth.generator is not None and truth.generator in case.args
    seeds = list(generator_seeds) if len(generator_seeds) == len(draws) else [0, 0, 1][: len(draws)]
    for i in range(1, len(draws)):
        for j in range(i):
            same = same_bits(draws[i], draws[j])
            if seeded and seeds[i] == seeds[j]:
                if not same:
                    return Ruling(False, "two generators with the same seed gave different samples")
            elif draws[i].numel() >= 4 and (same or _correlated(draws[i], draws[j])):
                what = "generators with different seeds" if seeded else "two calls"
                return Ruling(False, f"{what} gave {'the same' if same else 'correlated'} samples")
    return PASSED


def _correlated(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.numel() < 256:
        return False
    x, y = (t.flatten().to(torch.float64) - 0.5 for t in (a, b))
    return any(worst_lag(*pair, 1 / 12, own=False)[0] > LAG_SIGMAS for pair in ((x, y), (y, x)))


_QUANTUM = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""Spacing of an honest 16-bit sample; its mean may be off by that much."""


def _uniform01(x: torch.Tensor, coarse: bool = False) -> str | None:
    y = x.to(torch.float64).flatten()
    if not bool(((y >= 0) & (y <= 1 if coarse else y < 1)).all()):
        return "samples outside [0, 1)"
    if y.numel() >= 16 and bool((y == y[0]).all()):
        return "all samples are equal"
    y = y[:MOST]
    n, quantum = y.numel(), _QUANTUM.get(x.dtype, 2.0**-20)
    if n < 256:
        return None
    centred = y - 0.5
    if abs(float(centred.mean())) > SIGMAS / math.sqrt(12 * n) + quantum:
        return f"the mean is {float(centred.mean()) * math.sqrt(12 * n):.1f} standard errors off"
    if abs(float(centred.square().mean()) - 1 / 12) > SIGMAS / math.sqrt(180 * n) + quantum:
        return "the variance is off"
    ordered = y.sort().values
    grid = torch.arange(1, n + 1, dtype=torch.float64, device=y.device) / n
    distance = float(torch.maximum(grid - ordered, ordered - grid + 1 / n).max())
    if distance > 3.3 / math.sqrt(n) + quantum:  # Kolmogorov: P(sqrt(n) D > 3.3) < 1e-9
        return f"not uniform: Kolmogorov-Smirnov distance {distance:.4f}"
    z, lag = worst_lag(centred, centred, 1 / 12, own=True)
    if z > LAG_SIGMAS:
        return f"elements {lag} apart are correlated"
    return None if coarse else _too_coarse(x, y, ordered)


def _too_coarse(x: torch.Tensor, y: torch.Tensor, ordered: torch.Tensor) -> str | None:
    if x.dtype in _QUANTUM:
        return None
    bits = 24 if x.dtype is torch.float64 else 19
    if float(((y * 2.0**bits) % 1.0 == 0).to(torch.float64).mean()) > 0.5:
        return f"too coarse: samples are multiples of 2^-{bits}"
    n = y.numel()
    twice = int((ordered[1:] == ordered[:-1]).sum())
    allowed = n * n / 2.0 ** (22 if x.dtype is torch.float32 else 31)
    if twice > allowed + SIGMAS * math.sqrt(allowed) + 3:
        return "too coarse: too many samples are equal"
    return None


LAWS: Mapping[str, Callable[[torch.Tensor], str | None]] = {"uniform01": _uniform01}
