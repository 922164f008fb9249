"""Models of the answers: which factor, category or method, explains whether answers are correct.

Explained deviance is computed as in the paper (abstract: category 9.4 %, method 3.3 %). The paper leaves out degrees of
freedom, tests, tasks as a random effect, a permutation test, and paired comparisons, which are here. A model that
cannot be fitted is ``None``, with the reason in ``reasons``.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from kbx_env.eval.report_data import PolicyStudy, Study
from kbx_env.eval.stats import LEVEL, Mean, Rate, Result, Spread, by_task, log_speedup, mean, rate, spread

from kbx_env.errors import UsageError
from kbx_env.extras import install_hint

FEW = 10
"""Fewer answers than this are not modelled."""
DRAWS = 2000
"""Draws of a permutation or sign-flip test."""
_Z = 1.959963984540054
"""The 97.5 % quantile of the normal distribution."""
_SETTINGS = ("backend", "device", "grading", "torch_ops", "split", "sizes")
"""Settings that a comparison of two policies names if they differ."""
_SD = (0.01, 12.0)
"""Bounds of the random effect's standard deviation."""


class _Cannot(Exception):
    """A model cannot be fitted; the message says why."""


Answers = Sequence[tuple[str | None, str, str, bool]]
"""(task, category, method, right) of each answer; a task that is ``None`` is not known."""


def answers(study: Study, outcome: str = "correct") -> Answers:
    """Return the judged answers of a study.

    Args:
        study: the answers.
        outcome: ``correct`` or ``compiled``.

    Returns:
        (task, category, method, right) of each.
    """
    return [(r.task, r.category, p.name, bool(getattr(r, outcome))) for p in study.policies for r in p.judged]


def expand(counts: Mapping[Any, tuple[int, int]]) -> Answers:
    """Return answers from published counts; their tasks are not known.

    Args:
        counts: ``method`` or ``(category, method)`` -> (correct, number of answers).

    Returns:
        (``None``, category, method, right) of each.
    """
    pairs = [(key if isinstance(key, tuple) else ("", key), k, n) for key, (k, n) in counts.items()]
    return [(None, *key, i < k) for key, k, n in pairs for i in range(n)]


@dataclass(frozen=True)
class Fit(Result):
    """A binomial model of single answers.

    Attributes:
        factors: of the model.
        n: answers.
        df: parameters beyond the intercept.
        deviance: of the model.
        null: deviance of the intercept alone.
        explained: 1 - deviance / null. This is McFadden's pseudo-R2 as well, since a single answer's saturated
            likelihood is 1.
        mcfadden: the same.
        adjusted: 1 - (log L - df) / log L0 (McFadden 1974); it subtracts what the parameters would explain by chance,
            and may be negative.
    """

    factors: tuple[str, ...]
    n: int
    df: int
    deviance: float
    null: float
    explained: float
    mcfadden: float
    adjusted: float


@dataclass(frozen=True)
class Test(Result):
    """A likelihood-ratio test. It assumes independent answers, which answers to one task are not.

    Attributes:
        factor: the factor that is tested.
        given: the factor that both models have; ``None`` for the intercept alone.
        chi2: twice the difference of the log-likelihoods.
        df: degrees of freedom.
        p: of the test.
    """

    factor: str
    given: str | None
    chi2: float
    df: int
    p: float


@dataclass(frozen=True)
class Mixed(Result):
    """Logistic model with a normal random effect of the task: maximum likelihood, Wald intervals.

    Attributes:
        tasks: number of tasks.
        sd: standard deviation of the random effect, (estimate, low, high).
        log_odds: of each method on a task of average difficulty, (estimate, low, high).
        reference: the method with the largest share of correct answers.
        against: difference of each other method's log-odds to the reference.
        left_out: methods that are always or never correct, whose odds are infinite.
    """

    tasks: int
    sd: tuple[float, float | None, float | None]
    log_odds: Mapping[str, tuple[float, float, float]]
    reference: str
    against: Mapping[str, tuple[float, float, float]]
    left_out: tuple[str, ...]


@dataclass(frozen=True)
class Permutation(Result):
    """A permutation test of the methods' explained deviance.

    Attributes:
        explained: by the methods as they are.
        by_chance: mean when methods are exchanged within tasks.
        p: share of the draws with at least the explained deviance; the data counts as one draw.
        draws: number of draws.
    """

    explained: float
    by_chance: float
    p: float
    draws: int


@dataclass(frozen=True)
class Analysis(Result):
    """All models of the answers.

    Attributes:
        n: answers.
        fits: by ``category``, ``method`` and ``both``.
        tests: of the factors.
        mixed: the mixed model.
        permutation: the permutation test.
        reasons: name of a missing part -> why it is missing.
    """

    n: int
    fits: Mapping[str, Fit]
    tests: tuple[Test, ...]
    mixed: Mixed | None
    permutation: Permutation | None
    reasons: Mapping[str, str]


def analyse(data: Answers, seed: int = 0, draws: int = DRAWS) -> Analysis:
    """Fit all models.

    Args:
        data: the answers.
        seed: of the permutation test.
        draws: of the permutation test.

    Returns:
        The models; parts that cannot be fitted are missing, with a reason.

    Raises:
        UsageError: statsmodels is not installed.
    """
    reasons: dict[str, str] = {}

    def attempt(name: str, make: Callable[[], Any]) -> Any:
        try:
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")
                return make()
        except _Cannot as e:
            reasons[name] = str(e)
        except UsageError:
            raise
        except (ArithmeticError, ValueError, np.linalg.LinAlgError) as e:
            reasons[name] = f"the fit failed: {e}"
        return None

    names = {"category": ("category",), "method": ("method",), "both": ("category", "method")}
    fits = {k: f for k, v in names.items() if (f := attempt(k, lambda v=v: deviance(data, v))) is not None}  # type: ignore[misc]
    tests = [_test(k, None, fits[k].null - fits[k].deviance, fits[k].df) for k in ("category", "method") if k in fits]
    for k, other in (("category", "method"), ("method", "category")):
        if "both" in fits and other in fits and fits["both"].df > fits[other].df:
            less, more = fits[other], fits["both"]
            tests.append(_test(k, other, less.deviance - more.deviance, more.df - less.df))
    return Analysis(len(data), fits, tuple(tests), attempt("mixed", lambda: mixed(data)),
                    attempt("permutation", lambda: permuted(data, seed, draws)), reasons)  # fmt: skip


def _test(factor: str, given: str | None, chi2: float, df: int) -> Test:
    from scipy.stats import chi2 as distribution

    return Test(factor, given, max(0.0, chi2), df, float(distribution.sf(max(0.0, chi2), df)))


def _checked(data: Answers, *factors: str) -> tuple[list[np.ndarray], np.ndarray]:
    """Return the codes of the factors' levels, and whether each answer is correct.

    Args:
        data: the answers.
        *factors: ``category`` or ``method``.

    Returns:
        An array of codes for each factor, and an array of booleans.

    Raises:
        _Cannot: a factor or the answers do not vary, or there are too few.
    """
    if len(data) < FEW:
        raise _Cannot(f"{len(data)} answers are too few; at least {FEW}")
    right = np.array([float(a[3]) for a in data])
    if len(set(right)) < 2:
        raise _Cannot(f"every answer is {'right' if right[0] else 'wrong'}: there is nothing to explain")
    codes = [np.unique([a[1 if f == "category" else 2] for a in data], return_inverse=True)[1] for f in factors]
    if alone := [f for f, c in zip(factors, codes, strict=True) if not c.any()]:
        raise _Cannot(f"there is only one {alone[0]}")
    return codes, right


def _bernoulli(k: Any, n: Any) -> float:
    """Return the deviance of groups of n answers of which k are correct, each group at its own share."""
    from scipy.special import xlogy

    return float(-2 * np.sum(xlogy(k, k / n) + xlogy(n - k, (n - k) / n)))


def deviance(data: Answers, factors: Sequence[str]) -> Fit:
    """Fit a binomial GLM with a logit link of the factors' main effects (statsmodels).

    A level that is always or never correct is fitted at infinity: it adds no deviance and leaves the fit, but its
    parameter counts.

    Args:
        data: the answers.
        factors: ``category``, ``method``, or both.

    Returns:
        The fit.

    Raises:
        UsageError: statsmodels is not installed.
    """
    try:
        import statsmodels.api as sm
    except ImportError as e:
        raise UsageError(f"the models need statsmodels: {install_hint('report')}") from e
    codes, y = _checked(data, *factors)
    df = int(np.linalg.matrix_rank(_design(codes))) - 1
    if df + 1 >= len(y):
        raise _Cannot(f"{df + 1} parameters for {len(y)} answers")
    keep = np.ones(len(y), dtype=bool)
    while True:
        fixed = [(c == level) & keep for c in codes for level in np.unique(c[keep])]
        fixed = [f for f in fixed if len(np.unique(y[f])) < 2]
        if not fixed:
            break
        keep &= ~np.any(fixed, axis=0)
    apart = _Cannot(f"perfect separation: {' and '.join(factors)} tell every answer")
    if not keep.any():
        raise apart
    rows, count = np.unique(np.column_stack([*(c[keep] for c in codes), y[keep]]), axis=0, return_counts=True)
    model = sm.GLM(rows[:, -1], _design(list(rows[:, :-1].T)), family=sm.families.Binomial(), freq_weights=count)
    left, null = float(model.fit(maxiter=200).deviance), _bernoulli(y.sum(), len(y))
    if not math.isfinite(left) or left < 1e-6 * null:
        raise apart
    left = min(left, null)  # a rounding above it, where the factors tell nothing
    explained = 1 - left / null
    return Fit(tuple(factors), len(y), df, left, null, explained, explained, 1 - (left + 2 * df) / null)


def _design(codes: Sequence[np.ndarray]) -> np.ndarray:
    """Return the design matrix: an intercept, and an indicator of every level but the first of each factor."""
    columns = [np.ones(len(codes[0]))] + [(c == level).astype(float) for c in codes for level in np.unique(c)[1:]]
    return np.column_stack(columns)


def _cells(data: Answers) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Return the correct answers and all answers by task and method (two matrices), and the methods' names."""
    _, right = _checked(data)
    if any(a[0] is None for a in data):
        raise _Cannot("which tasks the answers belong to is not known")
    tasks, task = np.unique([a[0] for a in data], return_inverse=True)  # type: ignore[type-var]
    names, method = np.unique([a[2] for a in data], return_inverse=True)
    k, n = np.zeros((2, len(tasks), len(names)))
    np.add.at(n, (task, method), 1)
    np.add.at(k, (task, method), right)
    return k, n, [str(m) for m in names]


def mixed(data: Answers) -> Mixed:
    """Fit a `Mixed` model.

    The random effect of each task is integrated numerically on a grid. This is exact, while the intervals of
    variational fits are too narrow.

    Args:
        data: the answers.

    Returns:
        The fit.
    """
    from scipy.optimize import minimize
    from scipy.special import expit, logsumexp

    k, n, names = _cells(data)
    some = (k.sum(0) > 0) & (k.sum(0) < n.sum(0))
    k, n, left_out = k[:, some], n[:, some], tuple(m for m, s in zip(names, some, strict=True) if not s)
    names = [m for m, s in zip(names, some, strict=True) if s]
    if not names or not (n.sum(1) > 1).any():
        raise _Cannot("no task has two answers of methods that are sometimes right: tasks cannot be told from chance")
    z = np.arange(-6, 6.01, 0.05)
    weight = -(z**2) / 2 - logsumexp(-(z**2) / 2)

    def loss(x: np.ndarray) -> tuple[float, np.ndarray]:
        u = math.exp(x[-1]) * z
        eta = x[:-1, None] + u  # methods x grid
        each = k @ eta - n @ np.logaddexp(0, eta) + weight  # tasks x grid
        total = logsumexp(each, axis=1)
        after = np.exp(each - total[:, None])
        p = expit(eta)
        slope = [float((after * (k[:, [m]] - n[:, [m]] * p[m])).sum()) for m in range(len(names))]
        return -float(total.sum()), -np.array([*slope, float((after * ((k.sum(1)[:, None] - n @ p) * u)).sum())])

    share = k.sum(0) / n.sum(0)
    start = np.append(np.log(share / (1 - share)), 0.0)
    bounds = [(-40.0, 40.0)] * len(names) + [(math.log(_SD[0]), math.log(_SD[1]))]
    best = minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": 500, "ftol": 1e-12})
    sd = math.exp(best.x[-1])
    if not math.isfinite(best.fun) or sd > 0.99 * _SD[1]:
        raise _Cannot("tasks tell nearly every answer: their random effect has no finite spread")
    free = len(best.x) - (flat := sd < 1.01 * _SD[0])  # at the boundary only the methods have a curvature
    step = 1e-4 * np.eye(len(best.x))
    hessian = np.array([(loss(best.x + s)[1] - loss(best.x - s)[1])[:free] / 2e-4 for s in step[:free]])
    cover = np.linalg.inv((hessian + hessian.T) / 2)
    if (np.diag(cover) <= 0).any():
        raise _Cannot("the likelihood has no clear maximum")

    def interval(c: np.ndarray) -> tuple[float, float, float]:
        centre, half = float(c @ best.x[: len(names)]), _Z * math.sqrt(c @ cover[: len(names), : len(names)] @ c)
        return centre, centre - half, centre + half

    unit, top, half = np.eye(len(names)), int(np.argmax(share)), 0.0 if flat else _Z * math.sqrt(cover[-1, -1])
    return Mixed(
        len(k), (0.0, None, None) if flat else (sd, sd * math.exp(-half), sd * math.exp(half)),
        {m: interval(unit[i]) for i, m in enumerate(names)}, names[top],
        {m: interval(unit[i] - unit[top]) for i, m in enumerate(names) if i != top}, left_out,
    )  # fmt: skip


def permuted(data: Answers, seed: int = 0, draws: int = DRAWS) -> Permutation:
    """Test the methods' explained deviance by permutations.

    Each draw deals the shares of correct answers of a task anew among the methods that answered it.

    Args:
        data: the answers.
        seed: of the draws.
        draws: how many.

    Returns:
        The result of the test.
    """
    k, n, names = _cells(data)
    if len(names) < 2:
        raise _Cannot("there is only one method")
    there = n > 0
    share = np.where(there, k / np.maximum(n, 1), 0.0)
    total, of = float(share.sum()), there.sum(0).astype(float)
    null = _bernoulli(total, of.sum())

    def explained(x: np.ndarray) -> float:
        return 1 - _bernoulli(x.sum(0), of) / null

    rng, found = np.random.default_rng(seed), np.empty(draws)
    present_first = np.argsort(~there, axis=1, kind="stable")  # by task, the methods that answered it come first
    for i in range(draws):
        order = np.argsort(np.where(there, rng.random(there.shape), 2.0), axis=1)
        dealt = np.zeros_like(share)
        np.put_along_axis(dealt, present_first, np.take_along_axis(share, order, 1), 1)
        found[i] = explained(dealt)
    observed = explained(share)
    return Permutation(observed, float(found.mean()), (1 + int((found >= observed - 1e-9).sum())) / (1 + draws), draws)


@dataclass(frozen=True)
class Paired(Result):
    """Two policies on the tasks on which both were judged; differences are ``a`` minus ``b``.

    Attributes:
        a: name of a policy.
        b: name of the other.
        tasks: that both were judged on.
        both: tasks whose first judged answer is correct of both.
        only_a: tasks whose first judged answer is correct of ``a`` only.
        only_b: tasks whose first judged answer is correct of ``b`` only.
        several: whether a task has several answers.
        p: of an exact McNemar test; with several answers a task, of a sign-flip test of the shares.
        difference: of the shares correct per task.
        speed: speedup of ``a`` over that of ``b``, geometric mean over tasks that both solved; ``None`` if not timed,
            or timed on different devices or sizes.
        differ: settings in which the runs differ.
    """

    a: str
    b: str
    tasks: int
    both: int
    only_a: int
    only_b: int
    several: bool
    p: float
    difference: Mean | None
    speed: Mean | None
    differ: tuple[str, ...]

    @property
    def sentence(self) -> str:
        """A sentence on correctness that claims no more than both the interval and the test support."""
        d = self.difference
        if d is None:
            return f"{self.a} and {self.b} have no judged task in common."
        end = f" (the runs differ in {', '.join(self.differ)})." if self.differ else "."
        sign = 1 if (d.value, self.only_a) >= (0, self.only_b) else -1
        x, y, i, j = (self.a, self.b, self.only_a, self.only_b) if sign > 0 else (self.b, self.a, self.only_b, self.only_a)
        if not self.several and not i + j:
            return f"{x} and {y} solve the same {self.both} of {self.tasks} tasks{end}"
        start = f"{x} solves {i} task{'s' * (i != 1)} that {y} does not, {y} {j} the other way"
        start = f"{x} beside {y} on {self.tasks} tasks with several answers" if self.several else start
        difference = f"the difference of {100 * abs(d.value):.1f} points"
        if d.low is not None and d.high is not None:
            low, high = sorted((sign * d.low, sign * d.high))
            difference += f" (95 % {100 * low:.1f} to {100 * high:.1f})"
            if low <= 0 <= high:
                return f"{start}; {difference} may be chance{end}"
        said = "is clear of zero" if self.p < 1 - LEVEL else f"is not settled: the test has p = {self.p:.2f}"
        return f"{start}; {difference} {said}{end}"


def paired(a: PolicyStudy, b: PolicyStudy, seed: int = 0) -> Paired:
    """Compare two policies task by task.

    The McNemar test is scipy's exact binomial test. The sign-flip test is ours: scipy's ``permutation_test`` draws
    other numbers, so that p-values of earlier reports would change.

    Args:
        a: a policy.
        b: another policy.
        seed: of the sign flips and the bootstrap.

    Returns:
        The comparison.
    """
    from scipy.stats import binomtest

    rows = [{t: [r for r in p.judged if r.task == t] for t in {r.task for r in p.judged}} for p in (a, b)]
    tasks = sorted(rows[0].keys() & rows[1].keys())
    firsts = [[min(side[t], key=lambda r: r.sample).correct for t in tasks] for side in rows]
    shares = [np.array([np.mean([r.correct for r in side[t]]) for t in tasks]) for side in rows]
    logs = [{t: s / n for t in tasks for s, n in zip(*by_task(side[t], log_speedup), strict=True)} for side in rows]
    only_a, only_b = (sum(x and not y for x, y in zip(*order, strict=True)) for order in (firsts, firsts[::-1]))
    several = any(len(side[t]) > 1 for side in rows for t in tasks)
    gap = shares[0] - shares[1]
    if several:
        flips = np.random.default_rng(seed).choice([-1.0, 1.0], (DRAWS, len(gap))) @ gap
        p = (1 + int((abs(flips) >= abs(gap.sum()) - 1e-9).sum())) / (1 + DRAWS)
    else:
        p = float(binomtest(only_a, only_a + only_b).pvalue) if only_a + only_b else 1.0
    first, second = ({**p.manifest, "sizes": p.sizes} for p in (a, b))
    differ = tuple(k for k in _SETTINGS if first.get(k) != second.get(k))
    apart = "device" in differ or "sizes" in differ
    shared = [logs[0][t] - logs[1][t] for t in tasks if t in logs[0] and t in logs[1]] if not apart else []
    speed = mean(shared, seed=seed)
    return Paired(a.name, b.name, len(tasks), sum(map(all, zip(*firsts, strict=True))), only_a, only_b, several, p,
                  mean(list(gap), seed=seed), speed and speed.exp(), differ)  # fmt: skip


@dataclass(frozen=True)
class Noise(Result):
    """The precision of speedups.

    Attributes:
        half_widths: of the 95 % intervals on the log scale (0.01 is 1 %).
        covers: of a policy named ``eager``, the share of intervals that contain 1, which should be 95 %; ``None`` if
            there is none.
    """

    half_widths: Spread
    covers: Rate | None


def noise(study: Study) -> Noise | None:
    """Return the precision of a study's speedups; ``None`` if nothing was timed."""
    timed = [(p.name, r, r.low, r.high) for p in study.policies for r in p.judged if r.correct and r.low and r.high]
    same = [r for name, r, _, _ in timed if re.match(r"eager\b", name)]
    covers = rate(same, lambda r: (r.low or 0) <= 1 <= (r.high or 0)) if same else None
    return Noise(spread([math.log(high / low) / 2 for _, _, low, high in timed]), covers) if timed else None
