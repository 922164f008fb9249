"""What the grader makes of an engine that fails or falls silent while a call is executed in another order."""

from __future__ import annotations

from typing import Any

import pytest

from kbx_env.grading.runtime.engine_client import REORDERED_SECONDS, Engine, EngineError
from kbx_env.protocol import wire


class _Zygote:
    """Stands for the zygote and for the engine's process."""

    def __init__(self, answer: dict[str, Any] | Exception) -> None:
        self.answer, self.asked = answer, 0

    def spawn(self, **_: Any) -> _Zygote:
        return self

    def ask(self, *_: Any, **__: Any) -> tuple[dict[str, Any], list[bytearray]]:
        self.asked += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return {"cpu_seconds": 4.0, "name": "E", "message": "no", **self.answer}, [bytearray(b"1")]


def in_order(zygote: _Zygote, times: int = 1) -> list[bytearray] | None:
    engine = Engine(zygote)  # type: ignore[arg-type]
    for _ in range(times - 1):
        engine._in_order("forwards", [], 60.0)
    return engine._in_order("backwards", [], 60.0)


def test_bytes_of_the_views_are_returned() -> None:
    assert in_order(_Zygote({"ok": True})) == [bytearray(b"1")]


@pytest.mark.parametrize("kind", ["timeout", "unsupported"])
def test_what_is_not_known_is_held_against_nobody(kind: str) -> None:
    assert in_order(_Zygote({"ok": False, "kind": kind})) is None
    assert in_order(_Zygote({"ok": False, "kind": "runtime", "name": "Deadlock"})) is None


@pytest.mark.parametrize("kind", ["memory", "runtime", "died"])
def test_an_error_ends_the_grading(kind: str) -> None:
    with pytest.raises(EngineError, match="in another order of the programs: no"):
        in_order(_Zygote({"ok": False, "kind": kind}))


def test_a_silent_engine_is_asked_nothing_more() -> None:
    """Its late reply would be taken for that to the next message."""
    with pytest.raises(EngineError) as found:
        in_order(_Zygote(wire.Late("late")))
    assert found.value.kind == "timeout"


def test_a_submission_has_so_many_seconds_for_all_its_calls() -> None:
    zygote = _Zygote({"ok": True})
    assert in_order(zygote, times=5) is None and zygote.asked == REORDERED_SECONDS // 4.0 + 1
