"""The executor: right, wrong, dying and hanging requests through every lane; nothing is lost or graded twice."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kbx_env.errors import UsageError
from kbx_env.executor import Executor, InlineLane, LaneLost, ProcessLane, Request
from kbx_env.outcome import Cases, Fault, Outcome, Stage, Verdict
from kbx_env.store import Store

WORKER = """
import os, pathlib, time
from kbx_env.errors import UsageError
from kbx_env.outcome import Cases, Fault, Outcome, Stage, Verdict

class Grader:
    def grade(self, task, source, **options):
        print("a library that prints")
        if source == b"die":
            os._exit(3)
        if source == b"die once" and not pathlib.Path(options["mark"]).exists():
            pathlib.Path(options["mark"]).touch()
            os._exit(3)
        if source == b"hang":
            time.sleep(60)
        if source == b"raise":
            raise RuntimeError("a bug of ours")
        if source == b"usage":
            raise UsageError("unknown task")
        if source == b"wrong":
            return Outcome(task, Verdict.INCORRECT, Stage.CORRECT, "cpu", "contract", Fault.POLICY, f"pid {os.getpid()}")
        return Outcome(task, Verdict.CORRECT, Stage.CORRECT, "cpu", "contract", cases=Cases(1, 1))
    def close(self):
        pass
"""


@pytest.fixture
def lane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessLane]:
    (tmp_path / "fake_worker.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    made = ProcessLane(2, "fake_worker:Grader")
    yield made
    made.close()


def _right(task: str, source: bytes, **options: object) -> Outcome:
    return Outcome(task, Verdict.CORRECT, Stage.CORRECT, "cpu", "contract", cases=Cases(1, 1))


def _infra(task: str, message: str) -> Outcome:
    return Outcome(task, Verdict.INFRA_FAULT, Stage.COMPILE, "cpu", "contract", Fault.INFRA, message)


def test_processes_judge_and_survive_what_dies(lane: ProcessLane, tmp_path: Path) -> None:
    with Executor(lane, deadline=20) as executor:
        sources = [b"right", b"wrong", b"die", b"die once", b"raise", b"usage"]
        options = {"mark": str(tmp_path / "died"), "targets": ("sm_90",)}
        jobs = [executor.submit(Request("t", s, options)) for s in sources]
        right, wrong, died, once, raised = (j.result(60) for j in jobs[:5])
        assert right.correct and once.correct
        assert wrong.verdict is Verdict.INCORRECT and wrong.fault is Fault.POLICY
        assert died.fault is Fault.INFRA and "exit 3" in died.message and died.manifest["attempt"] == 2
        assert raised.fault is Fault.INFRA and "a bug of ours" in raised.message
        with pytest.raises(UsageError, match="unknown task"):
            jobs[5].result(60)


def test_a_hanging_worker_is_killed_at_the_deadline_and_replaced(lane: ProcessLane) -> None:
    with Executor(lane, attempts=1, deadline=2) as executor:
        start = time.monotonic()
        hung = executor.submit(Request("t", b"hang")).result(30)
        assert hung.fault is Fault.INFRA and "within 2 s" in hung.message and time.monotonic() - start < 15
        assert executor.submit(Request("t", b"right")).result(30).correct


def test_close_ends_busy_workers(lane: ProcessLane) -> None:
    executor = Executor(lane, deadline=60)
    job = executor.submit(Request("t", b"hang"))
    waiting = [executor.submit(Request("t", b"hang %d" % i)) for i in range(4)]
    while not lane._all:
        time.sleep(0.02)
    start = time.monotonic()
    executor.close()
    assert time.monotonic() - start < 10 and not any(w.alive for w in lane._all)
    assert job.result(1).fault is Fault.INFRA and all(w.done() for w in waiting)


def test_infrastructure_faults_are_tried_again_and_unsupported_is_not() -> None:
    calls: list[bytes] = []

    def grade(task: str, source: bytes, **options: object) -> Outcome:
        calls.append(source)
        if source == b"flaky":
            return _right(task, source) if calls.count(source) == 2 else _infra(task, "neighbour out of memory")
        if source == b"lost":
            raise LaneLost("gone")
        return _infra(task, "unsupported on the CPU backend: tl.inline_asm")

    with Executor(InlineLane(grade), attempts=3) as executor:
        flaky, lost, cannot = (executor.submit(Request("t", s)).result(5) for s in (b"flaky", b"lost", b"cannot"))
    assert flaky.correct and lost.fault is Fault.INFRA and lost.message == "gone" and cannot.fault is Fault.INFRA
    assert (calls.count(b"flaky"), calls.count(b"lost"), calls.count(b"cannot")) == (2, 3, 1)


def test_equal_requests_under_way_are_graded_once_and_each_is_kept(tmp_path: Path) -> None:
    gate, calls = threading.Event(), []

    def grade(task: str, source: bytes, **options: object) -> Outcome:
        calls.append(source)
        gate.wait(10)
        return _right(task, source)

    store = Store(tmp_path / "g.sqlite")
    with Executor(InlineLane(grade), store=store) as executor:
        jobs = [executor.submit(Request("t", b"same", policy="p", sample=i)) for i in range(3)]
        other = executor.submit(Request("t", b"same", {"grading": "paper"}, policy="p"))
        gate.set()
        assert all(j.result(10).correct for j in [*jobs, other])
    assert len(calls) == 2 and len(list(store.rows())) == 4


def test_what_is_stored_is_not_graded_again(tmp_path: Path) -> None:
    store, calls = Store(tmp_path / "g.sqlite"), []

    def grade(task: str, source: bytes, **options: object) -> Outcome:
        calls.append(source)
        return _right(task, source) if source == b"right" else _infra(task, "gone")

    for _ in range(2):
        with Executor(InlineLane(grade), attempts=1, store=store) as executor:
            for source in (b"right", b"lost"):
                executor.submit(Request("t", source)).result(5)
    assert calls == [b"right", b"lost", b"lost"]


def test_a_repeated_source_is_a_look_up_for_any_policy_and_sample(tmp_path: Path) -> None:
    store, calls = Store(tmp_path / "g.sqlite"), []

    def grade(task: str, source: bytes, **options: object) -> Outcome:
        calls.append(options)
        return _right(task, source)

    about = {"fingerprint": "f", "torch": "2.13.0"}
    strict = {"torch_ops": "strict", "seed": None}
    with Executor(InlineLane(grade), store=store) as executor:

        def ask(policy: str, sample: int, options: dict[str, object], about: dict[str, str]) -> None:
            assert executor.submit(Request("t", b"same", options, about, policy, sample)).result(5).correct

        for policy, sample in (("p", 0), ("p", 1), ("q", 0)):
            ask(policy, sample, strict, about)
        assert calls == [strict]
        others: list[dict[str, object]] = [
            {**strict, "torch_ops": "allow"}, {**strict, "seed": 0}, {**strict, "estimate": "h200"},
        ]  # fmt: skip
        for options in others:
            ask("p", 0, options, about)
        ask("p", 0, strict, {**about, "torch": "2.14.0"})
    assert calls == [strict, *others, strict]
    assert [(p, s) for p, _, s, _ in store.rows("p")].count(("p", 1)) == 1 and len(list(store.rows("q"))) == 1


def test_a_verdict_without_a_defence_is_not_kept(tmp_path: Path) -> None:
    store = Store(tmp_path / "g.sqlite")

    def weak(task: str, source: bytes, **options: object) -> Outcome:
        return replace(_right(task, source), manifest={"without": ["screen"]})

    with Executor(InlineLane(weak), store=store) as executor:
        assert executor.submit(Request("t", b"cheat")).result(5).correct
    assert list(store.rows()) == []
