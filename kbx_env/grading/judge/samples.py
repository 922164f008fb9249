"""Judges samples: their distribution, resolution and independence, and the reproducibility of generators."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from kbx_env.errors import DeclarationError
from kbx_env.grading import gpu_turns
from kbx_env.grading.judge import randomness
from kbx_env.grading.judge.randomness import Line
from kbx_env.grading.judge.ruling import PASSED, Answer, Ruling
from kbx_env.grading.judge.structure import same_bits
from kbx_env.spec.criteria import Sample
from kbx_env.spec.task import Case

SIGMAS = 6.5
"""Standard errors by which a statistic may be off."""
PIECE = 1 << 20
"""Of longer results this many samples at random places are sorted."""
FEW = 256
"""Fewer samples are only compared with others; their distribution is not tested."""
LOW_BIT = 21
"""Lowest bit of samples that is tested for structure; the highest one is bit 1. All of them fit into an int32."""
LAWS = ("uniform01", "binomial")
"""Accepted values of ``Sample.law``."""
TURNS = ("new", "again", "copy", "new", "other")
"""The generators of a case's calls: a fresh one; the same object once more; another one set to the state before that
second call; a fresh one with the same seed as the first; one with another seed."""


def rule(
    truth: Sample, case: Case, args: Mapping[str, Any], answers: Sequence[Answer], states: Sequence[int] = (),
    *, timed: bool = False, earlier: list[Any] | None = None,
) -> Ruling:  # fmt: skip
    """Rule on samples: their distribution, resolution and independence, and that equal generators give equal samples.

    Args:
        truth: the distribution.
        case: the case.
        args: the arguments of the calls.
        answers: one per call.
        states: state of the generator argument at each call: equal numbers stand for equal states.
        timed: judge only the first answer.
        earlier: samples of the grading's other cases; those of this one are added.

    Returns:
        The ruling.

    Raises:
        DeclarationError: no such distribution.
    """
    if truth.law not in LAWS:
        raise DeclarationError(f"unknown law {truth.law!r}; accepted: {', '.join(LAWS)}")
    results = [a.outputs[0] for a in (answers[:1] if timed else answers)]
    seeded = truth.generator is not None and truth.generator in case.args
    if not seeded or len(states) != len(results):
        states = range(len(results))
    if not results[0].numel():
        return PASSED
    lines: dict[int, tuple[torch.Tensor, Line]] = {}
    for state, y in zip(states, results, strict=True):
        if state in lines:
            if not same_bits(lines[state][0], y):
                return Ruling(False, "two generators in the same state gave different samples")
            continue
        numbers = y if truth.law == "uniform01" else _binomial(args, y, len(earlier or ()) + len(lines))
        found = numbers if isinstance(numbers, str) else _uniform(numbers, coarse=truth.law == "binomial")
        if isinstance(found, str):
            return Ruling(False, f"as probabilities of the samples: {found}" if truth.law == "binomial" else found)
        what = "generators in different states" if seeded else "two calls"
        shared = _in_common(truth, what, y, found, lines.values())
        if shared:
            return Ruling(False, shared)
        lines[state] = y, found
    return _not_drawn_before(truth, list(lines.values()), earlier)


def _in_common(
    truth: Sample, what: str, y: torch.Tensor, line: Line, others: Iterable[tuple[torch.Tensor, Line]]
) -> str:  # fmt: skip
    """Compare the samples of a call with those of other calls whose generator had another state.

    Args:
        truth: the distribution.
        what: names the calls in the text.
        y: the samples.
        line: the same as centred uniform numbers.
        others: samples and numbers of the other calls.

    Returns:
        A text that says what they have in common; empty if nothing.
    """
    uniform = truth.law == "uniform01"
    for other, other_line in others:
        if y.numel() >= 4 and same_bits(other, y) and uniform:
            return f"{what} gave the same samples"
        common = randomness.related(other_line, line) if line.n >= FEW else None
        if common:
            return f"{what} gave correlated samples ({common})"
        if uniform and _shared(other, y):
            return f"{what} gave the same numbers, in whatever order"
    return ""


def _not_drawn_before(truth: Sample, drawn: Sequence[tuple[torch.Tensor, Line]], earlier: list[Any] | None) -> Ruling:
    """Rule on whether samples repeat those of the grading's other cases.

    Args:
        truth: the distribution.
        drawn: samples and centred uniform numbers of each call.
        earlier: samples (uniform) or numbers (binomial) of the other cases; those of this one are added.

    Returns:
        The ruling.
    """
    if truth.law == "binomial" and randomness.came_before([line for _, line in drawn], earlier):
        return Ruling(False, "samples of an earlier call came again: they are not drawn afresh")
    if earlier is not None and truth.law == "uniform01":
        samples = [y.flatten() for y, _ in drawn]
        same = [e for e in earlier if e.dtype == samples[0].dtype]
        if same and _shared(torch.cat(samples), torch.cat(same)):
            return Ruling(False, "numbers of an earlier call came again: they are not drawn afresh")
        earlier.extend(samples)
    return PASSED


def _some(x: torch.Tensor, seed: int) -> torch.Tensor:
    """Return all samples if they are at most ``PIECE``, else those at random places; ``seed`` decides which."""
    if x.numel() <= PIECE:
        return x
    draw = randomness.generator(seed, x.device)
    # Each place at most once, because equal samples are counted.
    return x[torch.randint(0, x.numel(), (PIECE,), generator=draw, device=x.device).unique()]


def _line(centred: torch.Tensor) -> Line:
    """Return uniform numbers minus 1/2 as a line: variance 1/12, none larger than 1/2."""
    # A bound of 1/2 allows a fourth moment of at most 3 times the squared variance; the uniform distribution has 1.8.
    return Line(centred, 1 / 12, 0.5)


def _uniform(x: torch.Tensor, coarse: bool = False) -> Line | str:
    """Test the distribution of samples that should be uniform in [0, 1).

    Args:
        x: the samples.
        coarse: they are probabilities of discrete samples: 1 may occur, and resolution is not tested.

    Returns:
        The samples minus 1/2, or what is wrong with them.
    """
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
    seed = randomness.seed_of(y)
    some = _some(y, seed)
    ordered, n = some.sort().values, some.numel()
    grid = torch.arange(1, n + 1, dtype=torch.float64, device=y.device) / n
    distance = float(torch.maximum(grid - ordered, ordered - grid + 1 / n).max())
    if distance > 3.3 / math.sqrt(n) + quantum:  # Kolmogorov: P(sqrt(n) D > 3.3) < 1e-9
        return f"not uniform: Kolmogorov-Smirnov distance {distance:.4f}"
    if distance < 0.22 / math.sqrt(n):  # P(sqrt(n) D < 0.22) < 1e-9
        return "more evenly spread than chance would"
    found = None if coarse else _too_coarse(x.dtype, some, ordered)
    return found or _patterns(line, y, x.dtype, coarse, seed) or line


def _patterns(line: Line, y: torch.Tensor, dtype: torch.dtype, coarse: bool, seed: int) -> str | None:
    """Test samples and their bits for structure.

    Args:
        line: the samples minus 1/2.
        y: the samples, flat, in fp64.
        dtype: of the samples.
        coarse: only the leading bit is random.
        seed: decides which samples' bits are tested.

    Returns:
        The structure; ``None`` if there is none.
    """
    found = randomness.patterned(line)
    if found:
        return found
    # The two leading bits, and two lower ones, whose structure the tests above do not see.
    drawn, periods = randomness.draw_matrices(y, seed)
    numbers = (drawn * 2.0**LOW_BIT).floor().to(torch.int32).cpu().numpy()
    for bit in (1,) if coarse or dtype in _QUANTUM else (1, 2, 11, LOW_BIT):
        found = randomness.dependent((numbers >> (LOW_BIT - bit) & 1).astype(np.uint8), periods)
        if found:
            return f"bit {bit}: {found}"
    return None


_QUANTUM = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""Spacing of an honest 16-bit sample; its mean may be off by that much."""


def _too_coarse(dtype: torch.dtype, y: torch.Tensor, ordered: torch.Tensor) -> str | None:
    """Test whether samples have too few random bits.

    Args:
        dtype: of the samples.
        y: the samples in fp64.
        ordered: the same, sorted.

    Returns:
        What is wrong; ``None`` if nothing.
    """
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
    """Return whether two calls have more equal numbers than chance gives."""
    if a.dtype in _QUANTUM:
        return False
    x, y = a.flatten(), b.flatten()
    ordered = y.sort().values
    at = torch.searchsorted(ordered, x).clamp(max=y.numel() - 1)
    return int((ordered[at] == x).sum()) > _coincidences(x.numel() * y.numel(), a.dtype)


def _coincidences(pairs: float, dtype: torch.dtype) -> float:
    """Return how many pairs of samples may be equal.

    Args:
        pairs: number of pairs.
        dtype: fp32 counts as 23 random bits; fp64 as 48, which leaves a margin to its 52.

    Returns:
        The mean, ``SIGMAS`` standard deviations of the Poisson distribution, and 6 more.
    """
    mean = pairs * (2.0**-23 if dtype is torch.float32 else 2.0**-48)
    return mean + SIGMAS * math.sqrt(mean) + 6


def _binomial(args: Mapping[str, Any], y: torch.Tensor, turn: int) -> torch.Tensor | str:
    """Turn binomial samples into uniform numbers: F(k - 1) + U (F(k) - F(k - 1)) with fresh uniform U (randomized
    transform).

    Args:
        args: the arguments of the call.
        y: the samples, multiplied with ``input & other``.
        turn: another number in every call of a grading: calls without chance, as with no trials, would have U in common.

    Returns:
        Numbers that are uniform if the samples have the binomial distribution (at most ``PIECE`` of them), or what is
        wrong.
    """
    both, n = args["input"] & args["other"], args["total_count"].to(torch.float64)
    p = args["probs"].to(torch.float64) if "probs" in args else torch.sigmoid(args["logits"].to(torch.float64))
    both, n, p, y = (t.flatten() for t in torch.broadcast_tensors(*(t.to(y.device) for t in (both, n, p, y))))
    k = y.to(torch.float64) / both.to(torch.float64)
    if bool((y[both == 0] != 0).any()):
        return "not zero where input & other is zero"
    k, n, p = k[both != 0], n[both != 0], p[both != 0]
    if not bool(((k == k.round()) & (k >= 0) & (k <= n)).all()):
        return "not (input & other) times a whole number from 0 to total_count"
    draw = randomness.generator(randomness.seed_of(k) + turn)
    if k.numel() > PIECE:
        at = torch.randint(0, k.numel(), (PIECE,), generator=draw)
        # Half of them are consecutive, so that correlations between neighbours are kept.
        first = int(at[0]) % (k.numel() - PIECE // 2)
        at[: PIECE // 2] = torch.arange(first, first + PIECE // 2)
        k, n, p = (t[at.to(t.device)] for t in (k, n, p))
    found = _counts(k, n, p)
    if found:
        return found
    below, chance = _below(k, n, p)
    numbers = below + torch.rand(k.shape, generator=draw, dtype=torch.float64).to(y.device) * chance
    # Beyond all chances that fp64 tells from 1, rounding adds up to a little more than 1. A sampler that walks up the distribution
    # function in fp32 gives such a sample once in some millions: no test of the distribution sees that.
    return numbers.clamp_max(1.0)


def _below(k: torch.Tensor, n: torch.Tensor, p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the binomial chances of fewer than k successes, and of k.

    They are sums of the single chances, each of which follows from the one before: for few trials that is faster than the
    incomplete beta function of ``scipy.special.bdtr``, and it runs on a GPU.

    Args:
        k: successes, fp64.
        n: trials.
        p: chance of one success.

    Returns:
        Two tensors of fp64 numbers; their absolute error is below 1e-12.
    """
    # Counted are the rarer ones of successes and failures, so that the first chance does not underflow.
    swap = p > 0.5
    q, j = torch.where(swap, 1 - p, p), torch.where(swap, n - k, k)
    odds, one = q / (1 - q), torch.exp(n * torch.log1p(-q))
    fewer, chance = torch.zeros_like(q), torch.zeros_like(q)
    for i in range(int(n.max()) + 1 if n.numel() else 0):
        fewer += torch.where(j > i, one, 0.0)
        chance = torch.where(j == i, one, chance)
        one = one * odds * (n - i).clamp_min(0.0) / (i + 1)
    return torch.where(swap, (1 - fewer - chance).clamp_min(0.0), fewer), chance


def _counts(k: torch.Tensor, n: torch.Tensor, p: torch.Tensor) -> str | None:
    """Compare the frequency of each number of successes with its chance, for every number of trials that is frequent.

    Args:
        k: successes, fp64.
        n: trials.
        p: chance of one success.

    Returns:
        What is wrong; ``None`` if nothing.
    """
    trials, sizes = n.unique(return_counts=True)
    looks = 101 * (trials.numel() + 1)
    for t in [m for m, size in zip(trials.tolist(), sizes.tolist(), strict=True) if size >= 1000]:
        gpu_turns.yield_gpu()
        chosen = n == t
        for j in range(int(t) + 1):
            chance = chances(j, int(t), _few(p[chosen]))
            chance = chance if chance.numel() == int(chosen.sum()) else chance.expand(int(chosen.sum()))
            off = float((k[chosen] == j).sum() - chance.sum())
            var = (chance * (1 - chance)).sum().cpu().reshape(1)
            if abs(off) > float(randomness.limit(var, 1.0, 1.0, looks)):
                return f"{j} of {int(t)} successes came {'more' if off > 0 else 'less'} often than they should"
    return None


def chances(successes: int, trials: int, p: torch.Tensor) -> torch.Tensor:
    """Return the chance of a number of successes under the binomial distribution.

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
    """Return only the first number if all are equal."""
    return p[:1] if bool((p == p[0]).all()) else p
