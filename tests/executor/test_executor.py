"""The executor: right, wrong, dying and hanging requests through every lane; nothing is lost or graded twice."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, wait
from dataclasses import replace
from pathlib import Path

import pytest

import kbx_env
from kbx_env.errors import UsageError
from kbx_env.executor import Executor, InlinePool, ProcessPool, Request, WorkerLost
from kbx_env.outcome import Cases, Fault, FaultKind, Outcome, Stage, Verdict
from kbx_env.store import Store

WORKER = """
import os, pathlib, time
from kbx_env.errors import UsageError
from kbx_env.outcome import Cases, Fault, Outcome, Stage, Verdict

class Grader:
    def zygote(self):
        if "KBX_SLOW_START" in os.environ:
            time.sleep(float(os.environ["KBX_SLOW_START"]))
        self.warm = True
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
        if source == b"warm":
            return Outcome(task, Verdict.INCORRECT, Stage.CORRECT, "cpu", "contract", Fault.POLICY, f"warm {self.warm}")
        if source == b"usage":
            raise UsageError("unknown task")
        if source == b"wrong":
            return Outcome(task, Verdict.INCORRECT, Stage.CORRECT, "cpu", "contract", Fault.POLICY, f"pid {os.getpid()}")
        return Outcome(task, Verdict.CORRECT, Stage.CORRECT, "cpu", "contract", cases=Cases(1, 1))
    def close(self):
        pass
"""


@pytest.fixture
def lane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessPool]:
    (tmp_path / "fake_worker.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    made = ProcessPool(2, "fake_worker:Grader")
    yield made
    made.close()


def _right(task: str, source: bytes, **options: object) -> Outcome:
    return Outcome(task, Verdict.CORRECT, Stage.CORRECT, "cpu", "contract", cases=Cases(1, 1))


def _infra(task: str, message: str) -> Outcome:
    return Outcome(task, Verdict.INFRA_FAULT, Stage.COMPILE, "cpu", "contract", Fault.INFRA, message)


def test_processes_judge_and_survive_what_dies(lane: ProcessPool, tmp_path: Path) -> None:
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
        assert sum(w.alive for w in lane._all) <= lane.width, (
            "a worker whose request was lost does not idle beside its successor"
        )


def test_a_hanging_worker_is_killed_at_the_deadline_and_replaced(lane: ProcessPool) -> None:
    with Executor(lane, attempts=1, deadline=2) as executor:
        start = time.monotonic()
        hung = executor.submit(Request("t", b"hang")).result(30)
        assert hung.fault is Fault.INFRA and "within 2 s" in hung.message and time.monotonic() - start < 15
        assert executor.submit(Request("t", b"right")).result(30).correct


def test_close_ends_busy_workers(lane: ProcessPool) -> None:
    executor = Executor(lane, deadline=60)
    job = executor.submit(Request("t", b"hang"))
    waiting = [executor.submit(Request("t", b"hang %d" % i)) for i in range(4)]
    while len(lane._idle) == lane.width:  # until a worker has it
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
            raise WorkerLost("gone")
        return replace(_infra(task, "the CPU backend cannot execute this"), fault_kind=FaultKind.UNSUPPORTED)

    with Executor(InlinePool(grade), attempts=3) as executor:
        flaky, lost, cannot = (executor.submit(Request("t", s)).result(5) for s in (b"flaky", b"lost", b"cannot"))
    assert flaky.correct and lost.fault is Fault.INFRA and lost.message == "gone" and cannot.fault is Fault.INFRA
    assert (calls.count(b"flaky"), calls.count(b"lost"), calls.count(b"cannot")) == (2, 3, 1)
    assert lost.fault_kind is FaultKind.WORKER_LOST and Outcome.from_dict(lost.to_dict()) == lost
    assert flaky.manifest["attempt"] == 2 and flaky.manifest["faults"] == ["neighbour out of memory"]


def test_equal_requests_under_way_are_graded_once_and_each_is_kept(tmp_path: Path) -> None:
    gate, calls = threading.Event(), []

    def grade(task: str, source: bytes, **options: object) -> Outcome:
        calls.append(source)
        gate.wait(10)
        return _right(task, source)

    store = Store(tmp_path / "g.sqlite")
    with Executor(InlinePool(grade), store=store) as executor:
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
        with Executor(InlinePool(grade), attempts=1, store=store) as executor:
            for source in (b"right", b"lost"):
                executor.submit(Request("t", source)).result(5)
    assert calls == [b"right", b"lost", b"lost"]


class Gate(InlinePool):
    """A lane whose gradings begin in an order that is told, and end when they are let through."""

    def __init__(self, width: int = 1) -> None:
        self.began: list[bytes] = []
        self.limits: list[float] = []
        self.open = threading.Event()
        super().__init__(self._hold, width)

    def _hold(self, task: str, source: bytes, **options: object) -> Outcome:
        self.began.append(source)
        assert self.open.wait(20)
        return _right(task, source)

    def grade(self, request: Request, deadline: float) -> Outcome:
        self.limits.append(deadline)
        return super().grade(request, deadline)


def _until(true: Callable[[], object]) -> None:
    end = time.monotonic() + 10
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


def _busy(executor: Executor, gate: Gate) -> Future[Outcome]:
    first = executor.submit(Request("t", b"first"))
    _until(lambda: gate.began)
    return first


def test_a_higher_priority_begins_first_and_equal_ones_in_order() -> None:
    gate = Gate()
    with Executor(gate, capacity=100) as executor:
        jobs = [_busy(executor, gate)]
        for n, priority in enumerate([0, 0, -1, 5, 5, 0]):
            jobs.append(executor.submit(Request("t", b"%d" % n, priority=priority)))
        gate.open.set()
        assert all(j.result(10).correct for j in jobs)
    assert gate.began == [b"first", b"3", b"4", b"0", b"1", b"5", b"2"]


def test_a_shared_grading_has_the_highest_priority_that_is_still_asked() -> None:
    gate = Gate()
    with Executor(gate, capacity=100) as executor:
        _busy(executor, gate)
        low, urgent = executor.submit(Request("t", b"a")), executor.submit(Request("t", b"b"))
        raised = executor.submit(Request("t", b"b", priority=9))
        other = executor.submit(Request("t", b"c", priority=8))
        lowered = executor.submit(Request("t", b"a", priority=10))
        lowered.cancel()
        gate.open.set()
        assert all(j.result(10).correct for j in (low, urgent, raised, other))
    assert gate.began == [b"first", b"b", b"c", b"a"]


def test_neither_priority_nor_deadline_is_part_of_what_is_graded() -> None:
    plain, urgent = Request("t", b"s"), Request("t", b"s", priority=3, deadline=9.0)
    assert (plain.content, plain.record, plain.key) == (urgent.content, urgent.record, urgent.key)


@pytest.mark.parametrize("wrong", [{"priority": 0.5}, {"deadline": 0}, {"deadline": "1"}, {"deadline": float("nan")}])
def test_nonsense_in_a_request_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=f"{next(iter(wrong))} .* of a request"):
        Request("t", b"s", **wrong)  # type: ignore[arg-type]


def test_nonsense_for_an_executor_or_a_lane_is_refused() -> None:
    with pytest.raises(UsageError, match="capacity"):
        Executor(Gate(), capacity=0)
    with pytest.raises(UsageError, match="attempts"):
        Executor(Gate(), attempts=0)
    with pytest.raises(UsageError, match="0 workers"):
        ProcessPool(0)


def test_a_deadline_that_passes_in_the_queue_ends_the_request_and_no_other(tmp_path: Path) -> None:
    gate, store = Gate(), Store(tmp_path / "g.sqlite")
    with Executor(gate, store=store, capacity=1) as executor:
        first = _busy(executor, gate)
        patient = executor.submit(Request("t", b"same"))
        hasty = executor.submit(Request("t", b"same", policy="hasty", deadline=0.2))
        start = time.monotonic()
        outside = executor.submit(Request("t", b"outside", deadline=0.2))  # no room: blocks until it is too late
        assert 0.15 < time.monotonic() - start < 5
        for late in (hasty, outside):
            told = late.result(5)
            assert told.fault is Fault.INFRA and "never begun" in told.message and "0.2 s" in told.message
        assert not first.done() and not patient.done()
        gate.open.set()
        assert first.result(10).correct and patient.result(10).correct
    assert gate.began == [b"first", b"same"]


def test_a_deadline_bounds_the_lane_and_the_wait_for_it(lane: ProcessPool) -> None:
    assert lane.ready(30)
    workers = set(lane._all)
    with Executor(lane, deadline=60) as executor:
        start = time.monotonic()
        told = executor.submit(Request("t", b"hang", deadline=0.5)).result(10)
        assert time.monotonic() - start < 5 and told.message == "no verdict within its deadline of 0.5 s"
        _until(lambda: sum(w.alive for w in workers) == 1)  # the one that hung was killed
        assert executor.submit(Request("t", b"right", deadline=30)).result(30).correct


def test_who_joins_a_grading_that_is_cut_short_gets_one_of_its_own_length() -> None:
    limits: list[float] = []
    began = threading.Event()

    class Short(InlinePool):
        def grade(self, request: Request, deadline: float) -> Outcome:
            limits.append(deadline)
            began.set()
            if len(limits) == 1:
                time.sleep(deadline)
                raise WorkerLost("killed at its deadline")
            time.sleep(0.3)
            return _right(request.task, request.source)

    with Executor(Short(_right), attempts=1, deadline=50) as executor:
        hasty = executor.submit(Request("t", b"same", deadline=0.4))
        assert began.wait(5)
        patient = executor.submit(Request("t", b"same"))
        assert hasty.result(5).message == "no verdict within its deadline of 0.4 s" and patient.result(5).correct
    assert limits[0] <= 0.4 and limits[1] == 50


def test_submit_blocks_while_as_many_wait_as_may_and_callbacks_never_do() -> None:
    gate = Gate()
    chained: list[Future[Outcome]] = []
    with Executor(gate, capacity=2) as executor:
        first = _busy(executor, gate)

        def more(_: Future[Outcome]) -> None:  # in the executor's own thread, where blocking would be for ever
            chained.extend(executor.submit(Request("t", b"more %d" % i)) for i in range(5))

        first.add_done_callback(more)
        for n in range(2):
            executor.submit(Request("t", b"%d" % n))
        executor.submit(Request("t", b"1"))  # shares: takes no room
        entered: list[Future[Outcome]] = []
        blocked = threading.Thread(target=lambda: entered.append(executor.submit(Request("t", b"third"))))
        urgent = threading.Thread(target=lambda: entered.append(executor.submit(Request("t", b"urgent", priority=1))))
        blocked.start()
        _until(lambda: len(executor._blocked) == 1)
        urgent.start()
        _until(lambda: len(executor._blocked) == 2)
        time.sleep(0.1)
        assert not entered and len(executor._waiting) == 2
        gate.open.set()
        blocked.join(10)
        urgent.join(10)
        assert len(entered) == 2 and all(j.result(10).correct for j in entered)
        _until(lambda: len(chained) == 5)
        assert all(j.result(10).correct for j in chained)
    assert gate.began.index(b"urgent") < gate.began.index(b"third")


def test_close_frees_who_waits_outside() -> None:
    gate = Gate()
    executor = Executor(gate, capacity=1)
    first = _busy(executor, gate)
    waiting = executor.submit(Request("t", b"waits"))
    entered: list[Future[Outcome]] = []
    blocked = threading.Thread(target=lambda: entered.append(executor.submit(Request("t", b"outside"))))
    blocked.start()
    _until(lambda: len(executor._blocked))
    closing = threading.Thread(target=executor.close)
    closing.start()
    blocked.join(10)
    assert waiting.cancelled() and entered[0].cancelled()
    gate.open.set()
    closing.join(10)
    assert first.result(1).correct
    with pytest.raises(RuntimeError, match="closed"):
        executor.submit(Request("t", b"later"))


def test_a_cancelled_request_leaves_the_queue_and_no_other_with_it() -> None:
    gate = Gate()
    with Executor(gate, capacity=2) as executor:
        first = _busy(executor, gate)
        gone = executor.submit(Request("t", b"gone"))
        shared = [executor.submit(Request("t", b"shared")) for _ in range(2)]
        assert gone.cancel() and shared[0].cancel() and not first.done()
        assert wait([gone, shared[0]], timeout=5).not_done == set()
        executor.submit(Request("t", b"takes the room"))  # does not block
        gate.open.set()
        assert first.result(10).correct and shared[1].result(10).correct
    assert gate.began[:2] == [b"first", b"shared"] and b"gone" not in gate.began


def test_a_cancelled_running_request_ends_and_is_kept(tmp_path: Path) -> None:
    gate, store = Gate(), Store(tmp_path / "g.sqlite")
    request = Request("t", b"first", policy="p")
    with Executor(gate, store=store) as executor:
        mine = executor.submit(request)
        _until(lambda: gate.began)
        other = executor.submit(Request("t", b"first", policy="other"))
        assert mine.cancel()
        with pytest.raises(CancelledError):
            mine.result(0)
        gate.open.set()
        assert other.result(10).correct
        _until(lambda: store.get(request.key))
        assert executor.submit(request).result(0).correct
    assert gate.began == [b"first"]


def test_asyncio_gets_verdicts_and_cancelling_the_task_cancels_the_request(tmp_path: Path) -> None:
    gate, store = Gate(), Store(tmp_path / "g.sqlite")

    async def use(executor: Executor) -> None:
        first = asyncio.create_task(executor.asubmit(Request("t", b"first")))
        await asyncio.to_thread(_until, lambda: gate.began)
        tasks = [asyncio.create_task(executor.asubmit(Request("t", b"%d" % n))) for n in range(4)]  # capacity: 2
        await asyncio.to_thread(_until, lambda: len(executor._waiting) == 2 and len(executor._blocked) == 2)
        for n in (1, 3):
            tasks[n].cancel()
        for n in (1, 3):
            with pytest.raises(asyncio.CancelledError):
                await tasks[n]
        gate.open.set()
        assert all(o.correct for o in await asyncio.gather(first, tasks[0], tasks[2]))
        assert (await executor.asubmit(Request("t", b"0"))).correct

    with Executor(gate, store=store, capacity=2) as executor:
        asyncio.run(asyncio.wait_for(use(executor), 30))
    assert sorted(gate.began) == [b"0", b"2", b"first"]


def test_closing_tells_who_awaits_a_verdict() -> None:
    gate = Gate()

    async def use(executor: Executor) -> None:
        _busy(executor, gate)
        waits = asyncio.create_task(executor.asubmit(Request("t", b"waits")))
        await asyncio.to_thread(_until, lambda: len(executor._waiting))
        closing = asyncio.create_task(asyncio.to_thread(executor.close))
        with pytest.raises(RuntimeError, match="closed before the verdict"):
            await waits
        gate.open.set()
        await closing

    asyncio.run(asyncio.wait_for(use(Executor(gate)), 30))


def test_a_stream_tells_as_they_end_and_takes_no_more_than_there_is_room_for() -> None:
    taken: list[int] = []
    slow = threading.Event()

    def grade(task: str, source: bytes, **options: object) -> Outcome:
        assert source != b"0" or slow.wait(20)
        return _right(task, source)

    def endless() -> Iterator[Request]:
        for n in range(1000):
            taken.append(n)
            yield Request("t", b"%d" % n)

    async def use(executor: Executor) -> list[bytes]:
        told = []
        async with contextlib.aclosing(executor.stream(endless())) as stream:
            async for request, outcome in stream:
                assert outcome.correct
                told.append(request.source)
                if len(told) == 6:
                    slow.set()
                if b"0" in told:
                    return told
        return told

    with Executor(InlinePool(grade, width=2), capacity=3) as executor:
        told = asyncio.run(asyncio.wait_for(use(executor), 30))
        assert len(told) >= 7 and told[-1] == b"0" and len(taken) <= len(told) + 5
        assert not executor._blocked and not executor._waiting


def test_grade_many_keeps_the_order_and_is_silent_without_a_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    def grade(task: str, source: bytes, **options: object) -> Outcome:
        time.sleep(0.01 * (5 - int(task)))
        return _right(task, source)

    with Executor(InlinePool(grade, width=3), capacity=1) as executor:
        outcomes = executor.grade_many(Request(str(n % 5), b"%d" % n) for n in range(20))
        assert [o.task for o in outcomes] == [str(n % 5) for n in range(20)]
        assert executor.grade_many([]) == []
    assert capfd.readouterr() == ("", "")


def test_what_the_grader_refuses_ends_grade_many_before_more_is_begun() -> None:
    began: list[bytes] = []

    def grade(task: str, source: bytes, **options: object) -> Outcome:
        began.append(source)
        time.sleep(0.05)
        raise UsageError("unknown task")

    with Executor(InlinePool(grade)) as executor, pytest.raises(UsageError, match="unknown task"):
        executor.grade_many([Request("t", b"%d" % n) for n in range(50)])
    assert len(began) < 10


INTERRUPTED = """
import sys
from kbx_env.executor import Executor, ProcessPool, Request
from kbx_env.store import Store

store = Store(sys.argv[1])
try:
    with Executor(ProcessPool(1, "fake_worker:Grader"), store=store) as executor:
        asked = [Request("t", b"right", sample=0), Request("t", b"hang", sample=1), Request("t", b"wrong", sample=2)]
        executor.grade_many(asked)
except KeyboardInterrupt:
    sys.exit(130)
"""


def test_ctrl_c_ends_grade_many_and_what_has_ended_is_kept(tmp_path: Path) -> None:
    (tmp_path / "fake_worker.py").write_text(WORKER)
    root = str(Path(kbx_env.__file__).parent.parent)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), root])}
    file = tmp_path / "g.sqlite"
    run = subprocess.Popen([sys.executable, "-c", INTERRUPTED, str(file)], env=env, stderr=subprocess.PIPE)
    store = Store(file)
    try:
        _until(lambda: run.poll() is not None or list(store.rows()))
        time.sleep(0.3)
        start = time.monotonic()
        run.send_signal(signal.SIGINT)
        _, told = run.communicate(timeout=20)
    finally:
        run.kill()
    assert run.returncode == 130 and time.monotonic() - start < 10 and b"Traceback" not in told, told.decode()
    kept = {sample: outcome for _, _, sample, outcome in store.rows()}
    assert kept[0].correct and 2 not in kept


def test_workers_start_ahead_and_are_warm_before_the_first_request(lane: ProcessPool) -> None:
    assert len(lane._all) == 2 and lane.ready(30)
    assert lane.grade(Request("t", b"warm"), 10).message == "warm True"
    with pytest.raises(WorkerLost):
        lane.grade(Request("t", b"die"), 10)
    _until(lambda: sum(w.alive for w in lane._all) == 2)  # the successor is there without being asked for


def test_a_worker_whose_grader_raised_is_not_used_again(lane: ProcessPool) -> None:
    single = ProcessPool(1, "fake_worker:Grader")
    try:
        before = single.grade(Request("t", b"wrong"), 30).message
        assert single.grade(Request("t", b"wrong"), 30).message == before
        with pytest.raises(WorkerLost, match="a bug of ours"):
            single.grade(Request("t", b"raise"), 30)
        assert single.grade(Request("t", b"wrong"), 30).message != before
    finally:
        single.close()


def test_without_ahead_a_worker_starts_when_it_is_needed(lane: ProcessPool) -> None:
    lazy = ProcessPool(2, "fake_worker:Grader", ahead=False)
    try:
        assert not lazy._all
        assert lazy.grade(Request("t", b"right"), 30).correct and len(lazy._all) == 1
    finally:
        lazy.close()


def test_a_deadline_shorter_than_the_start_does_not_kill_the_worker_that_starts(
    lane: ProcessPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KBX_SLOW_START", "1.5")
    slow = ProcessPool(1, "fake_worker:Grader")
    try:
        with pytest.raises(WorkerLost, match="still starting"):
            slow.grade(Request("t", b"right"), 0.2)
        assert slow.grade(Request("t", b"right"), 30).correct and len(slow._all) == 1
    finally:
        slow.close()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"bakend": "cpu"}, "unknown option 'bakend'.*backend"),
        ({"workers": 0}, "workers is 0"),
        ({"backend": "tpu"}, "unknown backend"),
    ],
)
def test_grade_many_of_the_package_refuses_what_it_cannot_do(options: dict[str, object], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        kbx_env.grade_many([("activation/relu_fp32", b"")], **options)


def test_grade_many_of_the_package_refuses_what_is_no_pair_and_takes_none_at_all() -> None:
    with pytest.raises(UsageError, match="task, source"):
        kbx_env.grade_many([("activation/relu_fp32", None)], backend="cpu")  # type: ignore[list-item]
    assert kbx_env.grade_many([], backend="cpu") == []


def test_grade_many_of_the_package_grades() -> None:
    from kbx_env.spec.catalog import task_ids

    task = next(t for t in task_ids() if t.startswith("activation/"))
    pairs = [(task, "def f(:"), (task, b"x = 1")]
    bad, empty = kbx_env.grade_many(pairs, workers=1, backend="cpu", targets=(), progress=False)
    assert bad.verdict is Verdict.MALFORMED and empty.fault is Fault.POLICY and bad.source_sha256 != empty.source_sha256


def test_a_repeated_source_is_a_look_up_for_any_policy_and_sample(tmp_path: Path) -> None:
    store, calls = Store(tmp_path / "g.sqlite"), []

    def grade(task: str, source: bytes, **options: object) -> Outcome:
        calls.append(options)
        return _right(task, source)

    about = {"fingerprint": "f", "torch": "2.13.0"}
    strict = {"torch_ops": "strict", "seed": None}
    with Executor(InlinePool(grade), store=store) as executor:

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

    with Executor(InlinePool(weak), store=store) as executor:
        assert executor.submit(Request("t", b"cheat")).result(5).correct
    assert list(store.rows()) == []


def test_requests_with_an_outcome_do_not_stay_in_memory_until_their_deadline() -> None:
    with Executor(InlinePool(_right), capacity=100) as executor:
        first = executor.submit(Request("t", b"first", deadline=86400))
        first.result(5)
        gone = weakref.ref(first)
        del first
        for k in range(1500):
            executor.submit(Request("t", b"%d" % k, deadline=86400)).result(5)
        gc.collect()
        assert gone() is None and len(executor._timer._due) < 1500
