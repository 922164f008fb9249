"""Memory of the GPU is reserved, and work that lacks some is repeated."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kbx_env.device.driver import KEPT_BYTES
from kbx_env.errors import SandboxError
from kbx_env.grading.runtime.untrusted import GradingAborted
from kbx_env.grading.timing import reservations
from kbx_env.outcome import Verdict


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

    reserve = reservations.Reservations(SimpleNamespace(gpu=SimpleNamespace(room=room)), 1000)  # type: ignore[arg-type]
    shared = reservations.SHARE * 1000
    for fails, shares in ((0, [0.1]), (1, [0.1, 0.4]), (2, [0.1, 0.4, 1.0])):
        asked.clear()
        assert reserve.run(0.1 * shared, lambda fails=fails: work(fails)) == "done"
        assert asked == pytest.approx(shares)
    asked.clear()
    # Others may hold the memory that is missing, and give it back.
    monkeypatch.setattr(reservations, "MEMORY_PAUSE_SECONDS", 0.0)
    with pytest.raises(torch.OutOfMemoryError):
        reserve.run(0.9 * shared, lambda: work(9))
    assert asked == pytest.approx([0.9] + reservations.MEMORY_ATTEMPTS * [1.0])


def test_memory_that_judging_is_likely_to_need_is_asked_for_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request to the driver waits for a lock of the host: a grading asked for some 40 pieces, and gave them back."""
    asked, mib = list[int](), 1 << 20
    monkeypatch.setattr(reservations, "preallocate", asked.append)
    reserve = reservations.Reservations(SimpleNamespace(gpu=SimpleNamespace(room=lambda share: contextlib.nullcontext())), 4 << 30)  # type: ignore[arg-type]
    for needed, likely in ((900, 600), (900, 100), (500, 600)):
        reserve.run(needed * mib, reserve.preallocate, likely * mib)
    assert asked == [600 * mib], "a process keeps little anyway, and no more is asked for than is reserved"
    reserve.run(900 * mib, reserve.preallocate)
    assert len(asked) == 1


def test_the_limit_of_memory_counts_what_torch_has_and_cannot_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results of timed calls wait in a large piece of torch's memory; the rest of it is of no use for small work beside them."""
    shares = list[float]()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(total_memory=1000))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 100)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 400)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", shares.append)
    with reservations.limited(200):
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

    monkeypatch.setattr(reservations, "limited", limited)
    monkeypatch.setattr(reservations, "free_bytes", lambda: 5000)
    gpu = SimpleNamespace(room=lambda share: contextlib.nullcontext())
    assert reservations.Reservations(SimpleNamespace(gpu=gpu), 1000).run(0.9 * reservations.SHARE * 1000, work) == "done"  # type: ignore[arg-type]
    assert allowed == pytest.approx([reservations.MEMORY_SLACK * 0.9 * reservations.SHARE * 1000, reservations.FREE_SHARE * 5000])


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
    monkeypatch.setattr(reservations.time, "sleep", pauses.append)
    session: Any = SimpleNamespace(gpu=SimpleNamespace(room=room, contended=True))
    assert reservations.with_memory(session, 0.0, lambda fails=[error]: work(fails)) == "measured"
    assert asked == [1.0] and not pauses
    # A large case has all the memory from the beginning; others hold results that they can only judge in a pause.
    assert reservations.with_memory(session, 2.0, lambda fails=[error, error]: work(fails)) == "measured"
    assert len(pauses) == 2
    # Alone with all the memory, and again after a pause, it is the submission's fault; other errors always are.
    with pytest.raises(type(error)):
        reservations.with_memory(session, 0.2, lambda fails=[error, error, error]: work(fails))
    with pytest.raises(GradingAborted, match="wrong"):
        reservations.with_memory(session, 0.0, lambda: work([GradingAborted(Verdict.INCORRECT, "timed call wrong")]))


def test_gradings_reserve_what_a_trainer_leaves() -> None:
    """A trainer that keeps 40 of 80 GiB once made half of the gradings of a step run out of memory."""
    gib = 1 << 30
    free = reservations.reservable(80 * gib, 0, 10)
    assert reservations.reservable(80 * gib, None, 10) == free == 80 * gib - 10 * (reservations.CONTEXT_BYTES + KEPT_BYTES)
    assert reservations.reservable(80 * gib, 40 * gib, 10) == free - 40 * gib
    assert reservations.reservable(80 * gib, 60 * gib, 40) == 10 * gib
