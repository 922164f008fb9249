"""Nothing a runner says is believed, and no nonsense of its makes the grader stumble."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from puppet import Puppet, puppet_session

from kbx_env.errors import SandboxError
from kbx_env.grading.runtime import session, time_budget
from kbx_env.grading.runtime.session import ABANDONED, RunnerSession
from kbx_env.grading.runtime.untrusted import GradingAborted
from kbx_env.grading.timing.contestants import RunnerContestant
from kbx_env.outcome import Verdict
from kbx_env.protocol import wire
from kbx_env.spec.catalog import load_task

TASK = load_task("activation/gelu_fp16")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
TENSOR = st.fixed_dictionaries(
    {"k": st.just("tensor"), "dtype": st.just("float16") | JSON, "shape": st.lists(st.integers(), max_size=3) | JSON},
    optional={
        "stride": st.lists(st.integers(), max_size=3),
        "blob": JSON,
        "shift": JSON,
        "device": JSON,
        "alias": JSON,
    },
)
REPLY = st.fixed_dictionaries(
    {"ok": st.just(True)},
    optional={
        "outputs": st.lists(TENSOR | JSON, max_size=3) | JSON, "after": st.dictionaries(st.text(max_size=5), TENSOR | JSON),
        "is_tuple": JSON, "launches": JSON, "dots": JSON, "moved": JSON, "denied": JSON, "standing": JSON, "line": JSON,
        "builds": st.lists(st.dictionaries(st.sampled_from(["kernel", "target", "ok", "shared", "seconds", "error"]), JSON))
        | JSON, "us": st.lists(st.floats() | JSON) | JSON,
    },
)  # fmt: skip
BLOBS = st.lists(st.binary(max_size=16).map(bytearray), max_size=2)


@settings(deadline=None, max_examples=150)
@given(reply=REPLY, blobs=BLOBS)
def test_any_reply_is_a_claim_or_a_verdict(reply: dict[str, Any], blobs: list[bytearray]) -> None:
    case = TASK.cases[0]
    for use in (
        lambda t: t.call(case, 0, "run"),
        lambda t: t.build(["sm_90"]),
        lambda t: t.load(b""),
        lambda t: RunnerContestant(t, case).measure([0]),
    ):
        try:
            use(puppet_session(reply, blobs))
        except GradingAborted as stop:
            assert stop.verdict is not Verdict.INFRA_FAULT


@pytest.mark.parametrize("kind", ["infra", "anything", None, 7])
def test_a_runner_cannot_excuse_itself(kind: object) -> None:
    with pytest.raises(GradingAborted) as stop:
        puppet_session({"ok": False, "kind": kind, "message": "not my fault"}).load(b"")
    assert stop.value.verdict is Verdict.RUNTIME_ERROR


@pytest.mark.parametrize("claim", [-1, 1.5, True, "7", float("nan"), 1 << 60, [3]])
def test_counts_are_whole_numbers(claim: object) -> None:
    with pytest.raises(GradingAborted, match="unreadable"):
        puppet_session({"ok": True, "outputs": [], "after": {}, "is_tuple": False, "launches": claim}).call(
            TASK.cases[0], 0, "run"
        )


@pytest.mark.parametrize("log", [[], [["tampering", "os.kill"], 1], [None, 1], [{"a": 1}, 1]])
def test_the_log_counts_whatever_the_reply_says(log: list[Any]) -> None:
    """What was denied has left the process already; a log that is silent or unreadable is a sign of tampering."""
    t = RunnerSession(Puppet({"ok": True, "entry": True, "denied": []}, [], log), TASK, "cpu", b"s", "eval", 30.0)  # type: ignore[arg-type]
    t.load(b"")
    assert [rule for rule, _ in t.denied] == ["tampering"]


@pytest.mark.parametrize(
    "message", ["CUDA out of memory. Tried", "CUDA driver: cuMemAlloc_v2 failed with error 2 (out of memory)"]
)
def test_a_gpu_full_of_others_is_not_held_against_a_submission(message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(case_bytes: int = 0) -> None:
        reply = {"ok": False, "kind": "runtime", "name": "OutOfMemoryError", "message": message}
        mine = puppet_session(reply | {"denied": [], "standing": True})
        mine.engine, mine.backend, mine.case_bytes = None, "cuda", case_bytes
        mine.load(b"")

    monkeypatch.setattr(session, "_free_memory", lambda: 100 << 20)
    with pytest.raises(SandboxError, match="GPU's memory is full"):
        load()
    # With room left it has used up its own share: a submission cannot excuse itself by saying these words.
    monkeypatch.setattr(session, "_free_memory", lambda: 8 << 30)
    with pytest.raises(GradingAborted) as stop:
        load()
    assert stop.value.verdict is Verdict.RUNTIME_ERROR
    # One set of inputs of the timed case would not fit any more.
    with pytest.raises(SandboxError, match="GPU's memory is full"):
        load(case_bytes=9 << 30)


class Slow(Puppet):
    """Takes some seconds for an answer; what it did not answer in time it answers when it is asked the next question."""

    def __init__(self, seconds: float, now: list[float]) -> None:
        super().__init__({"ok": True, "standing": True, "denied": []}, [])
        self.seconds, self.now, self.asked, self.rows = seconds, now, 0, []

    def ask(self, header: dict[str, Any], blobs: Any = None, *, deadline: float) -> Any:
        self.asked += 1
        self.rows = [self.asked]
        left = deadline - self.now[0]
        self.now[0] += min(left, self.seconds)
        if left < self.seconds:
            self.seconds = 0.0
            raise wire.Late
        return super().ask(header, blobs, deadline=deadline)

    def fate(self) -> None:
        return None


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], RunnerSession]:
    now = [0.0]
    for module in (session, time_budget):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def make(seconds: float) -> RunnerSession:
        mine = RunnerSession(Slow(seconds, now), TASK, "cpu", b"s", "eval", 30.0)  # type: ignore[arg-type]
        mine.engine = None
        return mine

    return make


def test_compilers_have_seconds_of_their_own(slow: Callable[[float], RunnerSession]) -> None:
    """One kernel for each of 21 cases took 49 s where others were at work, too."""
    mine = slow(10.0)
    with pytest.raises(GradingAborted, match="unreadable"):  # it answers without a result
        mine.call(TASK.cases[0], 0, "ablate", quiet=True)
    for k in range(5):
        mine.compile_call(mine.draw_call(TASK.cases[0], k, "run"))
    assert mine.budget.left == pytest.approx(30.0)
    for k in range(2):
        mine.compile_call(mine.draw_call(TASK.cases[0], k, "run"))
    assert mine.budget.left == pytest.approx(10.0), "and then the submission's"


def test_all_that_is_compiled_together_costs_nothing_if_it_ends_in_time(slow: Callable[[float], RunnerSession]) -> None:
    mine = slow(4.0)
    assert mine.compile_all(lambda: mine.begin_calls(TASK.cases[:3], [1, 1, 1]), 30.0) and mine.compiled
    assert mine.budget.left == pytest.approx(30.0) and mine.budget.compile_spent == 0.0
    asked = mine.runner.asked  # type: ignore[attr-defined]
    mine.at_once(TASK.cases[:3], [1, 1, 1])
    assert mine.runner.asked == asked + 1, "no waiting for compilers again: the first call, whose answer has no result"  # type: ignore[attr-defined]


def test_what_is_compiled_together_fails_as_a_whole(slow: Callable[[float], RunnerSession]) -> None:
    """It must not be seen in the checked calls that something went wrong in a timed one."""
    late = slow(12.0)
    assert not late.compile_all(lambda: late.begin_calls(TASK.cases[:3], [1, 1, 1]), 30.0) and not late.compiled
    for error in (GradingAborted(Verdict.RUNTIME_ERROR, "raised"), SandboxError("killed from outside"), ValueError("no case fits")):
        mine = slow(1.0)
        assert not mine.compile_all(partial(_raise, error), 30.0) and not mine.compiled
        assert mine.budget.left == pytest.approx(30.0)
    mine = slow(1.0)
    mine.compile_call = partial(_raise_first, ValueError("no such call"))  # type: ignore[method-assign]
    assert not mine.compile_all(lambda: mine.begin_calls(TASK.cases[:3], [1, 1, 1]), 30.0), "an error that comes later"


def test_what_was_denied_is_not_forgotten_where_compiling_fails(slow: Callable[[float], RunnerSession]) -> None:
    """Another process would start without it, and behave: to try what is forbidden would cost nothing."""
    mine = slow(1.0)
    assert mine.compile_all(lambda: mine.denied.append(("torch_compute", "aten::mm")), 30.0), "the session goes on and tells"
    mine.compile_call = partial(_raise_first, ValueError("no such call"))  # type: ignore[method-assign]
    assert mine.compile_all(lambda: mine.begin_calls(TASK.cases[:3], [1, 1, 1]), 30.0)
    for error in (GradingAborted(Verdict.RUNTIME_ERROR, "died"), ValueError("no case fits")):
        mine = slow(1.0)
        mine.denied.append(("torch_compute", "aten::mm"))
        with pytest.raises(GradingAborted, match="aten::mm") as told:
            mine.compile_all(partial(_raise, error), 30.0)
        assert told.value.verdict is Verdict.REJECTED and told.value.violations
    fallen = slow(1.0)
    fallen.standing = False
    with pytest.raises(GradingAborted, match="died"):
        fallen.compile_all(partial(_raise, GradingAborted(Verdict.RUNTIME_ERROR, "died")), 30.0)
    late = slow(40.0)
    late.denied.append(("torch_compute", "aten::mm"))
    with pytest.raises(GradingAborted, match="aten::mm"):
        late.compile_all(lambda: late.begin_calls(TASK.cases[:3], [1, 1, 1]), 30.0)


def test_an_abandoned_session_is_not_opened_again(slow: Callable[[float], RunnerSession]) -> None:
    mine = slow(1.0)
    mine._abandoned = True
    with pytest.raises(GradingAborted, match="given up"):
        mine.compile_all(partial(_raise, GradingAborted(Verdict.RUNTIME_ERROR, ABANDONED)), 30.0)


def test_who_was_late_is_not_asked_again(slow: Callable[[float], RunnerSession]) -> None:
    """The answer to the last question came as the answer to the next: a timeout was told as an unreadable result."""
    mine = slow(70.0)
    found = mine.at_once(TASK.cases[:3], [1, 1, 1])
    assert [type(f) for f in found] == [GradingAborted] and found[0].verdict is Verdict.TIMEOUT  # type: ignore[union-attr]
    assert mine.runner.asked == 2  # type: ignore[attr-defined]
    with pytest.raises(GradingAborted, match="within 30 s of wall time beside 60 s for compilers"):
        mine.load(b"")


def test_what_is_only_compiled_gives_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without launches a length that is read back is whatever lay in memory: a result of that length is nobody's business."""
    asked: list[Any] = []

    class Listens(Puppet):
        def ask(self, header: dict[str, Any], blobs: Any = None, *, deadline: float) -> Any:
            asked.append(header)
            self.rows = [len(asked)]
            return super().ask(header, blobs, deadline=deadline)

    reply = {"ok": True, "standing": True, "outputs": [], "after": {}, "is_tuple": False}
    mine = RunnerSession(Listens(reply, []), TASK, "cpu", b"secret", "eval", 30.0)  # type: ignore[arg-type]
    mine.engine = None
    drawn = mine.draw_call(TASK.cases[0], 0, "run")
    mine.compile_call(drawn)
    mine.make_call(drawn)
    assert [(a["mode"], a.get("discard")) for a in asked] == [("ablate", True), ("run", None)]
    assert asked[0]["args"] == asked[1]["args"], "what is compiled is what will be launched"


@pytest.mark.parametrize("error", [GradingAborted(Verdict.RUNTIME_ERROR, "the third"), RuntimeError("ours")])
def test_what_came_before_a_failing_call_on_a_gpu_counts(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases are asked for together there; one that fails leaves the verdicts of those before it."""
    done: list[int] = []

    def made(index: int) -> int:
        if index == 2:
            raise error
        done.append(index)
        return index

    shared: list[str] = []

    @contextlib.contextmanager
    def using() -> Iterator[None]:
        shared.append("in")
        yield

    talk = SimpleNamespace(
        engine=None, draw_call=lambda case, index, mode, repeat: index, make_call=made, gpu=SimpleNamespace(using=using),
        compile_call=lambda drawn: None, finish_compiling=lambda: shared.append("compiled"), _begun=None,
        _abandoned=False, compiled=False,
    )  # fmt: skip
    talk.begin_calls = partial(RunnerSession.begin_calls, talk)
    assert RunnerSession.at_once(talk, TASK.cases[:5], [1] * 5) == [[0], [1], error] and done == [0, 1]  # type: ignore[arg-type]
    assert shared == ["compiled", "in"], "no call waits for a compiler with the GPU lock"
    monkeypatch.setattr(session, "TURN_SECONDS", -1.0)
    assert RunnerSession.at_once(talk, TASK.cases[:2], [1] * 2) == [[0], [1]]  # type: ignore[arg-type]
    assert shared[2:] == ["compiled", "in", "in"], "others get their turn"

    def compile_call(drawn: int) -> None:
        if drawn == 1:
            raise error

    talk.compile_call = compile_call
    assert RunnerSession.at_once(talk, TASK.cases[:5], [1] * 5) == [[0], error]  # type: ignore[arg-type]
    assert shared[5:] == ["compiled", "in"], "also where a case cannot be compiled"
    talk.compile_call, talk.finish_compiling = lambda drawn: None, partial(_raise, error)
    assert RunnerSession.at_once(talk, TASK.cases[:5], [1] * 5) == [error]  # type: ignore[arg-type]
    talk.finish_compiling = lambda: None
    talk.begin_calls(TASK.cases[:2], [1] * 2)
    talk.begin_calls = None  # what was begun beside the proof is not begun again
    assert RunnerSession.at_once(talk, TASK.cases[:2], [1] * 2) == [[0], [1]]  # type: ignore[arg-type]


def _raise(error: Exception) -> None:
    raise error


def _raise_first(error: Exception, drawn: Any) -> None:
    raise error
