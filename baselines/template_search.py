"""The policy ``template-search``: the project's own kernel with other block sizes, warps and stages; no model is asked.

    template-search                          successive halving, 12 gradings, seed 0
    template-search:random,evals=12,seed=0   random search: one grading for each setting
    template-search:halving,evals=12,seed=0,eta=3

Both grade the unchanged kernel first, and draw settings that change one to ``CHANGED`` numbers: a kernel has up to
forty, most of them for shapes and dtypes of other cases, and a change of all at once almost never compiles.

``halving`` works in three stages: the first one uses half of the gradings, the second one half of the rest. A stage
draws ``eta`` settings for each grading, compiles them (``search/compile_report.py``; half a second each, nothing is
executed), drops those that do not fit or launch the same as an earlier setting, and grades the best 1/eta. The first
stage draws from the whole space, the second one among neighbours of the best graded settings, the last one among
neighbours of the best setting only. In the first stage up to half of the settings change a single number by one step:
if the timed shapes then launch the same as before, the number is for other shapes, and later settings leave it alone.
Compilations do not count as gradings, but they take time: on the CPU backend about as much as a grading.
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
from kbx_env.baselines.search.compile_report import Compiler, CompileReport
from kbx_env.baselines.search.knobs import Knob, knobs_of, with_knobs
from kbx_env.baselines.search.rank import ENOUGH, ENOUGH_PRODUCTS, Ranked, pressure, rank

from kbx_env.envs.episode import Episode, Trajectory
from kbx_env.errors import UsageError
from kbx_env.outcome import Outcome
from kbx_env.spec.catalog import expert_source
from kbx_env.spec.task import Task

NAME = "template-search"
METHODS = ("random", "halving")
EVALS, ETA = 12, 3
CHANGED = 4
"""Most numbers that a drawn setting changes."""
TRIES = 200
"""Draws of known settings in a row that end the drawing; if at most ``FEW`` settings exist, the rest is listed."""
FEW = 10_000

Setting = tuple[tuple[str, int], ...]
"""The changed knobs, sorted by name; empty for the kernel as it is."""
_Candidate = tuple[tuple[float, ...], int, Setting]
"""Key of the compilation (smaller is better), order of drawing, and the setting."""
CompileFunction = Callable[[Task, str], CompileReport]


class TemplateSearch:
    """Searches over the numbers of a task's expert kernel, and hands in the best source that it graded."""

    name = NAME
    needs = Needs(grader_feedback=True)

    def __init__(
        self, method: str = "halving", evals: int = EVALS, seed: int = 0, eta: int = ETA,
        compiler: CompileFunction | None = None,
    ) -> None:  # fmt: skip
        """Prepare; no process is started yet.

        Args:
            method: one of ``METHODS``.
            evals: most gradings of a task, with that of the unchanged kernel.
            seed: of the draws, together with the task's id and the sample's number.
            eta: settings drawn for each one that is graded.
            compiler: reports on a source without grading it; by default a ``Compiler``.
        """
        self.method, self.evals, self.seed, self.eta = method, evals, seed, eta
        self._own = Compiler() if compiler is None and method == "halving" else None
        self._compile = compiler or self._own

    def prepare(self) -> None:
        """Start the compiler's sandbox, which serves all tasks."""
        if self._own is not None:
            self._own.start()

    def close(self) -> None:
        """End the compiler's sandbox."""
        if self._own is not None:
            self._own.close()

    def run(self, task: Task, env: Episode) -> Trajectory:
        """Search on one task.

        Args:
            task: the task.
            env: grades sources.

        Returns:
            The best source, with facts about the search in its notes.
        """
        source = expert_source(task.id)
        if source is None:
            return Trajectory(None, "there is no expert kernel for this task", tuple(env.turns))
        search = _Search(self, task, env, source, self._compile)
        search.run()
        return search.trajectory()


@dataclass
class _Graded:
    setting: Setting
    outcome: Outcome
    report: CompileReport | None


@dataclass
class _Search:
    """The search on one task.

    Attributes:
        begin: its begin, in ``time.perf_counter`` seconds.
        seen: settings that were drawn.
        launch_hashes: of the compiled settings; another source that launches the same is not graded.
        idle: names of knobs that do not change the launches of the timed shapes.
        reserve: compiled settings that fit, but were not among the best.
        rounds: number of batches of gradings.
        compiled: number of compiled settings.
        dropped: number of settings that were compiled and not kept.
        compile_seconds: wall time of compilation.
    """

    policy: TemplateSearch
    task: Task
    env: Episode
    source: str
    compile: CompileFunction | None
    begin: float = field(default_factory=time.perf_counter)
    graded: list[_Graded] = field(default_factory=list)
    seen: set[Setting] = field(default_factory=set)
    launch_hashes: set[str] = field(default_factory=set)
    reports: dict[Setting, CompileReport] = field(default_factory=dict)
    idle: set[str] = field(default_factory=set)
    reserve: list[_Candidate] = field(default_factory=list)
    rounds: int = 0
    compiled: int = 0
    dropped: int = 0
    compile_seconds: float = 0.0

    def __post_init__(self) -> None:
        self.knobs = knobs_of(self.source)
        self.random = random.Random(f"{self.policy.seed} {self.task.id} {self.env.sample}")
        self.total = math.prod(len(k.choices) for k in self.knobs)

    @property
    def active(self) -> list[Knob]:
        """Knobs that may change the launches of the timed shapes."""
        return [k for k in self.knobs if k.name not in self.idle]

    @property
    def left(self) -> int:
        """Number of gradings that are left."""
        return self.policy.evals - len(self.graded)

    def run(self) -> None:
        """Run the whole search."""
        self.seen.add(())
        if self.policy.method == "halving" and self.compile is not None and self.knobs:
            self._report(())
        self._grade([()])
        if self.policy.method == "random":
            self._grade(self._draw(self.left))
            return
        eta = self.policy.eta
        # Half of the gradings go to the whole space, a quarter to neighbours of the best settings, the rest to
        # neighbours of the best one.
        first = math.ceil(self.left / 2)
        singles = self._singles(eta * first // 2)
        drawn: Iterable[Setting] = itertools.chain(singles, self._lazily(eta * first - len(singles)))
        self._grade(self._promising(drawn, first))
        second = math.ceil(self.left / 2)
        best = [self.graded[r.index].setting for r in self._ranked()[: max(1, len(self.graded) // eta)]]
        self._grade(self._promising(self._near(best, eta * second), second))
        while self.left > 0:
            few = min(self.left, eta)
            settings = self._near([self.graded[self._ranked()[0].index].setting], eta * few) or self._draw(eta * few)
            if settings:
                self._grade(self._promising(settings, few))
            elif self.reserve:
                chosen = sorted(self.reserve)[:few]
                self.reserve = [r for r in self.reserve if r not in chosen]
                self._grade([setting for _, _, setting in chosen])
            else:
                return  # all settings have been graded or dropped

    def trajectory(self) -> Trajectory:
        """Return the best source, and facts about the search."""
        first = self._ranked()[0]
        best = self.graded[first.index]
        notes: dict[str, Any] = {
            "method": self.policy.method, "knobs": dict(best.setting), "rank": first.why, "evals": len(self.graded),
            "seconds": time.perf_counter() - self.begin, "settings": self.total, "found": first.index,
        }  # fmt: skip
        if self.policy.method == "halving":
            notes |= {"screened": self.compiled, "dropped": self.dropped, "screening_seconds": self.compile_seconds,
                      "idle": sorted(self.idle)}  # fmt: skip
        # An incorrect source is handed in too, and gets its verdict.
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
        """Return the graded settings, best first, judged by the builds of the timed shapes."""
        outcomes = [
            replace(g.outcome, compile=g.report.builds) if g.report and g.report.builds else g.outcome
            for g in self.graded
        ]
        return rank(outcomes)

    def _setting(self, values: Mapping[str, int]) -> Setting:
        unchanged = {k.name: k.value for k in self.knobs}
        return tuple(sorted((n, v) for n, v in values.items() if v != unchanged[n]))

    def _new(self, setting: Setting) -> bool:
        known = setting in self.seen
        self.seen.add(setting)
        return not known

    def _draw(self, count: int) -> list[Setting]:
        """Draw settings that were not drawn before, or fewer where there are no more."""
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
        """Draw numbers of the unchanged kernel, and change each one alone by one step."""
        some = self.random.sample(self.knobs, min(count, len(self.knobs)))
        steps = [self.random.choice(self._steps((), k)) for k in some]
        return [s for s in steps if self._new(s)]

    def _lazily(self, count: int) -> Iterator[Setting]:
        """Draw settings one by one, so that later draws leave out knobs that have been found idle in between."""
        for _ in range(count):
            drawn = self._draw(1)
            if not drawn:
                return
            yield from drawn

    def _near(self, settings: Iterable[Setting], count: int) -> list[Setting]:
        """Return unseen settings one step away, in random order, those near the first setting first."""
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
        near = [k for k in (at - 1, at + 1) if 0 <= k < len(knob.choices)]
        return [self._setting({**values, knob.name: knob.choices[k]}) for k in near]

    def _report(self, setting: Setting) -> CompileReport:
        assert self.compile is not None
        report = self.compile(self.task, self._text(setting))
        self.reports[setting] = report
        self.compiled += 1
        self.compile_seconds += report.seconds
        if report.launch_hash is not None:
            self.launch_hashes.add(report.launch_hash)
        return report

    def _promising(self, settings: Iterable[Setting], count: int) -> list[Setting]:
        """Compile settings, and return the ``count`` best ones."""
        if self.compile is None:
            return list(settings)[:count]
        kept: list[_Candidate] = []
        for setting in settings:
            known = set(self.launch_hashes)
            report = self._report(setting)
            launched = report.launch_hash
            if len(setting) == 1 and launched is not None and launched == self.reports[()].launch_hash:
                self.idle.add(setting[0][0])
            if not report.fits or launched in known:
                self.dropped += 1
                continue
            kept.append(((*_promise(report), len(setting)), self.compiled, setting))
        kept.sort()
        self.reserve += kept[count:]
        return [setting for _, _, setting in kept[:count]]


def _promise(report: CompileReport) -> tuple[float, ...]:
    """Return the key that orders compiled settings, smaller is better: spills at the limit, launches, occupancy.

    The traffic is not known. Of settings with equal keys the one with fewer changes goes first, because the unchanged
    kernel was tuned by hand; then the order of drawing decides.
    """
    p = pressure(report.builds)
    share = None if p.share is None else min(p.share, ENOUGH_PRODUCTS if report.products else ENOUGH)
    return (
        0.5 if p.capped is None else float(p.capped),
        math.inf if report.launches is None else float(report.launches),
        1.0 if share is None else -share,
    )


def build(argument: str | None, access: Access | None = None) -> TemplateSearch:
    """Make the policy.

    Args:
        argument: ``random`` or ``halving``, and any of ``evals=N``, ``seed=N`` and ``eta=N``, separated by commas.
        access: not used.

    Returns:
        The policy.

    Raises:
        UsageError: another argument, or one of them twice.
    """
    accepted = f"policy {NAME!r}: accepted are random or halving, evals=N (at least 1), seed=N, eta=N (at least 2)"
    method = "halving"
    numbers = {"evals": EVALS, "seed": 0, "eta": ETA}
    minimum = {"evals": 1, "seed": 0, "eta": 2}
    seen: set[str] = set()
    for part in (argument or "").split(",") if argument else ():
        key, equals, text = part.strip().partition("=")
        option = key if equals else "method"
        if option in seen or (equals and key not in numbers) or (not equals and key not in METHODS):
            raise UsageError(f"{accepted}; got {part.strip()!r}")
        seen.add(option)
        if not equals:
            method = key
        elif not text.isascii() or not text.isdigit() or int(text) < minimum[key]:
            raise UsageError(f"{accepted}; got {part.strip()!r}")
        else:
            numbers[key] = int(text)
    return TemplateSearch(method, numbers["evals"], numbers["seed"], numbers["eta"])
