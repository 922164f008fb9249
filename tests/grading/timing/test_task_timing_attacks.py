"""The whole clock on a device that is simulated: honest kernels pass, every known trick with time is told.

Each trick stands for a file of the zoo, which needs a GPU; here its idea meets the same stopwatch and the same grader.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_device import FakeDevice, FakeTalk
from triton.runtime.autotuner import Autotuner

from kbx_env.device.ipc_runner import IpcSender
from kbx_env.device.stopwatch import Stopwatch
from kbx_env.grading import compulsory_work
from kbx_env.grading.runtime.untrusted import GradingAborted
from kbx_env.grading.timing import (
    contestants,
    gpu_lock,
    measuring,
    paired,
    roofline,
    task_timing,
    telemetry,
    timed_results,
)
from kbx_env.grading.timing.contestants import BLOCK, SLOTS
from kbx_env.grading.timing.precision import REPORT
from kbx_env.grading.timing.telemetry import Reading
from kbx_env.options import PRECISIONS
from kbx_env.outcome import Timing, Verdict
from kbx_env.spec.catalog import load_task
from kbx_env.spec.task import Case

TASK = load_task("math/reciprocal")
NAME = next(iter(TASK.takes))
AXIS = TASK.takes[NAME].axes.split()[0]
CASES = tuple(Case({AXIS: (n,)}, draw=TASK.timed[0].draw, draws=TASK.timed[0].draws) for n in (96, 128))
Entry = Callable[[FakeDevice], Callable[..., Any]]
_data_ptr, _copy, _zero, _empty = torch.Tensor.data_ptr, torch.Tensor.copy_, torch.Tensor.zero_, torch.empty


@pytest.fixture(params=[0, 768], ids=["socket", "device memory"])
def time(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Timing]:
    """Time a kernel of 2 us; eager takes 3. Tensors travel through the socket or, in pieces, through lent memory."""
    device = FakeDevice()
    other = FakeDevice()
    for name in ("run", "_bench"):  # as they are now: a guarded stopwatch replaces them for good
        monkeypatch.setattr(Autotuner, name, getattr(Autotuner, name))
    monkeypatch.setattr(measuring, "Stopwatch", lambda _: Stopwatch("cpu", other))

    def now() -> float:
        device.now_us += 3.0  # what a command costs at least
        return device.now_us / 1e6

    monkeypatch.setattr(contestants, "time", SimpleNamespace(perf_counter=now))
    monkeypatch.setattr(roofline, "roofline", lambda *_: roofline.Roofline(4.8e12, {}, 1 << 26, "a model"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=1 << 40))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a model")

    def run(
        make: Entry, cases: tuple[Case, ...] = CASES, task: Any = TASK, eager_us: Callable[[], float] = lambda: 3.0,
        precision: str = "report",
    ) -> Timing:  # fmt: skip
        monkeypatch.setattr(compulsory_work, "fitting", lambda *_: cases)
        plain = task.reference

        def eager(**kwargs: Any) -> Any:
            result = plain(**kwargs)
            other.launch(lambda: None, eager_us())
            return result

        monkeypatch.setattr(contestants.EagerContestant, "__init__", _eager(eager))
        monkeypatch.setattr(contestants.EagerContestant, "host_bound", False)  # the model's clock does not run while the host works
        talk = FakeTalk(task, device, make(device), request.param)
        return task_timing.time_task(task, talk, precision=precision)  # type: ignore[arg-type]

    def _eager(function: Any) -> Any:
        def init(self: Any, task: Any, case: Case, where: str, watch: Stopwatch) -> None:
            self.task, self.case, self.device, self._function, self.watch = task, case, where, function, watch

        return init

    return run


def work(x: torch.Tensor, y: torch.Tensor) -> Callable[[], None]:
    return put(y, lambda: 1.0 / x)


def put(y: torch.Tensor, value: Callable[[], torch.Tensor]) -> Callable[[], None]:
    def run() -> None:
        _copy(y, value())

    return run


def honest(device: FakeDevice) -> Callable[..., Any]:
    def entry(x: torch.Tensor) -> torch.Tensor:
        y = device.new(x)
        device.launch(work(x, y))
        return y

    return entry


def workspace(device: FakeDevice) -> Callable[..., Any]:
    """Honest: a buffer that is kept and written anew, its copy returned."""
    held: dict[int, torch.Tensor] = {}

    def entry(x: torch.Tensor) -> torch.Tensor:
        w = held.setdefault(x.numel(), device.new(x))
        y = device.new(x)
        device.launch(work(x, w))
        device.launch(put(y, lambda: w), 0.5)
        return y

    return entry


def two_parts(device: FakeDevice) -> Callable[..., Any]:
    """Honest: reads back to the host, so that it cannot be captured."""

    def entry(x: torch.Tensor) -> torch.Tensor:
        if device.capturing is not None:
            raise RuntimeError("a capture does not allow that")
        y = device.new(x)
        device.launch(work(x, y))
        device.sync()
        return y

    return entry


@pytest.mark.parametrize("make", [honest, workspace, two_parts])
def test_an_honest_kernel_is_timed(time: Callable[..., Timing], make: Entry) -> None:
    timing = time(make)
    assert len(timing.cases) == 2 and timing.notes == ()
    assert timing.speedup == pytest.approx(3.0 / (2.5 if make is workspace else 2.0), rel=0.01)


def memo(device: FakeDevice) -> Callable[..., Any]:
    """b_version_key: by address and version; a copy is returned."""
    seen: dict[Any, torch.Tensor] = {}

    def entry(x: torch.Tensor) -> torch.Tensor:
        key = (x.data_ptr(), x.numel(), x._version)
        if key not in seen:
            seen[key] = device.new(x)
            device.launch(work(x, seen[key]))
        y, old = device.new(x), seen[key]
        device.launch(put(y, lambda: old), 0.5)
        return y

    return entry


def returned_again(device: FakeDevice) -> Callable[..., Any]:
    """e_hook_on_copy: the same tensor again until a name that the grader fills inputs with is called."""
    kept: dict[int, torch.Tensor] = {}

    def entry(x: torch.Tensor) -> torch.Tensor:
        if device.capturing is not None:
            raise RuntimeError("not now")
        if _data_ptr(x) not in kept:
            kept[_data_ptr(x)] = device.new(x)
            device.launch(work(x, kept[_data_ptr(x)]))
        device.launch(lambda: None, 0.1)
        return kept[_data_ptr(x)]

    def noticed(self: torch.Tensor, *args: Any) -> torch.Tensor:
        kept.clear()
        return _copy(self, *args)

    torch.Tensor.copy_ = noticed  # type: ignore[assignment,method-assign]
    return entry


def side_stream(device: FakeDevice) -> Callable[..., Any]:
    """e_side_stream: done at once, while the device still waits before the timed call."""

    def entry(x: torch.Tensor) -> torch.Tensor:
        y = device.new(x)
        (device.launch if device.capturing is not None else device.aside)(work(x, y))
        device.launch(lambda: None, 0.1)
        return y

    return entry


def thread(device: FakeDevice) -> Callable[..., Any]:
    """e_thread_after_return: done when everybody has been waited for."""

    def entry(x: torch.Tensor) -> torch.Tensor:
        y = device.new(x)
        if device.capturing is not None:
            device.launch(work(x, y))
        else:
            device.after(work(x, y))
            device.launch(lambda: None, 0.1)
        return y

    return entry


def short_graph(device: FakeDevice) -> Callable[..., Any]:
    """e_slow_clock_short_graph: of the captured calls only the last few do anything."""
    count = [0]

    def entry(x: torch.Tensor) -> torch.Tensor:
        y = device.new(x)
        count[0] = count[0] + 1 if device.capturing is not None else 0
        if count[0] == 0 or count[0] > 9:
            device.launch(work(x, y))
        return y

    return entry


both_precisions = pytest.mark.parametrize("precision", PRECISIONS)


@both_precisions
@pytest.mark.parametrize(
    ("make", "says"),
    [(memo, "timed call wrong"), (returned_again, "timed call wrong"), (side_stream, "timed call wrong"),
     (thread, "timed call wrong"), (short_graph, "captured call wrong")],
)  # fmt: skip
def test_a_trick_is_told(time: Callable[..., Timing], make: Entry, says: str, precision: str) -> None:
    try:
        with pytest.raises(GradingAborted, match=says) as stop:
            time(make, precision=precision)
    finally:
        torch.Tensor.copy_ = _copy  # type: ignore[method-assign]
    assert stop.value.verdict is Verdict.INCORRECT


class Later(torch.Tensor):
    """A result that computes when it is looked at."""


class Lazy(tuple):  # noqa: SLOT001
    """A result that computes when it is iterated over."""

    def __iter__(self) -> Any:
        raise AssertionError("looked at")


def test_a_result_that_computes_when_it_is_looked_at_is_refused(time: Callable[..., Timing]) -> None:
    def subclass(device: FakeDevice) -> Callable[..., Any]:
        return lambda x: device.new(x).as_subclass(Later)

    def iterator(device: FakeDevice) -> Callable[..., Any]:
        return lambda x: Lazy((device.new(x), device.new(x)))

    with pytest.raises(GradingAborted):
        time(subclass)
    with pytest.raises(GradingAborted):
        time(iterator)


def test_nothing_of_torch_that_can_be_replaced_is_used(time: Callable[..., Timing], monkeypatch) -> None:
    """e_hook_on_copy, e_flush_left_out, d_events_lie: what a submission replaces is not called by the clock."""
    called: list[str] = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.append(str(f))
            return f(*args, **(kwargs or {}))

    device = FakeDevice()
    watch = Stopwatch("cpu", device, guards=True)
    draws = [{"x": torch.arange(6.0)}, {"x": torch.arange(6.0) + 6}]

    def call(slot: dict[str, Any]) -> Any:
        with torch._C.DisableTorchFunction():
            device.tensors.append(torch._C.TensorBase.clone(slot["x"]))
            y, x = device.tensors[-1], slot["x"]
        device.launch(lambda: device.put(y, x))
        return y

    watch.prepare(call, draws, slots=3, turning={"x": [0, 0]})
    for name in ("copy_", "zero_", "fill_", "clone", "data_ptr", "as_strided", "stride", "untyped_storage", "detach",
                 "contiguous", "to"):  # fmt: skip
        monkeypatch.setattr(torch.Tensor, name, lambda *_, n=name, **__: called.append(n), raising=False)
    for name in ("empty", "zeros", "empty_like"):
        monkeypatch.setattr(torch, name, lambda *_, n=name, **__: called.append(n))
    for name in ("synchronize", "Event", "CUDAGraph", "graph", "current_stream", "empty_cache", "_sleep"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, n=name, **__: called.append(n))
    version = torch._C.TensorBase._version.__get__(watch._slots[0]["x"])  # type: ignore[attr-defined]
    with Mode():
        watch.measure({"order": [0, 1, 0], "turns": [{"x": (k, 0, 0)} for k in (9, 1, 2, 3)]})
        (reply,), _, data = IpcSender(device, None).claims([(watch.result(2), True)], "cpu", False)
        watch.shuffle(1)
        watch.capture([0, 1])
        watch.replay(1, {"0": {"x": (5, 0, 0)}, "1": {"x": (4, 0, 0)}})
        watch.result(1, captured=True)
    assert called == []
    assert watch._slots[0]["x"]._version == version == 0
    assert torch.frombuffer(bytearray(data[0]), dtype=torch.float32).tolist() == [3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    assert reply["outputs"][0]["alias"] is None and list(reply["after"]) == ["x"]


@pytest.mark.parametrize(("seconds", "slots"), [(0.001, [0, 0, 1, 2]), (0.1, [0] * 2)])
def test_a_slow_call_is_warmed_up_on_one_slot(seconds: float, slots: list[int]) -> None:
    device, called, now = FakeDevice(), list[int](), [0.0]
    watch = Stopwatch("cpu", device)
    watch._now = lambda: now[0]

    def call(slot: dict[str, Any]) -> None:
        called.append(watch._slots.index(slot))
        now[0] += seconds

    assert watch.prepare(call, [{"n": k} for k in range(3)])["call_seconds"] == pytest.approx(seconds)
    assert sorted(called) == sorted(slots)
    watch.shuffle(1, calls=False)
    assert sorted(called) == sorted(slots), "moved, and not called"


class HeldUp:
    """Eager's time, where the host holds up two of five of its rounds: the middle call does not show it."""

    def __init__(self, calls: int) -> None:
        self.calls, self.made = calls, 0

    def __call__(self) -> float:
        self.made += 1
        return 60.0 if self.made < self.calls and self.made // (REPORT.pairs * (BLOCK + 1)) % 5 < 2 else 3.0


@pytest.mark.parametrize("calls", [90, 10_000])
def test_a_host_that_holds_eager_up_now_and_then_makes_no_kernel_fast_and_none_a_liar(
    time: Callable[..., Timing], calls: int
) -> None:
    """An honest kernel was refused for claiming a third of its time (two GPUs at work, H200)."""
    told = time(honest, CASES[:1], eager_us=HeldUp(calls))
    assert told.speedup == pytest.approx(1.5, rel=0.01) and told.low <= told.speedup <= told.high
    assert told.low < 1.4 or calls < 1000, "and it is as uncertain as the rounds were"
    assert told.cases[0].disturbed == (calls > 1000), "it never ends: what most calls say is told, and that it is disturbed"
    assert all("eager took 3.0 us in most calls" in n for n in told.notes) and len(told.notes) == (3 if calls > 1000 else 1)


def test_who_works_only_while_it_is_measured_in_vain_is_found_out(
    time: Callable[..., Timing], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the first attempt's calls 12 could be held, of the second's as many: here chance keeps those it has."""
    monkeypatch.setattr(measuring, "MAX_KEPT_RESULTS", 3)
    for module in (paired, measuring, timed_results):
        monkeypatch.setattr(module, "secrets", SimpleNamespace(randbelow=lambda n: n - 1, randbits=lambda n: 7))
    pair, measured = measuring.pair, [0]

    def counted(*sides: Any, **options: Any) -> Any:
        found = pair(*sides, **options)
        measured[0] += 1
        return found

    monkeypatch.setattr(measuring, "pair", counted)

    def tired(device: FakeDevice) -> Callable[..., Any]:
        def entry(x: torch.Tensor) -> torch.Tensor:
            y = device.new(x)
            working = not measured[0] or device.capturing is not None
            device.launch(work(x, y) if working else (lambda: None), 2.0 if working else 0.2)
            return y

        return entry

    with pytest.raises(GradingAborted, match="timed call"):
        time(tired, CASES[:1], eager_us=HeldUp(90))
    assert measured[0] == 2


def test_noise_of_its_own_gives_nobody_a_second_try(time: Callable[..., Timing]) -> None:
    calls = [0]

    def unsteady(device: FakeDevice) -> Callable[..., Any]:
        def entry(x: torch.Tensor) -> torch.Tensor:
            y = device.new(x)
            calls[0] += 1
            device.launch(work(x, y), 40.0 if calls[0] // 12 % 5 < 2 else 2.0)
            return y

        return entry

    with contextlib.suppress(GradingAborted):
        assert time(unsteady, CASES[:1]).notes == ()
    assert calls[0] < 1.5 * REPORT.max_rounds * REPORT.pairs * (BLOCK + 1 + SLOTS)


def test_a_kernel_far_slower_than_eager_is_measured_less(time: Callable[..., Timing]) -> None:
    def slow(device: FakeDevice) -> Callable[..., Any]:
        def entry(x: torch.Tensor) -> torch.Tensor:
            y = device.new(x)
            device.launch(work(x, y), 60.0)
            return y

        return entry

    told = time(slow, CASES[:1])
    assert told.high < 0.1 and told.cases[0].pairs == REPORT.early_rounds * REPORT.pairs


def lies_where_it_is_slow(device: FakeDevice) -> Callable[..., Any]:
    """Six times as fast as eager on one size; on the other it takes 407 us and says 7, less than half as fast as eager's 3."""
    small, large = (c.axes[AXIS][0] for c in CASES)

    def entry(x: torch.Tensor) -> torch.Tensor:
        y = device.new(x)
        if x.numel() == small:
            device.launch(work(x, y), 0.5)
            return y
        assert x.numel() == large
        device.launch(work(x, y), 407.0 if device.capturing is not None else 7.0)
        if device.capturing is None:
            device.late.append(lambda: setattr(device, "now_us", device.now_us + 400.0))
        return y

    return entry


@both_precisions
def test_who_is_slow_is_audited_too(time: Callable[..., Timing], precision: str) -> None:
    with pytest.raises(GradingAborted, match="claims 7 us a call"):
        time(lies_where_it_is_slow, precision=precision)


def slow_every_other_call(device: FakeDevice) -> Callable[..., Any]:
    """Takes 2 us in one call and 100 in the next."""
    calls = [0]

    def entry(x: torch.Tensor) -> torch.Tensor:
        y = device.new(x)
        calls[0] += 1
        device.launch(work(x, y), 100.0 if calls[0] % 2 else 2.0)
        return y

    return entry


@both_precisions
def test_who_calls_its_slow_calls_late_is_told_by_the_audit(
    time: Callable[..., Timing], monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    # A submission shares its process with the stopwatch, so which of its calls were late is a claim.
    real = Stopwatch.measure

    def claiming(self: Stopwatch, header: Any) -> dict[str, Any]:
        reply = real(self, header)
        return reply | {"late": [k for k, us in enumerate(reply["us"]) if us > 50]}

    monkeypatch.setattr(Stopwatch, "measure", claiming)
    with pytest.raises(GradingAborted, match="claims 2 us a call"):
        time(slow_every_other_call, CASES[:1], precision=precision)


def late(device: FakeDevice) -> Callable[..., Any]:
    """Honest for thirteen rounds, of which the second is so noisy that there are more; then it does nothing."""
    calls, a_round = [0], SLOTS + REPORT.pairs * (BLOCK + 1)

    def entry(x: torch.Tensor) -> torch.Tensor:
        y = device.new(x)
        calls[0] += device.capturing is None
        if device.capturing is not None or calls[0] <= 10 + 13 * a_round:
            noisy = device.capturing is None and 20 < calls[0] < 60
            device.launch(work(x, y), 4.0 if noisy else 2.0)
        else:
            device.launch(lambda: None, 0.05)
        return y

    return entry


def now_and_then(device: FakeDevice) -> Callable[..., Any]:
    """Does nothing in the first four calls of each block: the fifth was the likeliest to be looked at.

    One result of each of the eight blocks is judged: all are right in one measurement of 400,000. Wrong calls in every
    other block only would be missed in one of 600.
    """
    calls, a_round = [0], SLOTS + REPORT.pairs * (BLOCK + 1)

    def entry(x: torch.Tensor) -> torch.Tensor:
        y = device.new(x)
        if device.capturing is None:
            calls[0] += 1
            turn, call = divmod((calls[0] - 6) % a_round - SLOTS, BLOCK + 1)
            if calls[0] > 5 and turn >= 0 and 1 <= call <= 4:
                device.launch(lambda: None, 0.05)
                return y
        device.launch(work(x, y))
        return y

    return entry


@pytest.mark.parametrize("make", [late, now_and_then])
def test_who_works_only_while_it_is_watched_is_told(time: Callable[..., Timing], monkeypatch, make: Entry) -> None:
    # A busy machine would spend the seconds of a measurement before the first round in which nothing is done.
    for module in (paired, timed_results):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: 0.0))
    for _ in range(2):
        with pytest.raises(GradingAborted, match="timed call wrong"):
            time(make, CASES[:1])


def test_inputs_of_a_slot_come_once_with_its_captured_calls(time: Callable[..., Timing], monkeypatch) -> None:
    asked: list[tuple[int, bool]] = []
    real = contestants.RunnerContestant.fetch

    def fetch(side: Any, calls: Any, captured: bool = False) -> Any:
        if captured:
            asked.extend((side._order[call], inputs) for call, inputs in calls)
        found = real(side, calls, captured)
        assert [bool(f.answer.after) for f in found] == [inputs for _, inputs in calls]
        return found

    monkeypatch.setattr(contestants.RunnerContestant, "fetch", fetch)
    assert time(honest, CASES[:1]).speedup > 1
    assert len(asked) >= contestants.GRAPH_CALLS[0]
    assert sorted(s for s, inputs in asked if inputs) == sorted({s for s, _ in asked})


def test_of_large_inputs_one_copy_is_kept(time: Callable[..., Timing], monkeypatch) -> None:
    """The results of one case took 11 GiB until they were judged, for inputs of 3 GiB."""
    measure, kept = measuring.Measuring._case, list[Any]()
    monkeypatch.setattr(measuring, "MAX_KEPT_BYTES", 1)

    def case(self: Any, candidate: Any, *rest: Any) -> Any:
        found = measure(self, candidate, *rest)
        with_inputs = [fetched.captured for _, fetched in found.results if fetched.inputs]
        rounding = 2048 * len(found.results)  # a tensor of a few bytes takes 1 KiB
        kept.append((with_inputs, found.kept_bytes, self.bytes_to_judge(rest[2]) + rounding))
        return found

    monkeypatch.setattr(measuring.Measuring, "_case", case)
    time(honest)
    assert len(kept) == len(CASES)
    for with_inputs, kept_bytes, expected in kept:
        assert with_inputs.count(True) == 1 and with_inputs.count(False) <= 1
        assert 0 < kept_bytes <= expected


def test_memory_of_large_results_is_reserved_until_they_are_judged(time: Callable[..., Timing], monkeypatch) -> None:
    """On a GPU of 80 GB the results of six gradings filled it, and right kernels ended as faults of the machine."""
    events: list[str] = []
    monkeypatch.setattr(task_timing, "KEPT_MEMORY_SHARE", 0.0)

    @contextlib.contextmanager
    def room(hold: gpu_lock.GpuHold, share: float, pool: str = "room") -> Iterator[None]:
        events.append(f"{pool} of {'some' if share > 0 else 'no'} memory")
        yield
        events.append(f"{pool} is free")

    def noted(owner: Any, name: str, text: str) -> None:
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a: (events.append(text), real(*a))[1])

    monkeypatch.setattr(gpu_lock.GpuHold, "room", room)
    noted(measuring.Measuring, "_case", "measured")
    noted(task_timing, "case_time", "judged")
    time(honest, CASES[:1])
    order = [e for e in events if not e.startswith("room")]
    assert order == ["kept of some memory", "measured", "judged", "kept is free"]


def test_what_a_call_writes_in_place_is_given_back(time: Callable[..., Timing]) -> None:
    task = load_task("optimizer/SGD")
    small = Case({a: (64,) if a.startswith("*") else 64 for t in task.takes.values() for a in t.axes.split()},
                 task.timed[0].args, draw=task.timed[0].draw, draws=task.timed[0].draws, given=task.timed[0].given)  # fmt: skip

    def entry(device: FakeDevice) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            bound = task.signature.bind(*args, **kwargs).arguments
            device.launch(lambda: [task.reference(**bound)].clear())
            result = tuple(bound[n] for n in task.written(small.args))
            return result if len(result) > 1 else result[0]

        return step

    assert time(entry, (small,), task).speedup == pytest.approx(1.5, rel=0.01)


def test_every_size_must_be_timed(time: Callable[..., Timing]) -> None:
    """A call that fails at one size ends the timing, whatever the other sizes were."""

    def entry(device: FakeDevice) -> Callable[..., Any]:
        def fails(x: torch.Tensor) -> torch.Tensor:
            if x.numel() == 128:
                raise RuntimeError("too large for me")
            return honest(device)(x)

        return fails

    with pytest.raises(RuntimeError, match="too large"):
        time(entry)


def test_nothing_lies_in_memory_while_others_are_waited_for(time: Callable[..., Timing], monkeypatch) -> None:
    held: list[int] = []
    devices: list[FakeDevice] = []

    def entry(device: FakeDevice) -> Callable[..., Any]:
        devices.append(device)
        return honest(device)

    real = gpu_lock.GpuHold.alone

    def waits(hold: gpu_lock.GpuHold, quiet: bool = True) -> Any:
        held.append(sum(len(b) for b in devices[-1].held.values()))
        return real(hold, quiet)

    monkeypatch.setattr(gpu_lock.GpuHold, "alone", waits)
    time(entry)
    assert len(held) == 1 and held[0] <= 64 << 10, "the piece that tensors travel through, at most"


def test_a_gpu_that_is_full_while_kernels_compile_is_no_fault_of_a_kernel(time: Callable[..., Timing], monkeypatch) -> None:
    """On a GPU of 80 GB with 14 graders `reduce/min` was told a runtime error: there was no room for a second GiB."""
    dry, full = contestants.RunnerContestant.dry, [GradingAborted(Verdict.RUNTIME_ERROR, "OutOfMemoryError: CUDA out of memory")]

    def crowded(side: contestants.RunnerContestant) -> None:
        if full:
            raise full.pop()
        dry(side)

    monkeypatch.setattr(contestants.RunnerContestant, "dry", crowded)
    monkeypatch.setattr(gpu_lock.GpuHold, "contended", property(lambda _: True))
    assert time(honest).speedup > 1 and not full


def test_a_gpu_without_room_for_all_inputs_counts_as_full(time: Callable[..., Timing], monkeypatch) -> None:
    """The runner allocates the values of all draws in one piece."""
    lay, sizes = contestants.RunnerContestant.lay, list[tuple[int, int]]()

    def laid(side: contestants.RunnerContestant, windows: Any, *more: Any) -> None:
        lay(side, windows, *more)
        values = [v for draw in windows.draws for v in draw.values() if isinstance(v, torch.Tensor)]
        sizes.append((side.session.case_bytes, sum(v.untyped_storage().nbytes() for v in values)))

    monkeypatch.setattr(contestants.RunnerContestant, "lay", laid)
    time(honest)
    assert len(sizes) == 2 and all(told == whole for told, whole in sizes)


def test_disturbed_cases_are_measured_again(time: Callable[..., Timing], monkeypatch) -> None:
    readings: list[Reading] = []
    monkeypatch.setattr(telemetry.Telemetry, "read", lambda *_: readings.pop(0) if readings else Reading("model", reasons=0))
    hot = Reading("model", reasons=0x40)
    readings[:] = [Reading("model"), hot, hot, hot]
    timing = time(honest)
    assert not any(c.disturbed for c in timing.cases) and timing.after is not None
    readings[:] = [Reading("model")] + [hot] * 5
    timing = time(honest)
    # The larger case, the second of the two, is measured first.
    assert [c.disturbed for c in timing.cases] == [False, True] and "hardware thermal" in timing.notes[0]


@pytest.mark.parametrize("slow", [1, 2, 3])
def test_a_ratio_that_only_eager_has_raised_is_measured_again(
    time: Callable[..., Timing], monkeypatch: pytest.MonkeyPatch, slow: int
) -> None:
    """On a host with two GPUs an expert was refused once in some thousand gradings: some of eager's blocks had been slowed."""
    pair, measured = measuring.pair, [0]

    def slowed(*both: Any, **options: Any) -> Any:
        measured[0] += 1
        found = pair(*both, **options)
        if measured[0] > slow:
            return found
        more = math.log(1.2)
        return dataclasses.replace(found, log_ratio=found.log_ratio + more, eager_mean_us=1.2 * found.eager_us)

    def measure(device: FakeDevice) -> Callable[..., Any]:
        def entry(x: torch.Tensor) -> torch.Tensor:
            y = device.new(x)
            device.launch(work(x, y), 2560.0 if device.capturing is not None else 2000.0)
            return y

        return entry

    monkeypatch.setattr(measuring, "pair", slowed)
    timing = time(measure, CASES[:1], eager_us=lambda: 3000.0)
    assert timing.speedup == pytest.approx(1.5, rel=0.02) and not timing.cases[0].disturbed
    assert measured[0] == min(slow + 1, measuring.ATTEMPTS) and len(timing.notes) == slow
    assert all("calls in a row took" in note for note in timing.notes)
    assert ("eager was held up in 3 attempts" in timing.notes[-1]) == (slow == measuring.ATTEMPTS)


def test_who_computed_in_between_disturbs_all_cases(time: Callable[..., Timing], monkeypatch) -> None:
    """Who has computed is asked before the first case and with the last one, if only the grader's processes are there."""
    told: list[bool] = []

    def read(_: Any, ours: Any = (), whole: bool = True) -> Reading:
        told.append(whole and bool(ours))
        busy = (os.getpid(), 1 << 30) if told[-1] and sum(told) == 2 else None
        return Reading("model", processes=(os.getpid(),), busy=busy)

    monkeypatch.setattr(telemetry.Telemetry, "read", read)
    timing = time(honest)
    assert told[:3] == [True, False, True] and [c.disturbed for c in timing.cases] == [True, True]
    assert "1 other processes computed" in timing.notes[0], "the last case was measured again"


def with_floor(monkeypatch: pytest.MonkeyPatch, floor_us: float, measured: roofline.Ceilings | None = None) -> None:
    """The device needs so long for the first case's data: 4 bytes read and written for each of 96 numbers."""
    moved = 2 * 96 * 4
    found = roofline.Roofline(moved / (1e-6 * floor_us), {}, 0, "a model", measured)
    monkeypatch.setattr(roofline, "roofline", lambda *_: found)


@pytest.mark.parametrize(("share", "void"), [(0.85, False), (0.94, False), (0.97, True), (1.04, True)])
def test_a_time_near_the_roofline_is_measured_again_and_void(
    time: Callable[..., Timing], monkeypatch: pytest.MonkeyPatch, share: float, void: bool
) -> None:
    with_floor(monkeypatch, 2.0 * share)
    timing = time(honest, CASES[:1])
    assert timing.void is void and len(timing.notes) == (measuring.ATTEMPTS if void else 0)
    assert timing.cases[0].floor_us == pytest.approx(2.0 * share, rel=1e-3)
    assert timing.roofline is not None and timing.roofline["source"] == "a model"


def test_a_time_that_beats_physics_is_measured_again_and_rejected(
    time: Callable[..., Timing], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, measured = measuring.pair, [0]

    def counted(*sides: Any, **options: Any) -> Any:
        measured[0] += 1
        return pair(*sides, **options)

    monkeypatch.setattr(measuring, "pair", counted)
    with_floor(monkeypatch, 2.0 / 0.9)
    with pytest.raises(GradingAborted, match="the device needs") as stop:
        time(honest, CASES[:1])
    assert stop.value.verdict is Verdict.REJECTED and [v.rule for v in stop.value.violations] == ["impossible_speed"]
    assert measured[0] == measuring.ATTEMPTS


def test_a_floor_that_eager_beats_is_wrong_and_blames_nobody(
    time: Callable[..., Timing], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worst fault of this grader was here: 16 of 40 right kernels were refused by a ceiling that was measured too low."""
    with_floor(monkeypatch, 4.0)
    timing = time(honest, CASES[:1])
    assert timing.speedup == pytest.approx(1.5, rel=0.01) and not timing.void
    assert timing.cases[0].floor_us is None and timing.floor_ratio is None
    assert "eager itself took 3.0 us" in timing.notes[-1]


def test_a_kernel_no_nearer_to_the_roofline_than_eager_is_believed(
    time: Callable[..., Timing], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_floor(monkeypatch, 0.98 * 2.0)
    assert time(honest, CASES[:1], eager_us=lambda: 2.02).void is False
    assert time(honest, CASES[:1]).void is True


def test_a_measured_ceiling_refuses_nobody(time: Callable[..., Timing], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where neither driver nor data sheet tell, a copy is all there is: a time far beyond it is void, never rejected."""
    for copy_us, void in ((2.0, False), (2.9, True)):
        copied = roofline.Ceilings(2 * 96 * 4 / (1e-6 * copy_us), 1e15, {}, True)
        found = roofline.Roofline(None, {}, 0, "unknown", copied)
        monkeypatch.setattr(roofline, "roofline", lambda *_, found=found: found)
        timing = time(honest, CASES[:1])
        assert timing.void is void and timing.cases[0].floor_us is None and timing.floor_ratio is None
