"""A spare process serves whoever needs one next, and none outlives its zygote."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kbx_env.grading.runtime.runner_pool import RunnerPool, RunnerSlot

SETTINGS = {"device": "cpu", "without": [], "torch_ops": False}


class FakeZygote:
    """Counts what it starts."""

    def __init__(self) -> None:
        self.alive, self.live, self.started = True, set[int](), 0

    def spawn(self, **_: Any) -> Any:
        self.started += 1
        pid = self.started
        self.live.add(pid)
        return SimpleNamespace(pid=pid, close=lambda: self.live.discard(pid))


def _pid(place: RunnerSlot) -> int:
    return place.runner.pid


def test_a_spare_waits_for_who_needs_it() -> None:
    zygote, places = FakeZygote(), RunnerPool()
    for _ in range(3):
        places.ahead(zygote, SETTINGS)  # type: ignore[arg-type]
    assert zygote.started == 1, "one is enough"
    first, second = (places.take(zygote, SETTINGS) for _ in range(2))  # type: ignore[arg-type]
    assert (_pid(first), _pid(second)) == (1, 2), "the second is started when it is needed"
    places.ahead(zygote, SETTINGS)  # type: ignore[arg-type]
    assert _pid(places.take(zygote, SETTINGS | {"torch_ops": True})) == 4, "never one of another kind"  # type: ignore[arg-type]
    first.close()
    second.close()
    assert zygote.live == {3, 4}
    places.close()
    assert zygote.live == {4}
    places.ahead(zygote, SETTINGS)  # type: ignore[arg-type]
    assert zygote.started == 4, "nothing is started for who has closed"


def test_a_spare_of_a_zygote_that_died_is_not_used() -> None:
    old, new, places = FakeZygote(), FakeZygote(), RunnerPool()
    places.ahead(old, SETTINGS)  # type: ignore[arg-type]
    old.alive = False
    place = places.take(new, SETTINGS)  # type: ignore[arg-type]
    assert place.zygote is new and old.live == set()
    places.ahead(old, SETTINGS)  # type: ignore[arg-type]
    places.ahead(new, SETTINGS)  # type: ignore[arg-type]
    assert old.live == set() and len(new.live) == 2
