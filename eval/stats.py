"""Statistics of a report, as pure functions: rates, speeds, rounds, failures. Comparisons are in `kbx_env.eval.models`.

Answers that end in an infrastructure fault are masked: they are left out of every rate, and counted. ``None`` is not
known, never 0. Intervals are 95 %.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from kbx_env.eval.report_data import PolicyStudy, Row, Study

DRAWS = 2000
"""Bootstrap samples behind an interval."""
LEVEL = 0.95
"""Of all intervals."""
GRID = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 8.0)
"""Speedups at which the fast_p curve is computed."""


@dataclass(frozen=True)
class Result:
    """A frozen record of plain numbers and text."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return json.loads(json.dumps(dataclasses.asdict(self)))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Spread(Result):
    """Quantiles of ``n`` numbers, ``None`` for no number.

    Attributes:
        n: how many numbers.
        median: 50 %.
        q1: 25 %.
        q3: 75 %.
        p90: 90 %.
        most: the largest.
    """

    n: int
    median: float | None
    q1: float | None
    q3: float | None
    p90: float | None
    most: float | None


def spread(values: Sequence[float]) -> Spread:
    """Return quantiles (linear between neighbours)."""
    quantiles = [float(q) for q in np.quantile(values, [0.5, 0.25, 0.75, 0.9, 1.0])] if len(values) else [None] * 5
    return Spread(len(values), *quantiles)


def wilson(k: float, n: float, level: float = LEVEL) -> tuple[float, float] | None:
    """Return the score interval of a share (Wilson 1927).

    Not scipy's (``binomtest``): it takes whole numbers only, and ``rate`` passes an effective sample size. Not statsmodels'
    (``proportion_confint``), which agrees: reports and leaderboards need this without the extra ``report``.

    Args:
        k: successes; may be a fraction.
        n: trials; may be a fraction.
        level: of the interval.

    Returns:
        Lower and upper end; ``None`` for n = 0.

    Raises:
        ValueError: k is not between 0 and n.
    """
    from scipy.special import ndtri

    if not 0 <= k <= n:
        raise ValueError(f"{k} of {n} is no share")
    if not n:
        return None
    p, z = k / n, float(ndtri(0.5 + level / 2))
    centre, half, scale = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)), 1 + z * z / n
    return max(0.0, min(p, (centre - half) / scale)), min(1.0, max(p, (centre + half) / scale))


@dataclass(frozen=True)
class Mean(Result):
    """A mean with its interval.

    Attributes:
        value: the mean.
        low: lower end; ``None`` if no two tasks differ, since their spread is then not known.
        high: upper end, or ``None``.
        tasks: number of tasks.
    """

    value: float
    low: float | None
    high: float | None
    tasks: int

    def exp(self) -> Mean:
        """Return the geometric mean, if this is a mean of logarithms."""
        low, high = (None if v is None else math.exp(v) for v in (self.low, self.high))
        return Mean(math.exp(self.value), low, high, self.tasks)


def mean(sums: Sequence[float], counts: Sequence[float] | None = None, seed: int = 0, level: float = LEVEL) -> Mean | None:
    """Return the mean over all answers with a percentile bootstrap interval that draws tasks (Efron 1979).

    Args:
        sums: the sum of the values of each task.
        counts: the number of values of each task; by default one.
        seed: of the bootstrap's draws.
        level: of the interval.

    Returns:
        The mean, always within its interval; ``None`` for no task.
    """
    from scipy.stats import bootstrap

    s = np.asarray(sums, dtype=float)
    c = np.ones_like(s) if counts is None else np.asarray(counts, dtype=float)
    if not len(s):
        return None
    point = float(s.sum() / c.sum())
    if np.ptp(s / c) == 0:
        return Mean(point, None, None, len(s))

    def ratio(s: np.ndarray, c: np.ndarray, axis: int) -> np.ndarray:
        return s.sum(axis) / c.sum(axis)  # type: ignore[no-any-return]

    found = bootstrap(
        (s, c), ratio, n_resamples=DRAWS, paired=True, vectorized=True, confidence_level=level, method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval  # fmt: skip
    return Mean(point, min(float(found.low), point), max(float(found.high), point), len(s))


@dataclass(frozen=True)
class Rate(Result):
    """A share with its Wilson interval; ``None`` for n = 0.

    Attributes:
        k: answers of the share.
        n: all answers.
        rate: k / n.
        low: lower end.
        high: upper end.
    """

    k: int
    n: int
    rate: float | None
    low: float | None
    high: float | None


def rate(rows: Sequence[Row], holds: Callable[[Row], bool]) -> Rate:
    """Return the share of rows for which something holds.

    Several answers to a task are not independent. The interval is then that of an effective number of answers: n
    divided by the design effect of the clusters (Kish 1965), which scipy and statsmodels do not have. If all answers
    are alike, the design effect is unknown, and the number of tasks is taken.

    Args:
        rows: the answers.
        holds: whether it holds for an answer.

    Returns:
        The share with its interval.
    """
    sums, counts = by_task(rows, lambda r: float(holds(r)))
    k, n, m = sum(sums), len(rows), len(sums)
    if not n:
        return Rate(0, 0, None, None, None)
    size, p = float(n), k / n
    if m < n:
        off = sum((s - p * c) ** 2 for s, c in zip(sums, counts, strict=True))
        size = float(m) if m == 1 or not 0 < k < n else n / max(1.0, m / (m - 1) * off / (n * p * (1 - p)))
    low, high = wilson(p * size, size) or (p, p)
    return Rate(int(k), n, p, min(low, p), max(high, p))


def by_task(rows: Sequence[Row], value: Callable[[Row], float | None]) -> tuple[list[float], list[int]]:
    """Return sums and counts of the known values of each task.

    Args:
        rows: the answers.
        value: of an answer, ``None`` if not known.

    Returns:
        Sums and counts, in the same order.
    """
    found: dict[str, list[float]] = {}
    for r in rows:
        if (v := value(r)) is not None:
            found.setdefault(r.task, []).append(v)
    return [sum(v) for v in found.values()], [len(v) for v in found.values()]


@dataclass(frozen=True)
class Rates(Result):
    """Compiled and correct answers among the judged ones.

    Attributes:
        policy: name of the policy.
        category: ``None`` for all categories together.
        tasks: number of tasks with a judged answer.
        masked: number of masked answers.
        compiled: share of the judged answers.
        correct: share of the judged answers.
    """

    policy: str
    category: str | None
    tasks: int
    masked: int
    compiled: Rate
    correct: Rate


def rates(policy: PolicyStudy, category: str | None = None) -> Rates:
    """Return the rates of a policy, or of one of its categories (paper Table 1)."""
    rows = [r for r in policy.rows if category in (None, r.category)]
    known = [r for r in rows if not r.masked]
    return Rates(policy.name, category, len({r.task for r in known}), len(rows) - len(known),
                 rate(known, lambda r: r.compiled), rate(known, lambda r: r.correct))  # fmt: skip


def rate_table(study: Study) -> tuple[Rates, ...]:
    """Return rates of every policy: all categories together, then each category."""
    return tuple(rates(p, c) for p in study.policies for c in (None, *study.categories))


@dataclass(frozen=True)
class Speeds(Result):
    """Speedups over eager of correct, timed kernels.

    Attributes:
        n: correct kernels with a time.
        untimed: correct kernels without one.
        geometric_mean: with its interval.
        spread: quantiles.
        arithmetic_mean: the mean of the paper.
        slower: share with a speedup below 1.
        slower_surely: share with the whole interval below 1.
        faster_surely: share with the whole interval above 1.
    """

    n: int
    untimed: int
    geometric_mean: Mean
    spread: Spread
    arithmetic_mean: float
    slower: Rate
    slower_surely: Rate
    faster_surely: Rate


def speeds(rows: Sequence[Row], seed: int = 0) -> Speeds | None:
    """Return the speedups of correct kernels (paper abstract: 46.6 % of them are slower than eager).

    Args:
        rows: the answers.
        seed: of the bootstrap.

    Returns:
        The speedups; ``None`` if nothing was timed.
    """
    correct = [r for r in rows if r.correct and not r.masked]
    timed = [r for r in correct if r.speedup]
    sure, values = [r for r in timed if r.low and r.high], [r.speedup or 0.0 for r in timed]
    logs = mean(*by_task(timed, log_speedup), seed=seed)
    if logs is None:
        return None
    return Speeds(
        len(timed), len(correct) - len(timed), logs.exp(), spread(values), math.fsum(values) / len(values),
        rate(timed, lambda r: (r.speedup or 0) < 1), rate(sure, lambda r: (r.high or 0) < 1),
        rate(sure, lambda r: (r.low or 0) > 1),
    )  # fmt: skip


def log_speedup(r: Row) -> float | None:
    """Return the log-speedup of a correct, timed kernel; ``None`` for other answers."""
    return math.log(r.speedup) if r.correct and r.speedup else None


def _geomean(values: Sequence[float]) -> float | None:
    return math.exp(math.fsum(map(math.log, values)) / len(values)) if values else None


def fast_p(policy: PolicyStudy, grid: Sequence[float] = GRID) -> tuple[tuple[float, Rate], ...] | None:
    """Return KernelBench's fast_p (Ouyang et al. 2025): the share of judged answers that are correct and faster than p.

    Args:
        policy: the policy.
        grid: values of p. For p = 0 the share is that of correct answers; for larger p an answer without a time is not
            faster.

    Returns:
        (p, share) of each p; ``None`` for an untimed run.
    """
    if not policy.timed:
        return None
    return tuple((p, rate(policy.judged, lambda r, p=p: r.correct and (p <= 0 or (r.speedup or 0.0) > p))) for p in grid)  # type: ignore[misc]


def pass_at(rows: Sequence[Row], seed: int = 0) -> dict[int, Mean]:
    """Return unbiased pass@k (Chen et al. 2021), the mean over tasks.

    Args:
        rows: the answers.
        seed: of the bootstrap.

    Returns:
        k -> mean, for k = 1, 2, 4, ... up to the smallest number of judged answers of a task.
    """
    from kbx_env.eval.report import pass_at_k  # imported here, because it imports this module

    sums, counts = by_task([r for r in rows if not r.masked], lambda r: float(r.correct))
    least = min(counts, default=0)
    ks, tasks = sorted({1 << i for i in range(least.bit_length())} | {least}), list(zip(sums, counts, strict=True))
    return {k: m for k in ks if (m := mean([pass_at_k(n, int(s), k) for s, n in tasks], seed=seed))}


@dataclass(frozen=True)
class Round(Result):
    """Answers at the end of a round, by the best submission of all rounds so far. Speedups are geometric means.

    Attributes:
        round: its number, from 0.
        compiled: share of the answers.
        correct: share of the answers.
        speedup: of correct answers.
        rescued: answers that are correct for the first time in this round.
        rescued_speedup: of these.
        persistent: answers that were correct before.
        persistent_speedup: of these.
    """

    round: int
    compiled: Rate
    correct: Rate
    speedup: float | None
    rescued: int
    rescued_speedup: float | None
    persistent: int
    persistent_speedup: float | None


@dataclass(frozen=True)
class Trajectory(Result):
    """The rounds of a policy.

    Attributes:
        policy: name of the policy.
        rounds: in order.
        unknown: answers without recorded rounds, which are left out.
    """

    policy: str
    rounds: tuple[Round, ...]
    unknown: int


def trajectory(policy: PolicyStudy) -> Trajectory | None:
    """Return a policy's rounds (paper Fig. 3, GEAK's rounds).

    Args:
        policy: the policy. An answer of which nothing was ever submitted counts as not compiled.

    Returns:
        The rounds; ``None`` if none are recorded.
    """
    rows = [r for r in policy.judged if r.turns or r.spent.get("gradings") == 0]
    numbers = sorted({int(t["round"]) for r in rows for t in r.turns})
    if not numbers:
        return None
    first = [min((int(t["round"]) for t in r.turns if t["correct"]), default=None) for r in rows]
    rounds = []
    for now in numbers:
        until = {id(r): [t for t in r.turns if int(t["round"]) <= now] for r in rows}
        best = [max((t["speedup"] for t in until[id(r)] if t["correct"] and t["speedup"]), default=None) for r in rows]
        new = [b for b, f in zip(best, first, strict=True) if f == now]
        old = [b for b, f in zip(best, first, strict=True) if f is not None and f < now]
        rounds.append(Round(
            now, rate(rows, lambda r: any(t["compiled"] for t in until[id(r)])),  # noqa: B023
            rate(rows, lambda r: any(t["correct"] for t in until[id(r)])),  # noqa: B023
            _geomean([b for b in best if b]), len(new), _geomean([b for b in new if b]), len(old),
            _geomean([b for b in old if b]),
        ))  # fmt: skip
    return Trajectory(policy.name, tuple(rounds), len(policy.judged) - len(rows))


@dataclass(frozen=True)
class Traffic(Result):
    """Memory traffic and launches of correct kernels, as far as they are known.

    Attributes:
        policy: name of the policy.
        category: ``None`` for all categories together.
        ratio: geometric mean of moved / ideal bytes.
        ratios: quantiles of moved / ideal bytes.
        launches: quantiles of the launches of one call of a case.
    """

    policy: str
    category: str | None
    ratio: float | None
    ratios: Spread
    launches: Spread


def traffic(policy: PolicyStudy, category: str | None = None) -> Traffic:
    """Return traffic and launches of a policy, or of one of its categories, as the CPU tier counted them."""
    rows = [r for r in policy.judged if r.correct and category in (None, r.category)]
    ratios = [r.traffic for r in rows if r.traffic]
    known = [(e, r.raw["cases"]["total"]) for r in rows if (e := r.raw.get("evidence") or {}).get("moved_bytes") is not None]
    calls = [sum(k["launches"] for k in e.get("kernels") or ()) / n for e, n in known if n]
    return Traffic(policy.name, category, _geomean(ratios), spread(ratios), spread(calls))


_MALFORMED = {
    "no answer": r"the policy has no answer",
    "syntax": r"(line \d+: )?(syntax error|\w+Error)|the source (cannot be parsed|is nested|has)",
    "text": r"the source is empty|line \d+: (not UTF-8|control|no byte-order)",
    "entry": r"no function named|line \d+: .*(lacks the|has its parameters|demands an|is a Triton kernel)|.* is not a function",
}  # fmt: skip
"""Kind of malformed answer -> how its message begins."""
_RUNTIME = {
    "out of bounds": r".*\bout-of-bounds\b", "unwritten": r".* lets memory that nothing has written decide",
    "process": r"the submission's process|EngineError: ", "memory": r".*[Oo]ut of ?[Mm]emory",
}  # fmt: skip
"""Kind of runtime error -> how its message begins."""
_WRONG = {
    "count": r"returned (a tuple of|one tensor|a single result|\d+ outputs)", "no tensor": r"returned a \w+ where",
    "device": r"returned a tensor ", "exception": r"raised ", "reference": r"the published (reference|test) ",
    "shape": r"output \d+ (has shape|is (\S+) \(.*\), expected \2 )", "dtype": r"output \d+ (has dtype|is torch\.)",
    "requires_grad": r"the result has requires_grad", "layout": r"output \d+ has (elements that share|strides)",
    "aliasing": r"output \d+ (must be the tensor|shares memory)|the result lies in the memory",
    "input changed": r"the (argument|input) .* (has another dtype or shape|was changed)|what lies between the elements",
    "not finite": r"(wrong values: .* holds|the factors hold) NaN or infinity",
    "windows": r"wrong positions: |wrong values: \d+ of \d+ planes", "invariant": r"broken promise: ",
    "values": r"wrong values: |output \d+(: cosine| is not equal| not within)",
    "statistical": r"as probabilities of|bit \d+: |keep rate |the mask|output \d+ was dropped|two (calls|generators)|generators in|"
    r"(rows|columns) are dropped|(numbers|samples|a mask) of an earlier|samples outside|all samples|the (mean|variance) is|"
    r"not (uniform|zero where|\(input)|more evenly|too coarse|\d+ of \d+ successes|runs of|(some )?elements (of|go)|the windows",
}  # fmt: skip
"""Kind of wrong result -> how the judge's reason begins."""
_STAGES = {"compile_error": "compile", "runtime_error": "runtime", "incorrect": "wrong"}
"""Verdict -> stage of the taxonomy, if it has another name."""


def _first(text: str, kinds: Mapping[str, str]) -> str | None:
    return next((k for k, pattern in kinds.items() if re.match(pattern, text, re.DOTALL)), None)


def wrong_kind(reason: str) -> str:
    """Classify a judge's reason.

    Args:
        reason: the text.

    Returns:
        A key of ``_WRONG``, "unwritten" (a kernel left elements out), "scheme" (neither the quantization scheme's
        result nor near it), or "other".
    """
    kind = _first(reason, _WRONG) or "other"
    if kind in ("values", "not finite"):
        return "unwritten" if "were never written" in reason else "scheme" if "dB of signal to noise" in reason else kind
    return kind


@dataclass(frozen=True)
class Failure(Result):
    """The failure of an answer.

    Attributes:
        stage: at which it fails.
        kind: of the failure at that stage.
        off: deviation in tolerances, for wrong values.
    """

    stage: str
    kind: str
    off: float | None

    @property
    def far(self) -> str | None:
        """The deviation in words."""
        words = {10.0: "under 10 tolerances", 1000.0: "10 to 1000 tolerances"}
        return None if self.off is None else next((w for most, w in words.items() if self.off < most), "1000 tolerances or more")


def failure_of(row: Row) -> Failure | None:
    """Classify a failure by verdict, first violation and first failed case.

    Args:
        row: the answer.

    Returns:
        The failure; ``None`` for correct and masked answers.
    """
    if row.correct or row.masked:
        return None
    stage, text = _STAGES.get(row.verdict, row.verdict), row.message.removeprefix("executed on the CPU tier: ")
    if stage == "rejected":
        return Failure(stage, next((v["rule"] for v in row.raw.get("violations") or ()), "other"), None)
    if stage == "wrong":
        failures = (row.raw.get("cases") or {}).get("failures") or ()
        # Without its cases a message still ends in the reason; the case's name before it may hold colons.
        texts = [f["reason"] for f in failures[:1]] or [text[m.end() :] for m in re.finditer(r"^|: ", text)]
        reason = next((t for t in texts if wrong_kind(t) != "other"), texts[0])
        off = re.search(r"is off by (\S+) times", reason)
        return Failure(stage, wrong_kind(reason), float(off[1]) if off else None)
    if stage == "malformed":
        return Failure(stage, _first(text, _MALFORMED) or "other", None)
    raised = re.match(r"(?:line \d+: )?((?:CompilationError: )?[A-Za-z]\w*)(?=: )", text)
    kind = "timeout" if stage == "timeout" else "ahead of time" if " for sm_" in text else _first(text, _RUNTIME)
    return Failure(stage, kind or (raised[1] if raised else "other"), None)


def taxonomy(rows: Sequence[Row]) -> tuple[tuple[str, str, str | None, int], ...]:
    """Return (stage, kind, deviation in words, number of answers), most frequent first."""
    found = Counter((f.stage, f.kind, f.far) for r in rows if (f := failure_of(r)))
    return tuple((*key, n) for key, n in sorted(found.items(), key=lambda x: (-x[1], *map(str, x[0]))))


@dataclass(frozen=True)
class Scheme(Result):
    """The parts of a quantization scheme that an answer gets right.

    Attributes:
        task: the task.
        sample: number of the answer.
        reached: part -> whether it is right; ``None`` if it cannot be derived.
        noise: signal to noise of the first wrong case, in dB.
        ideal: signal to noise of the scheme itself in that case, in dB.
    """

    task: str
    sample: int
    reached: Mapping[str, bool | None]
    noise: float | None
    ideal: float | None


def scheme(row: Row) -> Scheme | None:
    """Derive the parts of its scheme that a quantized answer gets right.

    They follow from values, launched products and the test with other integers. Right values show scale and rounding (a
    product of floats misses them). Wrong values do not show which of the two is wrong.

    Args:
        row: the answer.

    Returns:
        The parts; ``None`` for a task without a scheme.
    """
    truth = _contract(row.task)
    if row.masked or truth is None or row.raw.get("grading") == "paper":
        return None
    evidence, cases = row.raw.get("evidence") or {}, row.raw.get("cases") or {}
    broken = any(v["rule"] == "contract" for v in row.raw.get("violations") or ())
    shown = row.correct and evidence.get("moved_bytes") is not None  # executed on the CPU tier, so tested with other integers
    right = bool(cases.get("total")) and cases["passed"] == cases["total"]
    tested = {"products": "integer product", "roundings": "rounding", "bytes": "packed operands"}[truth.disturb]
    idle = tested == "integer product" and evidence.get("launches") and not any("i8*i8" in d for d in evidence.get("dots") or ())
    reached = dict.fromkeys(("scale", "rounding", "packed operands", "integer product"), None) | {
        "scale": right or None, "rounding": (right or None) if tested == "integer product" else None,
        tested: True if shown else False if broken or idle else None, "result": right,
    }  # fmt: skip
    db = re.search(r"(\S+) dB of signal .* has (\S+) dB", next((f["reason"] for f in cases.get("failures") or ()), ""))
    noise, ideal = (float(x) if math.isfinite(float(x)) else None for x in db.groups()) if db else (None, None)
    return Scheme(row.task, row.sample, reached, noise, ideal)


@functools.cache
def _contract(task: str) -> Any:
    from kbx_env.spec.catalog import load_task, task_ids
    from kbx_env.spec.criteria import QuantizationScheme

    truth = load_task(task).truth if task in task_ids() else None
    return truth if isinstance(truth, QuantizationScheme) else None
