"""Search without a model: the project's own kernel with other block sizes, warps and stages.

    template-search                          successive halving, 12 gradings, seed 0
    template-search:random,evals=12,seed=0   as many settings as there are gradings, drawn blindly
    template-search:halving,evals=12,seed=0,eta=3

Both begin with the kernel as it is and draw settings that change one to ``CHANGED`` numbers: a kernel has up to forty, most of
them for shapes and types of other cases, and changing all at once all but never compiles. ``halving`` draws ``eta`` settings
for each one that it grades and asks the compiler about them first (``search/screen.py``, half a second, nothing executed):
what does not fit, or launches just what another setting launches, is dropped, and the best 1/eta are graded. Up to half of these
questions change a single number by one step: where the timed shapes launch the same as before, it is a number for other shapes and
is left alone from then on. Then come the neighbours of the best graded ones, screened likewise, and at the end the neighbours of
the best one alone. The compiler's questions are no gradings, but they take time: on the CPU tier about as much as a grading.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kbx_env.baselines.llm.access import Access
from kbx_env.baselines.policy import Needs
from kbx_env.baselines.search.knobs import Knob, knobs_of, with_knobs
from kbx_env.baselines.search.rank import ENOUGH, ENOUGH_PRODUCTS, Ranked, pressure, rank
from kbx_env.baselines.search.screen import Compiler, Report

from kbx_env.envs.episode import Episode, Trajectory
from kbx_env.errors import UsageError
from kbx_env.outcome import Outcome
from kbx_env.spec.catalog import expert_source
from kbx_env.spec.task import Task

NAME = "template-search"
METHODS = ("random", "halving")
EVALS, ETA = 12, 3
CHANGED = 4
TRIES = 200
"""Draws of a setting that were all known before the settings count as used up, or are listed where they are at most ``FEW``."""
FEW = 10_000

Setting = tuple[tuple[str, int], ...]
"""The changed knobs, sorted by name; empty for the kernel as it is."""
Promise = tuple[tuple[float, ...], int, Setting]
Ask = Callable[[Task, str], Report]


class TemplateSearch:
    """An episodic policy; ``evals`` is the number of gradings it may use."""

    name = NAME
    needs = Needs(grader_feedback=True)

    def __init__(
        self, method: str = "halving", evals: int = EVALS, seed: int = 0, eta: int = ETA, compiler: Ask | None = None
    ) -> None:
        """A search.

        Args:
            method: one of ``METHODS``.
            evals: gradings at most, the first one included.
            seed: of the draws; task and sample number are mixed in.
            eta: settings drawn for each one that is graded.
            compiler: reports on a source without grading it; the sandbox's if not given.
        """
        self.method, self.evals, self.seed, self.eta = method, evals, seed, eta
        self._own = Compiler() if compiler is None and method == "halving" else None
        self._ask = compiler or self._own

    def prepare(self) -> None:
        """Start what is started once for all tasks."""
        if self._own is not None:
            self._own.start()

    def close(self) -> None:
        """End the compiler's sandbox."""
        if self._own is not None:
            self._own.close()

    def run(self, task: Task, env: Episode) -> Trajectory:
        """Search on one task."""
        source = expert_source(task.id)
        if source is None:
            return Trajectory(None, "there is no kernel of the project's to begin with", tuple(env.turns))
        search = _Search(self, task, env, source, self._ask)
        search.run()
        return search.trajectory()


@dataclass
class _Graded:
    setting: Setting
    outcome: Outcome
    report: Report | None


@dataclass
class _Search:
    policy: TemplateSearch
    task: Task
    env: Episode
    source: str
    ask: Ask | None
    begin: float = field(default_factory=time.perf_counter)
    graded: list[_Graded] = field(default_factory=list)
    seen: set[Setting] = field(default_factory=set)
    """Settings that were drawn."""
    same: set[str] = field(default_factory=set)
    """Programs that were kept for a grading: a second source that launches the same would tell nothing."""
    reports: dict[Setting, Report] = field(default_factory=dict)
    idle: set[str] = field(default_factory=set)
    """Knobs that made no difference to what the timed shapes launch."""
    reserve: list[Promise] = field(default_factory=list)
    """Settings that were screened and fit, but were not among the best."""
    rounds: int = 0
    screened: int = 0
    dropped: int = 0
    screening: float = 0.0

    def __post_init__(self) -> None:
        self.knobs = knobs_of(self.source)
        self.random = random.Random(f"{self.policy.seed} {self.task.id} {self.env.sample}")
        self.total = math.prod(len(k.choices) for k in self.knobs)

    @property
    def active(self) -> list[Knob]:
        """Knobs that the timed shapes may notice."""
        return [k for k in self.knobs if k.name not in self.idle]

    @property
    def left(self) -> int:
        """Gradings that may still be asked for."""
        return self.policy.evals - len(self.graded)

    def run(self) -> None:
        """All rungs."""
        self.seen.add(())
        if self.policy.method == "halving" and self.ask is not None and self.knobs:
            self._report(())
        self._grade([()])
        if self.policy.method == "random":
            self._grade(self._draw(self.left))
            return
        eta = self.policy.eta
        # Half of the gradings look around, a quarter near the best ones, the rest near the best one.
        first = math.ceil(self.left / 2)
        singles = self._singles(eta * first // 2)
        self._grade(self._screened(itertools.chain(singles, self._lazily(eta * first - len(singles))), first))
        second = math.ceil(self.left / 2)
        best = [self.graded[r.index].setting for r in self._ranked()[: max(1, len(self.graded) // eta)]]
        self._grade(self._screened(self._near(best, eta * second), second))
        while self.left > 0:
            few = min(self.left, eta)
            drawn = self._near([self.graded[self._ranked()[0].index].setting], eta * few) or self._draw(eta * few)
            if drawn:
                self._grade(self._screened(drawn, few))
            elif self.reserve:
                chosen = sorted(self.reserve)[:few]
                self.reserve = [r for r in self.reserve if r not in chosen]
                self._grade([setting for _, _, setting in chosen])
            else:
                return  # used up

    def trajectory(self) -> Trajectory:
        """The best source and how it was found."""
        first = self._ranked()[0]
        best = self.graded[first.index]
        notes: dict[str, Any] = {
            "method": self.policy.method, "knobs": dict(best.setting), "rank": first.why, "evals": len(self.graded),
            "seconds": time.perf_counter() - self.begin, "settings": self.total, "found": first.index,
        }  # fmt: skip
        if self.policy.method == "halving":
            notes |= {"screened": self.screened, "dropped": self.dropped, "screening_seconds": self.screening,
                      "idle": sorted(self.idle)}  # fmt: skip
        # A source that is not correct is handed in all the same: the verdict says what it is worth.
        return Trajectory(self._text(best.setting), turns=tuple(self.env.turns), notes=notes)

    def _text(self, setting: Setting) -> str:
        return with_knobs(self.source, dict(setting))

    def _grade(self, settings: Sequence[Setting]) -> None:
        settings = settings[: self.left]
        if not settings:
            return
        labels = [", ".join(f"{k}={v}" for k, v in s) or "as it is" for s in settings]
        outcomes = self.env.grade([self._text(s) for s in settings], round=self.rounds, labels=labels)
        self.rounds += 1
        self.graded += [_Graded(s, o, self.reports.get(s)) for s, o in zip(settings, outcomes, strict=True)]

    def _ranked(self) -> list[Ranked]:
        """The graded settings, best first. What the compiler says of the timed shapes goes before what it says of small ones."""
        outcomes = [
            replace(g.outcome, compile=g.report.builds) if g.report and g.report.builds else g.outcome for g in self.graded
        ]
        return rank(outcomes)

    def _setting(self, values: Mapping[str, int]) -> Setting:
        now = {k.name: k.value for k in self.knobs}
        return tuple(sorted((n, v) for n, v in values.items() if v != now[n]))

    def _new(self, setting: Setting) -> bool:
        known = setting in self.seen
        self.seen.add(setting)
        return not known

    def _draw(self, count: int) -> list[Setting]:
        """Settings that nobody has seen: fewer than asked for where they are used up."""
        found: list[Setting] = []
        tries = 0
        knobs = self.active
        while knobs and len(found) < count and tries < TRIES:
            some = self.random.sample(knobs, self.random.randint(1, min(CHANGED, len(knobs))))
            setting = self._setting({k.name: self.random.choice(k.choices) for k in some})
            tries = 0 if (new := self._new(setting)) else tries + 1
            if new:
                found.append(setting)
        if len(found) < count and knobs and math.prod(len(k.choices) for k in knobs) <= FEW:
            every = itertools.product(*([(k.name, v) for v in k.choices] for k in knobs))
            rest = [s for values in every if (s := self._setting(dict(values))) not in self.seen]
            found += self.random.sample(rest, min(count - len(found), len(rest)))
            self.seen.update(found)
        return found

    def _singles(self, count: int) -> list[Setting]:
        """The kernel as it is with one number a step away, for as many numbers."""
        some = self.random.sample(self.knobs, min(count, len(self.knobs)))
        steps = [self.random.choice(self._steps((), k)) for k in some]
        return [s for s in steps if self._new(s)]

    def _lazily(self, count: int) -> Iterator[Setting]:
        """Draws that know what has been found idle meanwhile."""
        for _ in range(count):
            drawn = self._draw(1)
            if not drawn:
                return
            yield from drawn

    def _near(self, settings: Iterable[Setting], count: int) -> list[Setting]:
        """Unseen settings one step away, in random order, those of the first setting first."""
        found: list[Setting] = []
        for setting in settings:
            steps = [s for k in self.active for s in self._steps(setting, k)]
            self.random.shuffle(steps)
            for s in steps:
                if len(found) == count:
                    return found
                if self._new(s):
                    found.append(s)
        return found

    def _steps(self, setting: Setting, knob: Knob) -> list[Setting]:
        values = dict(setting)
        at = knob.choices.index(values.get(knob.name, knob.value))
        return [self._setting({**values, knob.name: knob.choices[k]}) for k in (at - 1, at + 1) if 0 <= k < len(knob.choices)]

    def _report(self, setting: Setting) -> Report:
        assert self.ask is not None
        report = self.ask(self.task, self._text(setting))
        self.reports[setting] = report
        self.screened += 1
        self.screening += report.seconds
        if report.same is not None:
            self.same.add(report.same)
        return report

    def _screened(self, settings: Iterable[Setting], count: int) -> list[Setting]:
        """The ``count`` settings of which the compiler says the best."""
        if self.ask is None:
            return list(settings)[:count]
        kept: list[Promise] = []
        for setting in settings:
            known = set(self.same)
            report = self._report(setting)
            if len(setting) == 1 and report.same is not None and report.same == self.reports[()].same:
                self.idle.add(setting[0][0])
            if not report.fits or report.same in known:
                self.dropped += 1
                continue
            kept.append(((*_promise(report), len(setting)), self.screened, setting))
        kept.sort()
        self.reserve += kept[count:]
        return [setting for _, _, setting in kept[:count]]


def _promise(report: Report) -> tuple[float, ...]:
    """What the compiler's word is worth, smaller is better: spills at the cap, launches, the share of the warps.

    It says nothing about traffic: between settings alike in these, the one nearer to the kernel as it is goes first, which was
    tuned by hand; then the order of drawing decides.
    """
    p = pressure(report.builds)
    share = None if p.share is None else min(p.share, ENOUGH_PRODUCTS if report.products else ENOUGH)
    return (
        0.5 if p.capped is None else float(p.capped),
        math.inf if report.launches is None else float(report.launches),
        1.0 if share is None else -share,
    )


def build(argument: str | None, access: Access | None = None) -> TemplateSearch:
    """``random`` or ``halving``, and any of ``evals=``, ``seed=`` and ``eta=``, comma-separated.

    Raises:
        UsageError: anything else.
    """
    accepted = f"policy {NAME!r}: accepted are random or halving, evals=N (at least 1), seed=N, eta=N (at least 2)"
    method = "halving"
    numbers = {"evals": EVALS, "seed": 0, "eta": ETA}
    least = {"evals": 1, "seed": 0, "eta": 2}
    given: set[str] = set()
    for part in (argument or "").split(",") if argument else ():
        key, equals, text = part.strip().partition("=")
        what = key if equals else "method"
        if what in given or (equals and key not in numbers) or (not equals and key not in METHODS):
            raise UsageError(f"{accepted}; got {part.strip()!r}")
        given.add(what)
        if not equals:
            method = key
        elif not text.isascii() or not text.isdigit() or int(text) < least[key]:
            raise UsageError(f"{accepted}; got {part.strip()!r}")
        else:
            numbers[key] = int(text)
    return TemplateSearch(method, numbers["evals"], numbers["seed"], numbers["eta"])
