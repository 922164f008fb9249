"""The compiler that the gradings of a proof share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from kbx_env.generate import shared_compiler
from kbx_env.generate.shared_compiler import SharedCompiler
from kbx_env.protocol import wire


def _answer(key: str) -> dict[str, str]:
    return {"key": key, "text": key}


class _Compiler:
    """Stands for a process that compiles; ``asked`` has the descriptions, of all processes."""

    asked: list[Any] = []
    closed = 0
    error: BaseException | None = None

    def __init__(self, zygote: object, source: bytes) -> None:
        self.rows: dict[str, Mapping[str, Any]] = {}
        self.changed = ""
        self._source = source

    def compile(self, recipe: Mapping[str, Any], deadline: float) -> dict[str, Any]:
        _Compiler.asked.append(recipe)
        if _Compiler.error is not None:
            raise _Compiler.error
        if "n" not in recipe:
            self.changed = self.changed or "replaced"
            return {"error": self.changed}
        key = f"{self._source.decode()} {recipe['n']!r}"
        self.rows[key] = {"text": key}
        return _answer(key)

    def close(self) -> None:
        _Compiler.closed += 1


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_compiler, "KernelCompiler", _Compiler)
    monkeypatch.setattr(_Compiler, "asked", [])
    monkeypatch.setattr(_Compiler, "closed", 0)
    monkeypatch.setattr(_Compiler, "error", None)


def test_a_kernel_is_compiled_once_and_executed_only_where_a_grading_described_it() -> None:
    shared, zygote = SharedCompiler(), object()
    first = shared(zygote, b"a")  # type: ignore[arg-type]
    assert first.compile({"n": 1}, 0.0) == _answer("a 1") == first.compile({"n": 1}, 0.0)
    first.close()
    second = shared(zygote, b"a")  # type: ignore[arg-type]
    assert second.rows == {} and _Compiler.closed == 0
    assert second.compile({"n": 1}, 0.0) == _answer("a 1") and second.rows == {"a 1": {"text": "a 1"}}
    assert second.compile({"n": 1.0}, 0.0) == _answer("a 1.0") and second.compile({"n": True}, 0.0) == _answer("a True")
    assert _Compiler.asked == [{"n": 1}, {"n": 1.0}, {"n": True}]


def test_another_source_or_zygote_shares_nothing() -> None:
    shared, zygote = SharedCompiler(), object()
    shared(zygote, b"a").compile({"n": 1}, 0.0)  # type: ignore[arg-type]
    assert shared(zygote, b"b").compile({"n": 1}, 0.0) == _answer("b 1") and _Compiler.closed == 1  # type: ignore[arg-type]
    shared(object(), b"b").compile({"n": 1}, 0.0)  # type: ignore[arg-type]
    assert len(_Compiler.asked) == 3 and _Compiler.closed == 2
    shared.close()
    shared.close()
    assert _Compiler.closed == 3


def test_errors_are_not_kept_and_a_late_compiler_is_not_used_again() -> None:
    shared, zygote = SharedCompiler(), object()
    mine = shared(zygote, b"a")  # type: ignore[arg-type]
    assert mine.compile({}, 0.0) == {"error": "replaced"} and mine.changed == "replaced" and _Compiler.closed == 1
    mine.close()
    assert _Compiler.closed == 2  # it may have started another process since
    mine = shared(zygote, b"a")  # type: ignore[arg-type]
    assert mine.compile({"n": 1}, 0.0) == _answer("a 1") and not mine.changed
    _Compiler.error = wire.Late()
    with pytest.raises(wire.Late):
        mine.compile({"n": 2}, 0.0)
    assert _Compiler.closed == 3
    _Compiler.error = None
    other = shared(zygote, b"a")  # type: ignore[arg-type]
    assert other.rows == {} and other.compile({"n": 1}, 0.0) == _answer("a 1") and len(_Compiler.asked) == 4
    other.close()
    assert _Compiler.closed == 3
