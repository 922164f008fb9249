"""Samples: their law, their resolution, their independence, and what a generator promises."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from scipy.special import bdtr

from kbx_env.errors import DeclarationError
from kbx_env.grading.judge import randomness
from kbx_env.grading.judge.randomness import Line
from kbx_env.grading.judge.ruling import PASSED, Answer, Ruling
from kbx_env.grading.judge.structure import same_bits
from kbx_env.spec.criteria import Sample
from kbx_env.spec.task import Case

SIGMAS = 6.5
PIECE = 1 << 20
"""Of more samples, as many at random places are sorted."""
FEW = 256
"""Fewer samples are only compared, not tested for their law."""
LAWS = ("uniform01", "binomial")
TURNS = ("new", "again", "copy", "new", "other")
"""The generators of a case's calls: a fresh one; the same object once more; another one brought into the state in which
that was; a fresh one with the same seed; one with another seed."""


def rule(
    truth: Sample, case: Case, args: Mapping[str, Any], answers: Sequence[Answer], states: Sequence[int] = (),
    *, timed: bool = False, earlier: list[Any] | None = None,
) -> Ruling:  # fmt: skip
    """Rule on samples.

    Args:
        truth: the law.
        case: the case.
        args: what was sent.
        answers: one per call.
        states: of the generator argument at each call: equal numbers stand for equal states.
        timed: only the first answer is looked at.
        earlier: what the grading's other cases have drawn; that of this one is added.

    Raises:
        DeclarationError: no such law.
    """
    if truth.law not in LAWS:
        raise DeclarationError(f"unknown law {truth.law!r}; accepted: {', '.join(LAWS)}")
    given = [a.outputs[0] for a in (answers[:1] if timed else answers)]
    seeded = truth.generator is not None and truth.generator in case.args
    if not seeded or len(states) != len(given):
        states = range(len(given))
    if not given[0].numel():
        return PASSED
    lines: dict[int, tuple[torch.Tensor, Line]] = {}
    # Other numbers in every case: the samples would have them in common.
    draw = torch.Generator().manual_seed(0x81 + len(earlier or ()))
    for state, y in zip(states, given, strict=True):
        if state in lines:
            if not same_bits(lines[state][0], y):
                return Ruling(False, "two generators in the same state gave different samples")
            continue
        numbers = y if truth.law == "uniform01" else _binomial(args, y, draw)
        found = numbers if isinstance(numbers, str) else _uniform(numbers, coarse=truth.law == "binomial")
        if isinstance(found, str):
            return Ruling(False, f"as probabilities of the samples: {found}" if truth.law == "binomial" else found)
        for other, mine in lines.values():
            what = "generators in different states" if seeded else "two calls"
            if y.numel() >= 4 and same_bits(other, y) and truth.law == "uniform01":
                return Ruling(False, f"{what} gave the same samples")
            common = randomness.related(mine, found) if found.n >= FEW else None
            if common:
                return Ruling(False, f"{what} gave correlated samples ({common})")
            if truth.law == "uniform01" and _shared(other, y):
                return Ruling(False, f"{what} gave the same numbers, in whatever order")
        lines[state] = y, found
    if truth.law == "binomial" and randomness.came_before([line for _, line in lines.values()], earlier):
        return Ruling(False, "samples of an earlier call came again: they are not drawn afresh")
    if earlier is not None and truth.law == "uniform01":
        drawn = [y.flatten() for y, _ in lines.values()]
        same = [e for e in earlier if e.dtype == drawn[0].dtype]
        if same and _shared(torch.cat(drawn), torch.cat(same)):
            return Ruling(False, "numbers of an earlier call came again: they are not drawn afresh")
        earlier.extend(drawn)
    return PASSED


def _some(x: torch.Tensor, seed: int) -> torch.Tensor:
    """All numbers of a short line, or those at random places."""
    if x.numel() <= PIECE:
        return x
    draw = torch.Generator(device=x.device).manual_seed(seed)
    # No place twice, because equal samples are counted.
    return x[torch.randint(0, x.numel(), (PIECE,), generator=draw, device=x.device).unique()]


def _seed(x: torch.Tensor) -> int:
    return int(x.view(torch.int64).sum()) & ((1 << 63) - 1)


def _line(centred: torch.Tensor) -> Line:
    # The largest fourth moment over squared variance that a bound of 1/2 allows is 3; that of the law is 1.8.
    return Line(centred, 1 / 12, 0.5)


def _uniform(x: torch.Tensor, coarse: bool = False) -> Line | str:
    """The centred samples, or what is wrong with their law."""
    y = x.to(torch.float64).flatten()
    if not bool(((y >= 0) & (y <= 1 if coarse else y < 1)).all()):
        return "samples outside [0, 1)"
    if y.numel() >= 16 and bool((y == y[0]).all()):
        return "all samples are equal"
    n, quantum = y.numel(), _QUANTUM.get(x.dtype, 2.0**-24)
    line = _line(y - 0.5)
    if n < FEW:
        return line
    mean, square = float(line.values.mean()), float(line.values.square().mean())
    if abs(mean) > SIGMAS / math.sqrt(12 * n) + quantum:
        return f"the mean is {mean * math.sqrt(12 * n):.1f} standard errors off"
    if abs(square - 1 / 12) > SIGMAS / math.sqrt(180 * n) + quantum:
        return "the variance is off"
    some = _some(y, _seed(y))
    ordered, n = some.sort().values, some.numel()
    grid = torch.arange(1, n + 1, dtype=torch.float64, device=y.device) / n
    distance = float(torch.maximum(grid - ordered, ordered - grid + 1 / n).max())
    if distance > 3.3 / math.sqrt(n) + quantum:  # Kolmogorov: P(sqrt(n) D > 3.3) < 1e-9
        return f"not uniform: Kolmogorov-Smirnov distance {distance:.4f}"
    if distance < 0.22 / math.sqrt(n):  # P(sqrt(n) D < 0.22) < 1e-9
        return "more evenly spread than chance would"
    found = None if coarse else _too_coarse(x.dtype, some, ordered)
    return found or _planes(line, y, x.dtype, coarse) or line


def _planes(line: Line, y: torch.Tensor, dtype: torch.dtype, coarse: bool) -> str | None:
    found = randomness.patterned(line)
    if found:
        return found
    # The leading bits, and some that only a comparison with other samples would show.
    for bit in (1,) if coarse or dtype in _QUANTUM else (1, 2, 11, 21):
        whole = (y * 2.0**bit).floor()
        bits = whole - 2 * (whole / 2).floor()
        found = randomness.dependent(bits.to(torch.uint8))
        if found:
            return f"bit {bit}: {found}"
    return None


_QUANTUM = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""Spacing of an honest 16-bit sample; its mean may be off by that much."""


def _too_coarse(dtype: torch.dtype, y: torch.Tensor, ordered: torch.Tensor) -> str | None:
    if dtype in _QUANTUM:
        return None
    bits = 24 if dtype is torch.float64 else 19
    if float(((y * 2.0**bits) % 1.0 == 0).to(torch.float64).mean()) > 0.5:
        return f"too coarse: samples are multiples of 2^-{bits}"
    twice = int((ordered[1:] == ordered[:-1]).sum())
    if twice > _coincidences(y.numel() ** 2 / 2, dtype):
        return "too coarse: too many samples are equal"
    return None


def _shared(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two calls have more numbers in common than chance gives."""
    if a.dtype in _QUANTUM:
        return False
    x, y = a.flatten(), b.flatten()
    ordered = y.sort().values
    at = torch.searchsorted(ordered, x).clamp(max=y.numel() - 1)
    return int((ordered[at] == x).sum()) > _coincidences(x.numel() * y.numel(), a.dtype)


def _coincidences(pairs: float, dtype: torch.dtype) -> float:
    """How many of so many pairs of samples may be equal: of 23 bits, or of 52 with room for clumsy ones."""
    mean = pairs * (2.0**-23 if dtype is torch.float32 else 2.0**-48)
    return mean + SIGMAS * math.sqrt(mean) + 6


def _binomial(args: Mapping[str, Any], y: torch.Tensor, draw: torch.Generator) -> torch.Tensor | str:
    """Uniform numbers, if the samples are what they should be: F(k - 1) + U (F(k) - F(k - 1)) with fresh uniform U."""
    both, n = args["input"] & args["other"], args["total_count"].to(torch.float64)
    p = args["probs"].to(torch.float64) if "probs" in args else torch.sigmoid(args["logits"].to(torch.float64))
    both, n, p, y = (t.flatten() for t in torch.broadcast_tensors(*(t.to(y.device) for t in (both, n, p, y))))
    k = y.to(torch.float64) / both.to(torch.float64)
    if bool((y[both == 0] != 0).any()):
        return "not zero where input & other is zero"
    k, n, p = k[both != 0], n[both != 0], p[both != 0]
    if not bool(((k == k.round()) & (k >= 0) & (k <= n)).all()):
        return "not (input & other) times a whole number from 0 to total_count"
    if k.numel() > PIECE:
        at = torch.randint(0, k.numel(), (PIECE,), generator=draw)
        # A piece in one part keeps what neighbours have in common.
        first = int(at[0]) % (k.numel() - PIECE // 2)
        at[: PIECE // 2] = torch.arange(first, first + PIECE // 2)
        k, n, p = (t[at.to(t.device)] for t in (k, n, p))
    found = _counts(k, n, p)
    if found:
        return found
    k, n, p = k.cpu(), n.cpu(), p.cpu()
    below, upto = (torch.from_numpy(_below(q, n, p)) for q in (k - 1, k))
    return (below + torch.rand(k.shape, generator=draw, dtype=torch.float64) * (upto - below)).to(y.device)


def _below(k: torch.Tensor, n: torch.Tensor, p: torch.Tensor) -> Any:
    """The distribution function; -1 is below every sample."""
    f = bdtr(k.clamp_min(0).numpy(), n.numpy().astype("int64"), p.numpy())
    return f * (k >= 0).numpy()


def _counts(k: torch.Tensor, n: torch.Tensor, p: torch.Tensor) -> str | None:
    """How often each number of successes came, for every number of trials that is common."""
    trials, sizes = n.unique(return_counts=True)
    looks = 101 * (trials.numel() + 1)
    for t in [m for m, size in zip(trials.tolist(), sizes.tolist(), strict=True) if size >= 1000]:
        mine = n == t
        for j in range(int(t) + 1):
            chance = chances(j, int(t), _few(p[mine]))
            chance = chance if chance.numel() == int(mine.sum()) else chance.expand(int(mine.sum()))
            off = float((k[mine] == j).sum() - chance.sum())
            var = (chance * (1 - chance)).sum().cpu().reshape(1)
            if abs(off) > float(randomness.limit(var, 1.0, 1.0, looks)):
                return f"{j} of {int(t)} successes came {'more' if off > 0 else 'less'} often than they should"
    return None


def chances(successes: int, trials: int, p: torch.Tensor) -> torch.Tensor:
    """The binomial law's chance of so many successes.

    Args:
        successes: from 0 to ``trials``.
        trials: their number.
        p: chance of one success, float64.

    Returns:
        As many float64 numbers, relative error below 1e-12: C(n, k) p^k (1 - p)^(n - k), the powers from logarithms.
    """
    log = torch.xlogy(torch.tensor(float(successes), dtype=p.dtype), p)
    log = log + torch.special.xlog1py(torch.tensor(float(trials - successes), dtype=p.dtype), -p)
    return float(math.comb(trials, successes)) * log.exp()


def _few(p: torch.Tensor) -> torch.Tensor:
    """One number for all, where all are equal."""
    return p[:1] if bool((p == p[0]).all()) else p
