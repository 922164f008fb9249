"""What is kept, asked for and looked for while a grading holds the GPU alone."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kbx_env.grading.timing import case_work, measuring, precision
from kbx_env.grading.timing.precision import TRAINING, Precision
from kbx_env.grading.timing.telemetry import Reading
from kbx_env.spec.catalog import load_task


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
        (True, precision.REPORT, 100, False),
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
    monkeypatch.setattr(measuring, "Telemetry", lambda uuid: Readings())
    monkeypatch.setattr(measuring.rooflines, "roofline", lambda device, file: "of the device")
    watch = SimpleNamespace(close=lambda: closed.append("closed"), preallocate=tuple)
    monkeypatch.setattr(measuring, "Stopwatch", lambda device: watch)
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
    monkeypatch.setattr(measuring, "free_bytes", lambda: free_gib << 30)
    ended = list[bool]()
    end_runner = lambda: ended.append(bool(alone))  # noqa: E731
    session = SimpleNamespace(gpu=gpu, backend="cuda", runner=SimpleNamespace(pid=1), end_runner=end_runner)
    candidates: list[Any] = [
        SimpleNamespace(session=session, case=None, release=partial(release, k)) for k in range(5)
    ]

    def drawn(self: Any, candidate: Any, eager: Any, index: int, *rest: Any) -> Any:
        assert candidate is candidates[index] and alone
        return SimpleNamespace(kept_bytes=each, disturbed=False, after=None)

    monkeypatch.setattr(measuring.Measuring, "_drawn", drawn)
    monkeypatch.setattr(measuring.Measuring, "bytes_to_judge", lambda self, work: each)
    monkeypatch.setattr(measuring.Measuring, "_preallocate", lambda self, eager, work, before: ample)
    turn = measuring.Measuring(load_task("activation/relu"), lambda index: None, precision, 100)  # type: ignore
    counts: list[int] = []
    while sum(counts) < 5:
        counts.append(len(turn.run(candidates[sum(counts) :], [None] * 5, sum(counts))))  # type: ignore[list-item]
    assert counts == expected and turn.roofline == "of the device"
    # Freeing memory disturbs who measures next, by less than training asks for. Without ample memory the next one needs it at once.
    later = ample and precision is TRAINING and free_gib > 40 and not quiet_wanted
    assert len(closed) == len(counts) and set(released_alone) <= {not later}
    # Nothing more is asked of a runner after the last case.
    assert len(released) == len(counts) - later and ended == [False] * later


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
    monkeypatch.setattr(measuring, "free_bytes", lambda: free_gib << 30)
    monkeypatch.setattr(measuring, "preallocate_outside_pool", asked.append)
    monkeypatch.setattr(measuring.Measuring, "_memory", lambda self, eager, work: (size, 3, 2 * size))
    eager: Any = SimpleNamespace(watch=SimpleNamespace(preallocate=lambda *memory: asked.append(memory), pooled=True))
    turn = measuring.Measuring(load_task("activation/relu"), lambda index: None, TRAINING, 100)  # type: ignore
    work = case_work.CaseWork(size, size, 2 * size, 0, 2 * size)
    assert turn._preallocate(eager, [work], None) is ample
    assert asked[0] == (size, 3, 2 * size, ample) and asked[1] == (turn.bytes_to_judge(work) if ample else 256 << 20)
    assert turn._preallocate(eager, [work], ample) is ample and len(asked) == 3, "results have memory for the whole turn"
    turn.sparing = True  # an attempt has failed
    assert not turn._preallocate(eager, [work], None) and asked[3][-1] is False and asked[4] == 256 << 20


@pytest.mark.parametrize("busy, disturbed", [((1,), False), ((1, 9), True)])
def test_a_turn_that_ends_before_the_last_case_looks_for_strangers(
    monkeypatch: pytest.MonkeyPatch, busy: tuple[int, ...], disturbed: bool
) -> None:
    """Processes are listed at the beginning and the end of a turn; who comes and goes in between must not be missed."""
    readings = [Reading("m", processes=(1, 9)), Reading("m", processes=(1, 9), busy=busy)]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace())
    monkeypatch.setattr(measuring, "Telemetry", lambda uuid: Readings(readings))
    monkeypatch.setattr(measuring.rooflines, "roofline", lambda device, file: "of the device")
    monkeypatch.setattr(measuring, "Stopwatch", lambda device: SimpleNamespace(close=tuple))
    gpu = SimpleNamespace(alone=lambda quiet: contextlib.nullcontext(), file=lambda name: None, users=tuple, quiet_wanted=False)
    session = SimpleNamespace(gpu=gpu, backend="cuda", runner=SimpleNamespace(pid=1))
    candidates: list[Any] = [SimpleNamespace(session=session, case=None, release=tuple) for _ in range(2)]
    measured = measuring.Measured(candidates[0], None, None, False, [], None)  # type: ignore[arg-type]
    for name, found in {"_drawn": measured, "_preallocate": None, "bytes_to_judge": 200}.items():
        monkeypatch.setattr(measuring.Measuring, name, lambda *_, found=found: found)
    turn = measuring.Measuring(load_task("activation/relu"), lambda index: None, precision.REPORT, 100)  # type: ignore
    assert [m.disturbed for m in turn.run(candidates, [None] * 2, 0)] == [disturbed] and not readings  # type: ignore[list-item]


def test_a_failed_attempt_is_repeated_with_memory_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace())
    monkeypatch.setattr(measuring, "Telemetry", lambda uuid: Readings())
    monkeypatch.setattr(measuring.rooflines, "roofline", lambda device, file: "of the device")
    monkeypatch.setattr(measuring, "Stopwatch", lambda device: SimpleNamespace(close=tuple))
    gpu = SimpleNamespace(alone=lambda quiet: contextlib.nullcontext(), file=lambda name: None, users=tuple, quiet_wanted=False)
    session = SimpleNamespace(gpu=gpu, backend="cuda", runner=SimpleNamespace(pid=1))
    candidate: Any = SimpleNamespace(session=session, case=None, release=tuple)

    def full(*_: Any) -> bool:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(measuring.Measuring, "_preallocate", full)
    turn = measuring.Measuring(load_task("activation/relu"), lambda index: None, precision.REPORT, 100)  # type: ignore
    assert not turn.sparing
    with pytest.raises(torch.OutOfMemoryError):
        turn.run([candidate], [None], 0)  # type: ignore[list-item]
    assert turn.sparing
