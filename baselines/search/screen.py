"""What the compiler says of a source, without executing a kernel: the cheap rung of a search.

The source runs in the sandbox as in a grading on the CPU tier, on stand-ins of the timed shapes, but nobody executes what it
launches. Kernels are compiled for one target, as the timed cases launch them first. That tells what no small correctness case
shows: shared memory beyond the limit, spills, how many programs there are. It tells nothing about right or wrong.
"""

from __future__ import annotations

import hashlib
import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kbx_env.errors import KbxError
from kbx_env.outcome import Build
from kbx_env.spec.task import Case, Task

TARGET = "sm_90"
SECONDS = 10.0
"""For one source, compilation included: what takes longer is not worth a grading."""
_PLACE = re.compile(r"\s*loc\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)|^#loc.*$", re.MULTILINE)
_NAME = re.compile(r"tt\.func public @([\w.$]+)")


@dataclass(frozen=True)
class Report:
    """The compiler's word on one source: ``builds`` of the largest timed case come first.

    ``programs`` of a kernel are those of its first launch in the largest timed case. ``same`` is equal for sources that launch
    the same code on the same grids in every timed case. ``failure`` says why there is no report. ``None`` is not known;
    ``seconds`` is wall time.
    """

    builds: tuple[Build, ...] = ()
    programs: Mapping[str, int] | None = None
    launches: int | None = None
    products: bool = False
    """Whether a matrix product is compiled in."""
    same: str | None = None
    failure: str | None = None
    fatal: bool = False
    """Whether the failure is the source's own, which no grading would forgive."""
    seconds: float = 0.0

    @property
    def fits(self) -> bool:
        """Whether nothing is known that speaks against a grading."""
        return not self.fatal and all(b.ok for b in self.builds)


class Compiler:
    """Reports on sources, with a warm sandbox of its own that starts when it is first needed."""

    def __init__(self, target: str = TARGET, seconds: float = SECONDS) -> None:
        self.target, self.seconds = target, seconds
        self._grader: Any = None

    def start(self) -> None:
        """Start the sandbox now, so that no search waits for it.

        Raises:
            SandboxError: it does not start.
        """
        if self._grader is None:
            import atexit

            from kbx_env.grading.grader import Grader

            self._grader = Grader()
            atexit.register(self.close)
        self._grader.zygote()

    def close(self) -> None:
        """End the sandbox."""
        grader, self._grader = self._grader, None
        if grader is not None:
            grader.close()

    def __call__(self, task: Task, source: str) -> Report:
        """The report on a source; never an exception of the source's."""
        from kbx_env.grading.runtime.untrusted import GradingAborted

        begin = time.perf_counter()
        try:
            self.start()
            made = self._report(task, source)
        except GradingAborted as e:
            made = Report(failure=f"{e.verdict}: {e.message}"[:300], fatal=str(e.verdict) != "infra_fault")
        except KbxError as e:  # the sandbox's trouble says nothing about the source
            made = Report(failure=str(e)[:300])
        return replace(made, seconds=time.perf_counter() - begin)

    def _report(self, task: Task, source: str) -> Report:
        from kbx_env.grading.static.screen import screen

        data = source.encode("utf-8", "surrogatepass")
        screened = screen(task, data)
        if screened.verdict is not None:
            return Report(failure=screened.message[:300], fatal=True)
        cases = sorted(task.timed, key=_size, reverse=True)
        builds: list[Build] = []
        kernels: dict[str, Any] = {}
        launches: list[list[tuple[str, tuple[int, ...]]]] = []
        begin = time.monotonic()
        with self._talk(task) as talk:
            talk.load(data)
            for case in cases:
                message, _ = talk.ask(_header(task, talk, case))
                if "want" in message:
                    return Report(failure="the host reads a value back: there is none without executing")
                kernels |= message["kernels"]
                launches.append([(str(s[1]), tuple(s[2])) for s in message["steps"] if s[0] == "launch"])
                if len(launches) == 1:
                    builds += self._build(talk)
        texts = {key: f"{k['options']} {k['fused']} {_PLACE.sub('', k['text'])}" for key, k in kernels.items()}
        # A process compiles a kernel as it is launched first: what another case launches otherwise takes another process.
        told = {texts[key] for key, _ in launches[0]}
        for case, made in zip(cases[1:], launches[1:], strict=True):
            if not {texts[key] for key, _ in made} <= told and time.monotonic() - begin < self.seconds:
                told |= {texts[key] for key, _ in made}
                with self._talk(task) as talk:
                    talk.load(data)
                    talk.ask(_header(task, talk, case))
                    builds += self._build(talk)
        names = {key: m.group(1) if (m := _NAME.search(k["text"])) else key for key, k in kernels.items()}
        programs: dict[str, int] = {}
        for key, grid in launches[0]:
            programs.setdefault(names[key], math.prod(grid))
        whole = "\n".join(f"{grid} {texts[key]}" for one in launches for key, grid in one)
        same = hashlib.sha256(whole.encode()).hexdigest()[:32]
        products = any("tt.dot" in k["text"] for k in kernels.values())
        return Report(tuple(builds), programs, len(launches[0]), products, same)

    def _talk(self, task: Task) -> Any:
        from kbx_env.grading.runtime.session import RunnerSession

        return RunnerSession(self._grader.zygote(), task, "cpu", b"compile only", "train", self.seconds)

    def _build(self, talk: Any) -> list[Build]:
        from kbx_env.grading.runtime.untrusted import build

        # Not RunnerSession.build: the compiler's time counts here.
        reply, _ = talk.ask({"op": "build", "targets": [self.target]})
        return [build(row) for row in reply["builds"]]


def _header(task: Task, talk: Any, case: Case) -> dict[str, Any]:
    from kbx_env.grading.timing.estimate import _sizes

    given: dict[str, Any] = dict(_sizes(task, case))
    given |= {n: v for n, v in case.args.items() if n not in given and n != "out"}
    return dict(talk.header(given) | {"op": "call", "mode": "run", "seconds": talk.left})


def _size(case: Case) -> int:
    return math.prod(math.prod(v) if isinstance(v, tuple) else v for v in case.axes.values())

