"""The arithmetic of a speedup, on sides whose true times are known."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_device import FakeDevice
from hypothesis import given
from hypothesis import strategies as st
from puppet import puppet_session

from kbx_env.device.driver import KEPT_BYTES
from kbx_env.device.stopwatch import Stopwatch
from kbx_env.errors import SandboxError
from kbx_env.grading import compulsory_work, inputs
from kbx_env.grading.runtime.untrusted import GradingAborted
from kbx_env.grading.timing import contestants, ratio
from kbx_env.grading.timing import paired as clock
from kbx_env.grading.timing.precision import TRAINING, Precision
from kbx_env.grading.timing.roofline import physical_limits
from kbx_env.grading.timing.telemetry import Reading
from kbx_env.outcome import Verdict
from kbx_env.spec.catalog import load_task, task_ids

TICK_US = 0.032
"""Resolution of an H200's event clock."""
CASE = load_task("activation/gelu_fp16").timed[0]


class Model:
    """A kernel of ``us`` whose time depends on its process and on where its buffers lie; the clock ticks."""

    def __init__(self, us: float, placement: float, seed: int) -> None:
        self.us, self.placement, self.rng, self.here = us, placement, random.Random(seed), 1.0
        self.offset = self.rng.gauss(0.0, clock.PROCESS_US / math.sqrt(2))

    def shuffle(self, seed: int, calls: bool = True) -> None:
        self.here = math.exp(self.rng.gauss(0.0, self.placement))

    def measure(self, order: Sequence[int], turns: object = None, flush: bool = True, warm: bool = True) -> list[float]:
        def call() -> float:
            return self.us * self.here * math.exp(self.rng.gauss(0, 0.01)) + self.offset

        return [round(call() / TICK_US) * TICK_US for _ in order]

    def launch_us(self) -> float | None:
        return None


class Launches(Model):
    """The same, and an empty kernel tells by how much the process is slower than others, within ``LEVELLED_US``."""

    asked = 0

    def launch_us(self) -> float | None:
        self.asked += 1
        return 3.4 + self.offset + self.rng.gauss(0.0, ratio.LEVELLED_US / math.sqrt(2))


def _holds(us: float, placement: float, times: float, seed: int, kind: type[Model] = Model) -> bool:
    paired = clock.pair(kind(us * times, placement, seed), kind(us, placement, seed + 10_000))
    return paired.low <= math.log(times) <= paired.high


@pytest.mark.parametrize("us", [2.0, 4.2, 12.0, 100.0])
@pytest.mark.parametrize("placement", [0.0, 0.002, 0.02])
def test_the_interval_holds_the_truth(us: float, placement: float) -> None:
    # Stopping when the interval is narrow costs a little of the nominal 95 %.
    assert sum(_holds(us, placement, 1.0, s) for s in range(100)) >= 88
    assert sum(_holds(us, placement, 1.3, s) for s in range(100)) >= 88


@pytest.mark.parametrize("us", [2.0, 4.2, 12.0, 100.0])
def test_the_interval_holds_the_truth_of_levelled_times_too(us: float) -> None:
    assert sum(_holds(us, 0.002, 1.0, s, Launches) for s in range(100)) >= 88


def test_processes_that_launch_at_different_speeds_are_levelled() -> None:
    """Of kernels of 4 us against themselves half were off by more than 3 %."""
    within = {
        kind: sum(abs(clock.pair(kind(4.2, 0.002, s), kind(4.2, 0.002, s + 10_000)).log_ratio) < 0.03 for s in range(100))
        for kind in (Model, Launches)
    }
    assert within[Launches] >= 92 and within[Model] < 90


@pytest.mark.parametrize("us, asked", [(4.2, 1), (400.0, 0)])
def test_launches_are_timed_once_and_for_short_calls_only(us: float, asked: int) -> None:
    sides = Launches(us, 0.002, 1), Launches(us, 0.002, 2)
    clock.pair(*sides)
    assert [s.asked for s in sides] == [asked] * 2


@given(st.none() | st.floats(0.5, 50.0), st.none() | st.floats(0.5, 50.0), st.floats(0.01, 100.0))
def test_levelling_favours_neither_side_and_is_bounded(
    eager_us: float | None, candidate_us: float | None, shortest_us: float
) -> None:
    shifts = ratio.levelled(eager_us, candidate_us, shortest_us)
    assert sum(shifts) == 0.0 and abs(shifts[0]) <= ratio.MAX_LAUNCH_GAP_US / 2
    assert abs(shifts[0]) < shortest_us, "no time becomes negative, whatever a runner claims"
    if eager_us is None or candidate_us is None:
        assert shifts == (0.0, 0.0), "what is not known changes nothing"
    elif eager_us != candidate_us:
        assert (shifts[0] > 0) == (eager_us > candidate_us), "who launches slowly is given the time back"


def test_a_real_difference_shows() -> None:
    paired = clock.pair(Model(12.0, 0.01, 1), Model(11.0, 0.01, 2))
    assert paired.low > 0.03 and paired.eager_us == pytest.approx(12.0, rel=0.03)


def test_one_bad_call_in_a_block_changes_nothing() -> None:
    assert clock.trimmed_mean([10.0, 10.1, 9.9, 10.0, 4000.0]) == pytest.approx(10.0, rel=0.01)


class Counts(Model):
    """Counts its timed calls, the untimed ones before each block, and those that a move makes."""

    calls = untimed = 0

    def shuffle(self, seed: int, calls: bool = True) -> None:
        self.untimed += clock.SLOTS * calls
        super().shuffle(seed, calls)

    def measure(self, order: Sequence[int], turns: object = None, flush: bool = True, warm: bool = True) -> list[float]:
        self.calls, self.untimed = self.calls + len(order), self.untimed + warm
        return super().measure(order, turns, flush, warm)


def test_slow_calls_are_few() -> None:
    for us, most in ((100.0, clock.BLOCK), (30_000.0, 1)):
        side = Counts(us, 0.0, 1)
        paired = clock.pair(Counts(2 * us, 0.0, 2), side)
        assert side.calls <= most * paired.pairs + clock.BLOCK
        assert paired.log_ratio == pytest.approx(math.log(2), abs=0.02)


def test_of_a_baseline_that_is_known_to_be_slow_no_call_is_wasted() -> None:
    slow = Counts(90_000.0, 0.0, 1)
    paired = clock.pair(slow, Counts(5_000.0, 0.0, 2), about_us=90_000.0)
    assert slow.calls == paired.pairs <= 2 * clock.REPORT.min_rounds and slow.untimed == 1
    assert paired.log_ratio == pytest.approx(math.log(18), abs=0.02)


@pytest.mark.parametrize("known", [0.0, 40_000.0])
def test_one_call_of_a_slow_baseline_is_beside_several_of_a_fast_kernel(known: float) -> None:
    """One call of 17 us is cold, and late where the host is: it would be off by any factor."""
    slow, fast = Counts(40_000.0, 0.0, 1), Counts(17.0, 0.0, 2)
    paired = clock.pair(slow, fast, about_us=known)
    assert fast.calls >= clock.BLOCK * (paired.pairs - 1) and slow.calls <= paired.pairs + clock.BLOCK - 1
    assert paired.log_ratio == pytest.approx(math.log(40_000 / 17), abs=0.03)


@pytest.mark.parametrize("candidate_us", [400.0, 25.0])
def test_who_is_far_from_eager_is_measured_less_and_checked_all_the_same(candidate_us: float) -> None:
    for seed in range(20):
        checked: list[list[int]] = []
        side = Counts(candidate_us, 0.001, seed)
        paired = clock.pair(Counts(100.0, 0.001, seed + 100), side, check=lambda order, turns: checked.append(order))
        assert clock.REPORT.early_rounds <= paired.pairs == len(checked) < clock.REPORT.min_rounds * clock.REPORT.pairs
        assert paired.log_ratio == pytest.approx(math.log(100.0 / candidate_us), abs=0.02)
        assert paired.low < paired.log_ratio < paired.high
        assert max(paired.low, -paired.high) > clock.CLEAR_LOG_RATIO


@pytest.mark.parametrize("placement", [0.002, 0.02])
def test_the_interval_holds_the_truth_of_slow_kernels_too(placement: float) -> None:
    assert sum(_holds(100.0, placement, 0.25, s) for s in range(100)) >= 88


def test_a_noisy_slow_kernel_gets_its_rounds() -> None:
    pairs = [clock.pair(Model(100.0, 0.2, s), Model(400.0, 0.2, s + 100)).pairs for s in range(10)]
    assert sum(n >= clock.REPORT.min_rounds * clock.REPORT.pairs for n in pairs) >= 8


@pytest.mark.parametrize(("us", "report", "training"), [(40.0, True, True), (200.0, True, False), (600.0, False, False)])
def test_buffers_of_slow_calls_move_once(us: float, report: bool, training: bool) -> None:
    """Where a call is slow, its address changes less than the precision allows."""

    class Moves(Model):
        moves = 0

        def shuffle(self, seed: int, calls: bool = True) -> None:
            self.moves += 1

    for precision, often in ((clock.REPORT, report), (TRAINING, training)):
        side = Moves(us, 0.0, 1)
        clock.pair(Moves(us, 0.0, 2), side, precision=precision)
        assert (side.moves > 1) == often


def test_a_block_of_several_calls_has_been_warmed() -> None:
    class Warm(Model):
        warm = False

        def shuffle(self, seed: int, calls: bool = True) -> None:
            self.warm = calls

        def measure(self, order: Sequence[int], turns: object = None, flush: bool = True, warm: bool = True) -> list[float]:
            assert self.warm or len(order) < clock.BLOCK
            return [self.us * self.rng.choice((0.5, 1.5)) for _ in order]

    for us in (3_000.0, 6_000.0, 12_000.0):
        clock.pair(Warm(us, 0.0, 1), Warm(us, 0.0, 2), about_us=us)


@pytest.mark.parametrize(
    "us", [[], [0.0], [-1.0], [float("nan")], [float("inf")], [1.0, 2.0], [1e12], ["x"], None, [None]]
)
def test_times_that_cannot_be_are_refused(us: object) -> None:
    with pytest.raises(GradingAborted):
        clock.RunnerContestant(puppet_session({"ok": True, "us": us}), CASE).measure([0])


def test_work_hidden_from_the_events_shows_on_the_wall_clock(monkeypatch) -> None:
    side = clock.RunnerContestant(puppet_session({"ok": True}), CASE)
    now = [0.0]
    monkeypatch.setattr(contestants.time, "perf_counter", lambda: now[0])

    def ask(header: dict, *_: object, **__: object) -> object:
        now[0] += 17 * header["times"] * 100e-6
        return {"ok": True}, []

    monkeypatch.setattr(side.session, "ask", ask)
    assert side.audit(90.0, 17) is None
    with pytest.raises(GradingAborted, match="claims 50 us"):
        side.audit(50.0, 17)
    with pytest.raises(GradingAborted, match="claims 50 us"):
        side.audit(50.0, 17, own_us=60.0)
    assert "claims 50 us" in (side.audit(50.0, 17, own_us=90.0) or ""), "what held up eager is not this side's doing"


def test_the_first_replay_of_a_graph_may_take_longer_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It uploads the graph; a second attempt that is as short decides before one of a tenth of a second is made."""
    side = clock.RunnerContestant(puppet_session({"ok": True}), CASE)
    now, replays = [0.0], list[int]()
    monkeypatch.setattr(contestants.time, "perf_counter", lambda: now[0])

    def ask(header: dict, *_: object, **__: object) -> object:
        now[0] += header["times"] * 17 * 50e-6 + (0 if replays else 5e-3)
        replays.append(header["times"])
        return {"ok": True}, []

    monkeypatch.setattr(side.session, "ask", ask)
    assert side.audit(50.0, 17, TRAINING.audit_us) is None
    assert len(replays) == 2 and replays[0] == replays[1] <= 1 + TRAINING.audit_us / (17 * 50)


def test_an_autotuner_at_work_in_a_timed_call_ends_it(monkeypatch) -> None:
    side = clock.RunnerContestant(puppet_session({"ok": True, "us": [1.0], "tuned": 1}), CASE)
    with pytest.raises(GradingAborted, match="autotuner") as stop:
        side.measure([0])
    assert stop.value.violations[0].rule == "clock"


def test_graphs_hold_a_number_of_calls_that_nobody_knows(monkeypatch) -> None:
    side = clock.RunnerContestant(puppet_session({"ok": True, "captured": True}), CASE)
    small = {side.capture(1 << 10) for _ in range(60)}
    assert len(small) > 5 and min(small) >= contestants.GRAPH_CALLS[0] and max(small) <= contestants.GRAPH_CALLS[1]
    assert {side.capture(1 << 30) for _ in range(9)} == {contestants.SLOTS}, "what fits into memory"
    assert {side.capture(1 << 10, 90_000.0) for _ in range(9)} == {contestants.SLOTS}, "what takes no second of everybody's time"
    assert max(side.capture(1 << 10, 2_000.0) for _ in range(60)) == 15
    assert max(side.capture(1 << 10, 2_000.0, TRAINING.graph_us) for _ in range(60)) == 7


@pytest.mark.parametrize("us", [10.0, 9_000.0, 30_000.0])
@pytest.mark.parametrize("known", [0.0, 30_000.0])
def test_every_block_may_be_looked_at_until_the_last(us: float, known: float) -> None:
    for seed in range(12):
        seen: list[tuple[list[int], object]] = []

        class Noisy(Model):
            def measure(self, order: Sequence[int], turns: object = None, flush: bool = True, warm: bool = True) -> list[float]:
                self.last = list(order)
                return [t * self.rng.choice((0.5, 1.5)) for t in super().measure(order)]

        side = Noisy(us, 0.0, seed + 50)

        def check(order: list[int], at: object, side: Noisy = side, seen: list[tuple[list[int], object]] = seen) -> None:
            seen.append((order, side.last))

        paired = clock.pair(Model(us, 0.0, seed), side, check=check, about_us=known)
        assert len(seen) == paired.pairs and all(order == last for order, last in seen)


def test_one_interrupted_call_makes_no_other_wait() -> None:
    now, took = [0.0], iter([2e-5] * 3 + [2e-5, 4e-3, 2e-5])
    watch = Stopwatch("cpu", FakeDevice())
    watch._now = lambda: now[0]

    def call(_: dict[str, Any]) -> None:
        now[0] += next(took, 2e-5)

    watch.prepare(call, [{"n": k} for k in range(3)])
    assert watch._wait_us == pytest.approx(140.0)


def test_solvers_of_small_matrices_are_judged_on_the_host_and_large_results_never() -> None:
    """One expert's six results without inputs (logspace: 512 MiB) once took a core four minutes, and everybody waited."""
    eig, logspace, rand = (load_task(t) for t in ("linearalgebra/eig", "random/logspace", "random/rand"))
    assert contestants.faster_on_host(eig, 20_000, 57_000.0) and contestants.faster_on_host(eig, 200_000, 42_000.0)
    assert not contestants.faster_on_host(eig, 32 << 20, 1500.0)
    assert not contestants.faster_on_host(logspace, 512 << 20, 400.0)
    assert not contestants.faster_on_host(rand, 1000, 1e6), "statistics look at all of a result"


def test_what_no_kernel_has_to_read_is_judged_all_the_same() -> None:
    """gelu_min may stop early and so has to read nothing; a judge on the host still took 38 s for its 2^28 elements."""
    task = load_task("fusion/fused_gelu_min")
    case = max(task.cases, key=lambda c: len(c.axes.get("*", ())) if isinstance(c.axes.get("*"), tuple) else 0)
    args = inputs.draw(task, case, 3)
    needs = clock._CaseWork.of(task, case, args, "cpu")
    assert needs.tensor_bytes >= sum(v.numel() * v.element_size() for v in args.values() if hasattr(v, "numel")) > 0


def test_work_that_needs_more_memory_than_expected_is_repeated_with_more(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    @contextlib.contextmanager
    def room(share: float) -> Iterator[None]:
        asked.append(share)
        yield

    def work(fails: int) -> str:
        if len(asked) <= fails:
            raise torch.OutOfMemoryError("full")
        return "done"

    reserve = clock._Reservations(SimpleNamespace(gpu=SimpleNamespace(room=room)), 1000)  # type: ignore[arg-type]
    shared = clock.SHARE * 1000
    for fails, shares in ((0, [0.1]), (1, [0.1, 0.4]), (2, [0.1, 0.4, 1.0])):
        asked.clear()
        assert reserve.run(0.1 * shared, lambda fails=fails: work(fails)) == "done"
        assert asked == pytest.approx(shares)
    asked.clear()
    # Others may hold the memory that is missing, and give it back.
    monkeypatch.setattr(clock, "MEMORY_PAUSE_SECONDS", 0.0)
    with pytest.raises(torch.OutOfMemoryError):
        reserve.run(0.9 * shared, lambda: work(9))
    assert asked == pytest.approx([0.9] + clock.MEMORY_ATTEMPTS * [1.0])


def test_memory_that_judging_is_likely_to_need_is_asked_for_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request to the driver waits for a lock of the host: a grading asked for some 40 pieces, and gave them back."""
    asked, mib = list[int](), 1 << 20
    monkeypatch.setattr(clock, "preallocate", asked.append)
    reserve = clock._Reservations(SimpleNamespace(gpu=SimpleNamespace(room=lambda share: contextlib.nullcontext())), 4 << 30)  # type: ignore[arg-type]
    for needed, likely in ((900, 600), (900, 100), (500, 600)):
        reserve.run(needed * mib, reserve.preallocate, likely * mib)
    assert asked == [600 * mib], "a process keeps little anyway, and no more is asked for than is reserved"
    reserve.run(900 * mib, reserve.preallocate)
    assert len(asked) == 1


@pytest.mark.parametrize("us, hosted", [(50.0, False), (90_000.0, True)])
def test_a_judge_on_the_host_asks_for_no_memory_of_the_gpu(monkeypatch: pytest.MonkeyPatch, us: float, hosted: bool) -> None:
    steps = list[str]()

    @contextlib.contextmanager
    def using() -> Iterator[None]:
        steps.append("shared")
        yield
        steps.append("left")

    case, session = CASE, SimpleNamespace(gpu=SimpleNamespace(using=using))
    candidate = SimpleNamespace(session=session, case=case)
    work = clock._CaseWork(1 << 20, 1 << 20, 2 << 20, 0, 2 << 20)
    paired = clock.Paired(us, 40.0, 0.1, 0.0, 0.2, 3, us)
    one = clock._Measured(candidate, paired, work, False, [], None, host_bound=hosted)  # type: ignore[arg-type]
    monkeypatch.setattr(clock, "_judge", lambda *_: steps.append("judged"))
    device: Any = SimpleNamespace(roofline=physical_limits("none", 0, 0, 0), notes=[])
    draw: Any = lambda: steps.append("drawn")  # noqa: E731
    clock._case_time(load_task("activation/gelu_fp16"), one, draw, device, lambda: steps.append("allocated"))
    assert steps == ["shared", *["allocated"] * (not hosted), "drawn", "left", "judged", "judged"]
    assert ["wait for the host" in note for note in device.notes] == [True] * hosted


@pytest.mark.parametrize("late", [False, True])
def test_a_baseline_that_keeps_the_device_waiting_is_bound_by_the_host(monkeypatch: pytest.MonkeyPatch, late: bool) -> None:
    """Beside four GPUs whose gradings ask the driver, eager's ``det`` took twice as long, and so did the speedup."""
    eager = contestants.EagerContestant(load_task("linearalgebra/det"), CASE, "cpu", Stopwatch("cpu", FakeDevice()))
    assert not eager.host_bound
    replies = iter([{"us": [9.0] * 5, "late": [0, 1, 2, 3, 4] if late else [3]}, {"us": [9.0], "late": [0]}])
    monkeypatch.setattr(eager.watch, "measure", lambda header: next(replies))
    eager.measure([0, 1, 2, 0, 1])
    eager.measure([0])
    assert eager.host_bound is late


def test_the_limit_of_memory_counts_what_torch_has_and_cannot_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results of timed calls wait in a large piece of torch's memory; the rest of it is of no use for small work beside them."""
    shares = list[float]()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(total_memory=1000))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 100)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 400)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", shares.append)
    with clock._limited(200):
        assert shares == [0.6]
    assert shares == [0.6, 1.0]


def test_who_reserved_all_memory_may_use_most_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    # On a GPU of 80 GB the share for judging is small, and a case of 1 GiB needs almost all of twice that share.
    allowed: list[float] = []

    @contextlib.contextmanager
    def limited(more: float) -> Iterator[None]:
        allowed.append(more)
        yield

    def work() -> str:
        if len(allowed) < 2:
            raise torch.OutOfMemoryError("full")
        return "done"

    monkeypatch.setattr(clock, "_limited", limited)
    monkeypatch.setattr(clock, "_free_bytes", lambda: 5000)
    gpu = SimpleNamespace(room=lambda share: contextlib.nullcontext())
    assert clock._Reservations(SimpleNamespace(gpu=gpu), 1000).run(0.9 * clock.SHARE * 1000, work) == "done"  # type: ignore[arg-type]
    assert allowed == pytest.approx([clock.MEMORY_SLACK * 0.9 * clock.SHARE * 1000, clock.FREE_SHARE * 5000])


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), SandboxError("the GPU's memory is full: out of memory"),
     GradingAborted(Verdict.RUNTIME_ERROR, "RuntimeError: cuMemAlloc_v2 failed with error 2 (out of memory)")],
)  # fmt: skip
def test_what_others_hold_of_the_memory_counts_against_no_submission(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    asked: list[float] = []

    @contextlib.contextmanager
    def room(share: float) -> Iterator[None]:
        asked.append(share)
        yield

    def work(fails: list[Exception]) -> str:
        if fails:
            raise fails.pop()
        return "measured"

    pauses: list[float] = []
    monkeypatch.setattr(clock.time, "sleep", pauses.append)
    session: Any = SimpleNamespace(gpu=SimpleNamespace(room=room, contended=True))
    assert clock._with_memory(session, 0.0, lambda fails=[error]: work(fails)) == "measured"
    assert asked == [1.0] and not pauses
    # A large case has all the memory from the beginning; others hold results that they can only judge in a pause.
    assert clock._with_memory(session, 2.0, lambda fails=[error, error]: work(fails)) == "measured"
    assert len(pauses) == 2
    # Alone with all the memory, and again after a pause, it is the submission's fault; other errors always are.
    with pytest.raises(type(error)):
        clock._with_memory(session, 0.2, lambda fails=[error, error, error]: work(fails))
    with pytest.raises(GradingAborted, match="wrong"):
        clock._with_memory(session, 0.0, lambda: work([GradingAborted(Verdict.INCORRECT, "timed call wrong")]))


class Readings:
    """Telemetry of a device that gives these readings, and then none."""

    def __init__(self, readings: list[Reading] | None = None) -> None:
        self._readings = [] if readings is None else readings

    def read(self, ours: Collection[int]) -> Reading | None:
        return self._readings.pop(0) if self._readings else None

    def begin_reading(self, ours: Collection[int]) -> Any:
        return SimpleNamespace(result=partial(self.read, ours))


@pytest.mark.parametrize(
    "ample, precision, free_gib, quiet_wanted",
    [
        (False, TRAINING, 100, False),
        (True, clock.REPORT, 100, False),
        (True, TRAINING, 100, False),
        (True, TRAINING, 30, False),  # the next one might have too little memory
        (True, TRAINING, 100, True),  # the next one measures within 1 %
    ],
)
@pytest.mark.parametrize("each, expected", [(10, [5]), (40, [3, 2]), (60, [2, 2, 1]), (500, [1] * 5)])
def test_large_results_are_judged_before_the_next_case_is_measured(
    monkeypatch: pytest.MonkeyPatch, each: int, expected: list[int], ample: bool, precision: Precision, free_gib: int,
    quiet_wanted: bool,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace())
    monkeypatch.setattr(clock, "Telemetry", lambda uuid: Readings())
    monkeypatch.setattr(clock.rooflines, "roofline", lambda device, file: "of the device")
    monkeypatch.setattr(clock, "Stopwatch", lambda device: SimpleNamespace(close=lambda: closed.append(device), preallocate=tuple))
    released, closed, alone, released_alone = list[int](), list[str](), list[bool](), list[bool]()

    def release(number: int) -> None:
        released.append(number)
        released_alone.append(bool(alone))

    @contextlib.contextmanager
    def hold(quiet: bool) -> Iterator[None]:
        alone.append(True)
        yield
        alone.pop()

    gpu = SimpleNamespace(alone=hold, file=lambda name: None, users=tuple, quiet_wanted=quiet_wanted)
    monkeypatch.setattr(clock, "_free_bytes", lambda: free_gib << 30)
    ended = list[bool]()
    end_runner = lambda: ended.append(bool(alone))  # noqa: E731
    session = SimpleNamespace(gpu=gpu, backend="cuda", runner=SimpleNamespace(pid=1), end_runner=end_runner)
    candidates: list[Any] = [
        SimpleNamespace(session=session, case=None, release=partial(release, k)) for k in range(5)
    ]

    def drawn(self: Any, candidate: Any, eager: Any, index: int, *rest: Any) -> Any:
        assert candidate is candidates[index] and alone
        return SimpleNamespace(kept_bytes=each, disturbed=False, after=None)

    monkeypatch.setattr(clock._Measuring, "_drawn", drawn)
    monkeypatch.setattr(clock._Measuring, "bytes_to_judge", lambda self, work: each)
    monkeypatch.setattr(clock._Measuring, "_preallocate", lambda self, eager, work, before: ample)
    measuring = clock._Measuring(load_task("activation/relu"), lambda index: None, precision, 100)  # type: ignore
    counts: list[int] = []
    while sum(counts) < 5:
        counts.append(len(measuring.run(candidates[sum(counts) :], [None] * 5, sum(counts))))  # type: ignore[list-item]
    assert counts == expected and measuring.roofline == "of the device"
    # Freeing memory disturbs who measures next, by less than training asks for. Without ample memory the next one needs it at once.
    later = ample and precision is TRAINING and free_gib > 40 and not quiet_wanted
    assert len(closed) == len(counts) and set(released_alone) <= {not later}
    # Nothing more is asked of a runner after the last case.
    assert len(released) == len(counts) - later and ended == [False] * later


def test_a_runner_is_told_what_memory_a_case_takes() -> None:
    """Two draws of x (400 bytes) and one of y (80): the values as they came, then the windows, then results beside these."""
    task = SimpleNamespace(written=lambda args: {"y"})
    session, case = SimpleNamespace(task=task), SimpleNamespace(args={})
    side = contestants.RunnerContestant(session, case)  # type: ignore[arg-type]
    x, y = torch.zeros(100), torch.zeros(10, dtype=torch.float64)
    draws: list[dict[str, Any]] = [{"x": x, "y": y, "n": 3}, {"x": x + 1}]
    values, most = 880, contestants.GRAPH_CALLS[1]
    assert side._memory(draws, 1000, 3) == (480, 3, values + most * (1000 + 80))
    few = contestants.BLOCK * ((1 << 30) + 80)
    assert side._memory(draws, 1 << 30, 2) == (480, 2, values + few), "of large results those of one block"


@pytest.mark.parametrize(
    "gib, free_gib, ample",
    [
        (0.25, 20, True),  # the usual limits suffice, but not for results
        (0.25, 10, False),
        (0.5, 40, True),
        (0.5, 20, False),  # on a full GPU each step asks for what it needs
    ],
)
def test_a_large_case_is_preallocated_where_the_gpu_has_ample_memory(
    monkeypatch: pytest.MonkeyPatch, gib: float, free_gib: int, ample: bool
) -> None:
    """Half of the tasks have a case of 512 MiB, just above the usual limit: their holds made 250 to 380 requests to the driver."""
    size, asked = int(gib * (1 << 30)), list[Any]()
    monkeypatch.setattr(clock, "_free_bytes", lambda: free_gib << 30)
    monkeypatch.setattr(clock, "preallocate_outside_pool", asked.append)
    monkeypatch.setattr(clock._Measuring, "_memory", lambda self, eager, work: (size, 3, 2 * size))
    eager: Any = SimpleNamespace(watch=SimpleNamespace(preallocate=lambda *memory: asked.append(memory), pooled=True))
    measuring = clock._Measuring(load_task("activation/relu"), lambda index: None, TRAINING, 100)  # type: ignore
    work = clock._CaseWork(size, size, 2 * size, 0, 2 * size)
    assert measuring._preallocate(eager, [work], None) is ample
    assert asked[0] == (size, 3, 2 * size, ample) and asked[1] == (measuring.bytes_to_judge(work) if ample else 256 << 20)
    assert measuring._preallocate(eager, [work], ample) is ample and len(asked) == 3, "results have memory for the whole turn"
    measuring.sparing = True  # an attempt has failed
    assert not measuring._preallocate(eager, [work], None) and asked[3][-1] is False and asked[4] == 256 << 20


@pytest.mark.parametrize("busy, disturbed", [((1,), False), ((1, 9), True)])
def test_a_turn_that_ends_before_the_last_case_looks_for_strangers(
    monkeypatch: pytest.MonkeyPatch, busy: tuple[int, ...], disturbed: bool
) -> None:
    """Processes are listed at the beginning and the end of a turn; who comes and goes in between must not be missed."""
    readings = [Reading("m", processes=(1, 9)), Reading("m", processes=(1, 9), busy=busy)]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace())
    monkeypatch.setattr(clock, "Telemetry", lambda uuid: Readings(readings))
    monkeypatch.setattr(clock.rooflines, "roofline", lambda device, file: "of the device")
    monkeypatch.setattr(clock, "Stopwatch", lambda device: SimpleNamespace(close=tuple))
    gpu = SimpleNamespace(alone=lambda quiet: contextlib.nullcontext(), file=lambda name: None, users=tuple, quiet_wanted=False)
    session = SimpleNamespace(gpu=gpu, backend="cuda", runner=SimpleNamespace(pid=1))
    candidates: list[Any] = [SimpleNamespace(session=session, case=None, release=tuple) for _ in range(2)]
    measured = clock._Measured(candidates[0], None, None, False, [], None)  # type: ignore[arg-type]
    for name, found in {"_drawn": measured, "_preallocate": None, "bytes_to_judge": 200}.items():
        monkeypatch.setattr(clock._Measuring, name, lambda *_, found=found: found)
    measuring = clock._Measuring(load_task("activation/relu"), lambda index: None, clock.REPORT, 100)  # type: ignore
    assert [m.disturbed for m in measuring.run(candidates, [None] * 2, 0)] == [disturbed] and not readings  # type: ignore[list-item]


def test_a_failed_attempt_is_repeated_with_memory_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace())
    monkeypatch.setattr(clock, "Telemetry", lambda uuid: Readings())
    monkeypatch.setattr(clock.rooflines, "roofline", lambda device, file: "of the device")
    monkeypatch.setattr(clock, "Stopwatch", lambda device: SimpleNamespace(close=tuple))
    gpu = SimpleNamespace(alone=lambda quiet: contextlib.nullcontext(), file=lambda name: None, users=tuple, quiet_wanted=False)
    session = SimpleNamespace(gpu=gpu, backend="cuda", runner=SimpleNamespace(pid=1))
    candidate: Any = SimpleNamespace(session=session, case=None, release=tuple)

    def full(*_: Any) -> bool:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(clock._Measuring, "_preallocate", full)
    measuring = clock._Measuring(load_task("activation/relu"), lambda index: None, clock.REPORT, 100)  # type: ignore
    assert not measuring.sparing
    with pytest.raises(torch.OutOfMemoryError):
        measuring.run([candidate], [None], 0)  # type: ignore[list-item]
    assert measuring.sparing


@pytest.mark.parametrize("us, placement", [(30.0, 0.002), (400.0, 0.002), (30_000.0, 0.01)])
def test_for_training_fewer_rounds_are_enough(us: float, placement: float) -> None:
    for seed in range(10):
        pairs = []
        for precision in (clock.REPORT, TRAINING):
            sides = Model(1.1 * us, placement, seed), Model(us, placement, seed + 100)
            paired = clock.pair(*sides, precision=precision)
            pairs.append(paired.pairs)
            assert paired.log_ratio == pytest.approx(math.log(1.1), abs=3 * (paired.high - paired.low))
        assert pairs[1] < pairs[0] and TRAINING.early_rounds <= pairs[1] <= TRAINING.max_rounds


def test_counts_by_shapes_are_the_counts_by_values() -> None:
    """142 of 176 tasks need no values to count their work; the others say so."""
    equal = 0
    for task in map(load_task, task_ids()):
        case = min(task.cases, key=lambda c: compulsory_work.input_bytes(task, c))
        counted = clock._CaseWork.by_shapes(task, case)
        if counted is not None:
            assert counted == clock._CaseWork.of(task, case, inputs.draw(task, case, 3), "cpu"), task.id
            equal += 1
    assert equal > 120
    needs = load_task("index/masked_select")
    assert clock._CaseWork.by_shapes(needs, needs.timed[0]) is None


def test_late_calls_do_not_count_unless_most_are_late() -> None:
    us = [40.0, 41.0, 900.0, 40.5, 3000.0]
    assert contestants.in_time(us, [2, 4]) == [40.0, 41.0, 40.5]
    assert contestants.in_time(us, []) == us
    # A call that reads back is late every time: that is its time.
    assert contestants.in_time(us, [0, 1, 2, 3]) == us and contestants.in_time([5.0], [0]) == [5.0]
    assert contestants.in_time(us, [9, -1]) == us, "a submission may claim anything"


def test_gradings_reserve_what_a_trainer_leaves() -> None:
    """A trainer that keeps 40 of 80 GiB once made half of the gradings of a step run out of memory."""
    gib = 1 << 30
    free = clock.reservable(80 * gib, 0, 10)
    assert clock.reservable(80 * gib, None, 10) == free == 80 * gib - 10 * (clock.CONTEXT_BYTES + KEPT_BYTES)
    assert clock.reservable(80 * gib, 40 * gib, 10) == free - 40 * gib
    assert clock.reservable(80 * gib, 60 * gib, 40) == 10 * gib
