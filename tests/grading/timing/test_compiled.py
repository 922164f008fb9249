"""Speedup over torch.compile: what is kept, when it is measured again, and that nothing of it can hurt a verdict."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kbx_env.confinement import HIDDEN, landlock_version, unhidden
from kbx_env.errors import UsageError
from kbx_env.grading import context as grading_context
from kbx_env.grading import pipeline
from kbx_env.grading.context import GradingContext
from kbx_env.grading.record import OutcomeBuilder
from kbx_env.grading.sizes import at, timed
from kbx_env.grading.timing import compiled
from kbx_env.grading.timing.compiled import Row, beside
from kbx_env.grading.timing.gpu_lock import GpuHold, GpuLock
from kbx_env.options import GradeOptions
from kbx_env.outcome import Cases, CaseTime, Outcome, Stage, Timing, Verdict
from kbx_env.spec.catalog import expert_source, load_task

TASK = load_task("activation/gelu_fp16")
TIMING = Timing(
    2.0, 1.9, 2.1, None, tuple(CaseTime(c.label(), 10.0, 5.0, 2.0, 1.9, 2.1, 24) for c in TASK.timed), "H200", notes=("one",)
)  # fmt: skip


class Measures:
    """Stands in for the worker: a ratio for every case, or what it is told to say."""

    def __init__(self, answer: Any = 0.5) -> None:
        self.answer, self.asked = answer, list[list[int]]()

    def __call__(self, task: Any, cases: Sequence[int], gpu: GpuHold) -> dict[int, Row]:
        with gpu.alone():  # nobody holds it for us
            self.asked.append(list(cases))
        if isinstance(self.answer, Exception):
            raise self.answer
        return {i: self.answer if isinstance(self.answer, Row) else Row(self.answer) for i in cases}


@pytest.fixture
def gpu(tmp_path: Path) -> GpuHold:
    return GpuHold(GpuLock("g", tmp_path))


def test_candidate_against_compiled_is_told_beside_eager(gpu: GpuHold) -> None:
    told = beside(TASK, TIMING, gpu, Measures(0.5))
    assert told.compiled_speedup == pytest.approx(1.0) and {c.compiled_us for c in told.cases} == {5.0}
    assert told.notes == TIMING.notes
    bare = replace(told, compiled_speedup=None, cases=tuple(replace(c, compiled_us=None) for c in told.cases))
    assert bare == TIMING, "the speedup over eager and its interval stay as they are"


def test_a_ratio_is_measured_once_for_all_gradings_and_again_after_many(gpu: GpuHold) -> None:
    wanted, measures = list(range(len(TASK.timed))), Measures(0.5)
    for _ in range(compiled.USES):
        assert beside(TASK, TIMING, gpu, measures).compiled_speedup == pytest.approx(1.0)
    assert measures.asked == [wanted]
    # Another ratio within the tolerance changes nothing, one beyond it replaces what was kept, and says so.
    close = Measures(0.52)
    again = beside(TASK, TIMING, gpu, close)
    assert close.asked == [wanted] and again.compiled_speedup == pytest.approx(1.0) and again.notes == TIMING.notes
    for _ in range(compiled.USES - 1):
        beside(TASK, TIMING, gpu, measures)
    far = beside(TASK, TIMING, gpu, Measures(0.6))
    assert far.compiled_speedup == pytest.approx(1.2)
    assert len(far.notes) == 1 + len(wanted) and "0.600 of eager's time, before 0.500" in far.notes[1]
    assert beside(TASK, TIMING, gpu, measures).notes == TIMING.notes and measures.asked == [wanted]


def test_a_day_later_it_is_measured_again(gpu: GpuHold) -> None:
    now, measures = [1e9], Measures(0.5)
    for later in (0.0, 3600.0, compiled.KEPT_SECONDS + 3600.0):
        now[0] = 1e9 + later
        beside(TASK, TIMING, gpu, measures, now=lambda: now[0])
    assert len(measures.asked) == 2
    now[0] = 1e9  # a clock that was set back makes nothing eternal
    beside(TASK, TIMING, gpu, measures, now=lambda: now[0])
    assert len(measures.asked) == 3


def test_what_does_not_compile_is_missing_and_stays_so_for_a_day(gpu: GpuHold) -> None:
    fails, now = Measures(Row(None, "took longer than 120 s")), [1e9]
    for _ in range(compiled.USES + 2):
        told = beside(TASK, TIMING, gpu, fails, now=lambda: now[0])
        assert told.compiled_speedup is None and {c.compiled_us for c in told.cases} == {None}
        assert (
            told.speedup == TIMING.speedup
            and f"torch.compile: {TIMING.cases[0].case}: took longer than 120 s" in told.notes
        )
    assert len(fails.asked) == 1
    now[0] += compiled.KEPT_SECONDS
    assert beside(TASK, TIMING, gpu, Measures(0.5), now=lambda: now[0]).compiled_speedup == pytest.approx(1.0)
    now[0] += compiled.KEPT_SECONDS
    kept = beside(TASK, TIMING, gpu, fails, now=lambda: now[0])
    assert kept.compiled_speedup == pytest.approx(1.0) and "measured earlier; now took longer" in kept.notes[-1]


@pytest.mark.parametrize("answer", [Row(None, "CUDA error", again=True), OSError("no process"), RuntimeError("a bug")])
def test_trouble_of_the_machine_is_not_remembered(gpu: GpuHold, answer: Any) -> None:
    told = beside(TASK, TIMING, gpu, Measures(answer))
    assert told.compiled_speedup is None and any("not measured" in n for n in told.notes)
    assert beside(TASK, TIMING, gpu, Measures(0.5)).compiled_speedup == pytest.approx(1.0)


def test_a_case_that_was_not_reached_comes_next_time(gpu: GpuHold) -> None:
    first = beside(TASK, TIMING, gpu, lambda task, cases, gpu: {cases[0]: Row(0.5)})
    assert first.compiled_speedup is None, "None unless all cases have it"
    assert [c.compiled_us for c in first.cases] == [5.0] + [None] * (len(TASK.timed) - 1)
    rest = Measures(2.0)
    n = len(TASK.timed)
    mean = (math.log(0.5) + (n - 1) * math.log(2.0)) / n
    assert beside(TASK, TIMING, gpu, rest).compiled_speedup == pytest.approx(2 * math.exp(mean))
    assert rest.asked == [list(range(1, n))]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"cases": {"a": 1}}', '{"cases": {"N": {"ratio": -1.0, "at": 1.0}}}'])
def test_a_broken_file_is_as_good_as_none(gpu: GpuHold, text: str) -> None:
    file = compiled.kept_in(TASK, gpu)
    assert file is not None
    file.write_text(text)
    assert beside(TASK, TIMING, gpu, Measures(0.5)).compiled_speedup == pytest.approx(1.0)
    assert set(json.loads(file.read_text())["cases"]) >= {c.case for c in TIMING.cases}


def test_another_version_has_another_file(gpu: GpuHold, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {compiled.kept_in(TASK, gpu), compiled.kept_in(load_task("math/softmax"), gpu)}
    monkeypatch.setattr(torch, "__version__", "9.9")
    files.add(compiled.kept_in(TASK, gpu))
    monkeypatch.setattr(compiled, "TASK_SET", "1000-1")
    files.add(compiled.kept_in(TASK, gpu))
    assert len(files) == 4 and all(f is not None and f.name.startswith("compiled-") for f in files)
    assert compiled.kept_in(TASK, GpuHold(None)) is None
    assert beside(TASK, TIMING, GpuHold(None), Measures(0.5)).compiled_speedup == pytest.approx(1.0)


WORKER = """
import json, sys, time
asked = json.loads(sys.stdin.readline())
tell = lambda **row: print(json.dumps(row), flush=True)
for case in asked["cases"]:
    tell(state="compiling", case=case)
    if case == {slow}:
        time.sleep(60)
    if case == {dead}:
        print("Traceback\\nNo room on the device", file=sys.stderr)
        sys.exit(3)
    tell(state="using")
    tell(case=case, ratio={ratio})
"""


def _ask(
    tmp_path: Path, slow: int = -1, dead: int = -1, ratio: str = "0.25", limit: float = -9.0, **more: float
) -> dict[int, Row]:
    text = WORKER.format(slow=slow, dead=dead, ratio=ratio)
    gpu = GpuHold(GpuLock("g", tmp_path))
    return compiled.measured(TASK, [0, 1], gpu, limit=limit, command=(sys.executable, "-c", text), **more)


def test_the_worker_is_heard_and_a_late_one_killed(tmp_path: Path) -> None:
    assert _ask(tmp_path, limit=20) == {0: Row(0.25), 1: Row(0.25)}
    began = time.monotonic()
    late = _ask(tmp_path, slow=1, limit=-5.0)  # five seconds: the limit and ten for starting up
    assert late[0] == Row(0.25) and late[1].ratio is None and "took longer" in late[1].why and not late[1].again
    assert _ask(tmp_path, slow=0, limit=60, seconds=3.0) == {}, "the grading's own budget says nothing of torch.compile"
    assert time.monotonic() - began < 30
    dead = _ask(tmp_path, dead=1, limit=20)
    assert dead[0] == Row(0.25) and dead[1].again and dead[1].why.endswith("(exit 3): No room on the device")
    assert all(r.ratio is None for r in _ask(tmp_path, ratio="0.0", limit=20).values()), "never 0"


def test_the_worker_has_settings_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {
        "TORCHDYNAMO_DISABLE",
        "TORCHINDUCTOR_MAX_AUTOTUNE",
        "TORCH_COMPILE_DISABLE",
        "TRITON_INTERPRET",
        "MY_API_KEY",
    }
    for name in names:
        monkeypatch.setenv(name, "1")
    ours = dict(os.environ)
    env = compiled.environment(tmp_path)
    assert not names & set(env) and ours == os.environ
    assert env["TORCHINDUCTOR_COMPILE_THREADS"] == "1"
    inside = [env[k] for k in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TMPDIR", "CUDA_CACHE_PATH")]
    assert all(Path(p).is_relative_to(tmp_path) for p in inside)


PEEK = """
import os, sys
from kbx_env.confinement import confine, unhidden
folder, secret = sys.argv[1:]
confine(folder, unhidden(os.path.dirname(os.path.dirname(folder))))
def reads(path):
    try:
        return bool(open(path, "rb").read(1))
    except PermissionError:
        return False
def writes(path):
    try:
        return bool(open(path, "a"))
    except PermissionError:
        return False
print(reads(secret), writes(secret), reads(os.__file__), writes(folder + "/mine"), reads("/proc/self/stat"))
"""


@pytest.mark.skipif(landlock_version() == 0, reason="needs Landlock")
def test_a_runner_neither_reads_nor_writes_what_was_compiled(tmp_path: Path) -> None:
    """Inductor's cache holds Triton kernels for the very task, and pickles that the next worker loads."""
    runner, lease = tmp_path / "kbx-zygote" / "runner", GpuLock("g", tmp_path)
    runner.mkdir(parents=True)
    assert unhidden(str(tmp_path)) is None, "nothing to hide yet"
    with compiled._folder(lease.folder) as folder:
        assert folder == lease.folder / HIDDEN
        (folder / "kernel.py").write_text("def kernel(): ...")
        command = [sys.executable, "-c", PEEK, str(runner), str(folder / "kernel.py")]
        seen = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert seen.stdout.split() == ["False", "False", "True", "True", "True"], seen.stderr
    assert (folder / "kernel.py").exists()
    lease.folder.chmod(0o777)  # somebody else may have made it: nothing is kept there
    with compiled._folder(lease.folder) as private:
        assert not private.is_relative_to(lease.folder)
    assert not private.exists()


def test_held_out_sizes_have_ratios_of_their_own(gpu: GpuHold) -> None:
    cases = timed(TASK, "held-out")
    rows = tuple(replace(TIMING.cases[0], case=c.label()) for c in cases)
    measures = Measures(0.5)
    told = beside(TASK, replace(TIMING, cases=rows), gpu, measures, sizes="held-out")
    assert told.compiled_speedup is not None and measures.asked == [[len(TASK.timed) + k for k in range(len(cases))]]
    assert [at(TASK, k).label() for k in measures.asked[0]] == [r.case for r in rows]


def test_it_is_measured_after_the_submission_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it left running must not change a ratio that others are told too."""
    happened: list[str] = []

    class Talk:
        gpu = GpuHold(None)

        def __init__(self, *_: Any) -> None: ...

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            happened.append("submission ended")

    def measures(task: Any, timing: Timing, gpu: GpuHold, sizes: str) -> Timing:
        happened.append("compiled")
        return replace(timing, compiled_speedup=1.5)

    class Timed:
        def run(self, context: GradingContext) -> Outcome:
            context.open_session()
            happened.append("timed")
            return Outcome(TASK.id, Verdict.CORRECT, Stage.TIME, "cuda", "contract", cases=Cases(1, 1), timing=TIMING)

    monkeypatch.setattr(grading_context, "RunnerSession", Talk)
    monkeypatch.setattr(pipeline, "STAGES", (Timed(),))
    monkeypatch.setattr(compiled, "beside", measures)
    for asked, told in ((True, 1.5), (False, None)):
        happened.clear()
        processes: Any = SimpleNamespace(zygote=lambda: None, compilers=None)
        options, builder = GradeOptions(backend="cpu", compiled=asked), OutcomeBuilder(TASK, "cpu", "contract", "", {})
        outcome = pipeline.run_pipeline(GradingContext(TASK, b"", options, b"", processes, (), builder))
        assert (
            outcome.timing is not None and outcome.timing.compiled_speedup == told and outcome.speedup == TIMING.speedup
        )
        assert happened == ["timed", "submission ended"] + ["compiled"] * asked
        assert ("compiled" in outcome.seconds) is asked


def test_old_outcomes_are_readable_and_say_nothing_of_it() -> None:
    outcome = Outcome(TASK.id, Verdict.CORRECT, Stage.TIME, "cuda", "contract", cases=Cases(1, 1), timing=TIMING)
    old = outcome.to_dict()
    del old["timing"]["compiled_speedup"]
    for case in old["timing"]["cases"]:
        del case["compiled_us"]
    assert Outcome.from_dict(old) == outcome
    told = replace(outcome, timing=replace(TIMING, compiled_speedup=1.5))
    assert Outcome.from_dict(json.loads(told.to_json())) == told


def test_it_needs_times(grader: Any) -> None:
    with pytest.raises(UsageError, match="compiled=True"):
        grader.grade(TASK.id, "x", backend="cpu", compiled=True)


@pytest.mark.gpu
def test_an_expert_against_torch_compile(grader: Any) -> None:
    source = expert_source(TASK.id)
    assert source is not None
    with pytest.raises(UsageError, match="compiled=True"):
        grader.grade(TASK.id, source, backend="cuda", timing=False, compiled=True)
    seconds = []
    for _ in range(2):
        outcome = grader.grade(TASK.id, source, backend="cuda", targets=(), compiled=True)
        assert outcome.correct and outcome.timing is not None, outcome.message
        assert outcome.timing.compiled_speedup is not None, outcome.timing.notes
        assert 0.2 < outcome.timing.compiled_speedup < 20
        seconds.append(outcome.seconds["compiled"])
    assert seconds[1] < 1.0, "the second grading compiles nothing"
