"""Compiles a source without executing a kernel, and reports resources and launches: the cheap step of a search.

The source runs in the sandbox as in a grading on the CPU backend, on stand-in tensors of the timed shapes, but no
launch is executed. Kernels are compiled for one target, specialised as the timed cases first launch them. This shows
facts that small correctness cases do not show: shared memory beyond the limit, spills, numbers of programs. It does not
show whether the source is correct.
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
"""Time limit for one source, compilation included."""
_LOCATION = re.compile(r"\s*loc\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)|^#loc.*$", re.MULTILINE)
"""Source locations in TTIR."""
_NAME = re.compile(r"tt\.func public @([\w.$]+)")
_Launches = list[tuple[str, tuple[int, ...]]]
"""Key of the kernel, and grid, of each launch."""


@dataclass(frozen=True)
class CompileReport:
    """What compilation shows of one source; ``None`` for unknown facts.

    Attributes:
        builds: of all kernels; those of the largest timed case come first.
        programs: number of programs of each kernel in its first launch in the largest timed case, by name.
        launches: number of launches in the largest timed case.
        products: whether a kernel contains a matrix product.
        launch_hash: equal for sources that launch the same code on the same grids in every timed case.
        failure: why there is no report.
        fatal: whether the failure is the source's own, so that a grading would fail too.
        seconds: wall time.
    """

    builds: tuple[Build, ...] = ()
    programs: Mapping[str, int] | None = None
    launches: int | None = None
    products: bool = False
    launch_hash: str | None = None
    failure: str | None = None
    fatal: bool = False
    seconds: float = 0.0

    @property
    def fits(self) -> bool:
        """Whether no known fact makes a grading useless."""
        return not self.fatal and all(b.ok for b in self.builds)


class Compiler:
    """Reports on sources. Its sandbox starts with the first report, and stays warm."""

    def __init__(self, target: str = TARGET, seconds: float = SECONDS) -> None:
        """Prepare; no process is started yet.

        Args:
            target: the target of compilation.
            seconds: time limit for one source.
        """
        self.target, self.seconds = target, seconds
        self._grader: Any = None

    def start(self) -> None:
        """Start the sandbox now.

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

    def __call__(self, task: Task, source: str) -> CompileReport:
        """Report on a source. No exception of the source is raised.

        Args:
            task: the task.
            source: a submission for it.

        Returns:
            The report, or the reason why there is none.
        """
        from kbx_env.grading.runtime.untrusted import GradingAborted

        begin = time.perf_counter()
        try:
            self.start()
            report = self._report(task, source)
        except GradingAborted as e:
            report = CompileReport(failure=f"{e.verdict}: {e.message}"[:300], fatal=str(e.verdict) != "infra_fault")
        except KbxError as e:  # a failure of the sandbox says nothing about the source
            report = CompileReport(failure=str(e)[:300])
        return replace(report, seconds=time.perf_counter() - begin)

    def _report(self, task: Task, source: str) -> CompileReport:
        from kbx_env.grading.static.screen import screen

        data = source.encode("utf-8", "surrogatepass")
        screened = screen(task, data)
        if screened.verdict is not None:
            return CompileReport(failure=screened.message[:300], fatal=True)
        cases = sorted(task.timed, key=_size, reverse=True)
        builds: list[Build] = []
        kernels: dict[str, Any] = {}
        launches: list[_Launches] = []
        begin = time.monotonic()
        with self._session(task) as session:
            session.load(data)
            for case in cases:
                message, _ = session.ask(_header(task, session, case))
                if "want" in message:
                    return CompileReport(failure="the host reads a value back: there is none without executing")
                rows = message["kernels"] if session.compiler is None else session.compiler.rows
                kernels |= {key: rows[key] for key in message["kernels"]}
                launches.append([(str(s[1]), tuple(s[2])) for s in message["steps"] if s[0] == "launch"])
                if len(launches) == 1:
                    builds += self._build(session)
        texts = {key: f"{k['options']} {k['fused']} {_LOCATION.sub('', k['text'])}" for key, k in kernels.items()}
        # A process compiles a kernel once, specialised as it is first launched. A case that launches other
        # specialisations needs another process.
        built = {texts[key] for key, _ in launches[0]}
        for case, launched in zip(cases[1:], launches[1:], strict=True):
            if not {texts[key] for key, _ in launched} <= built and time.monotonic() - begin < self.seconds:
                built |= {texts[key] for key, _ in launched}
                with self._session(task) as session:
                    session.load(data)
                    session.ask(_header(task, session, case))
                    builds += self._build(session)
        return CompileReport(
            tuple(builds), _programs(kernels, launches[0]), len(launches[0]),
            any("tt.dot" in k["text"] for k in kernels.values()), _launch_hash(texts, launches),
        )  # fmt: skip

    def _session(self, task: Task) -> Any:
        from kbx_env.grading.runtime.session import RunnerSession

        return RunnerSession(self._grader.zygote(), task, "cpu", b"compile only", "train", self.seconds)

    def _build(self, session: Any) -> list[Build]:
        from kbx_env.grading.runtime.untrusted import build

        # RunnerSession.build would not count the compiler's time against the limit.
        reply, _ = session.ask({"op": "build", "targets": [self.target]})
        return [build(row) for row in reply["builds"]]


def _programs(kernels: Mapping[str, Any], launched: _Launches) -> dict[str, int]:
    """Return the number of programs of each kernel in its first launch, by name."""
    names = {key: m.group(1) if (m := _NAME.search(k["text"])) else key for key, k in kernels.items()}
    programs: dict[str, int] = {}
    for key, grid in launched:
        programs.setdefault(names[key], math.prod(grid))
    return programs


def _launch_hash(texts: Mapping[str, str], launches: list[_Launches]) -> str:
    """Return 128 bits of the SHA-256 over code and grid of all launches, in hexadecimal."""
    text = "\n".join(f"{grid} {texts[key]}" for launched in launches for key, grid in launched)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _header(task: Task, session: Any, case: Case) -> dict[str, Any]:
    from kbx_env.grading.timing.estimate import blank_sizes

    arguments: dict[str, Any] = dict(blank_sizes(task, case))
    arguments |= {n: v for n, v in case.args.items() if n not in arguments and n != "out"}
    return dict(session.header(arguments) | {"op": "call", "mode": "run", "seconds": session.budget.left})


def _size(case: Case) -> int:
    """Return the product of a case's axes."""
    return math.prod(math.prod(v) if isinstance(v, tuple) else v for v in case.axes.values())
