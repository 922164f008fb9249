"""Builds summed up: by target and category, and nothing told of what was not compiled."""

from __future__ import annotations

import json
from typing import Any

import pytest
from kbx_env.eval import report_data
from kbx_env.eval.portability import TARGETS, Portable, device_of, occupancy, portability

from kbx_env.errors import UsageError
from kbx_env.outcome import Build


def _build(target: str = "sm_90", ok: bool = True, **more: Any) -> dict[str, Any]:
    known = {"registers": 32, "spills": 0, "shared": 0, "shared_limit": 232448} if ok else {"error": "no"}
    return {"kernel": "_k", "target": target, "ok": ok, **known, **more}


def _row(task: str, builds: list[Any], correct: bool = True, **more: Any) -> dict[str, Any]:
    return {"task": task, "category": task.split("/")[0], "difficulty": 1, "sample": 0, "correct": correct, "compiled": True,
            "verdict": "correct" if correct else "incorrect", "compile": builds, **more}  # fmt: skip


def _told(*rows: dict[str, Any], **more: Any) -> dict[tuple[str, str], Portable]:
    found = portability(report_data.from_reports([{"policy": "p", "manifest": {}, "tasks": list(rows)}]), **more)
    json.dumps([f.to_dict() for f in found], allow_nan=False)
    return {(f.target, f.category): f for f in found}


def test_by_target_and_category() -> None:
    found = _told(
        _row("math/a", [_build(), _build(registers=255, spills=16, shared=200_000), _build("sm_120", ok=False)]),
        _row("math/b", [_build(registers=64), _build("sm_120")]),
        _row("reduce/c", [_build(registers=100)]),
        _row("reduce/wrong", [_build(registers=254)], correct=False),
    )
    m = found["sm_90", "math"]
    assert (m.correct, m.answers, m.portable, m.kernels, m.built, m.told) == (2, 2, 2, 3, 3, 3)
    assert (m.registers_median, m.registers_max, m.spilling) == (64, 255, 1)
    assert (m.shared_median, m.shared_max, m.shared_limit, m.over_limit) == (0, 200_000, 232448, 0)
    whole = found["sm_90", ""]
    assert (whole.kernels, whole.registers_max, whole.registers_median) == (4, 255, 82)
    small = found["sm_120", "math"]
    assert (small.answers, small.portable, small.kernels, small.built, small.told) == (2, 1, 2, 1, 1)


def test_a_library_s_table_is_no_want_of_registers() -> None:
    m = _told(_row("math/cos", [_build(registers=30, spills=28), _build(registers=250, spills=64)]))["sm_90", "math"]
    assert (m.spilling, m.pressed) == (2, 1)


def test_what_was_not_compiled_is_none_and_never_0() -> None:
    found = _told(_row("math/a", [_build()]), _row("math/b", []), _row("reduce/c", []))
    for key in (("gfx942", "math"), ("sm_80", ""), ("sm_90", "reduce")):
        facts = found[key].to_dict()
        known = {k for k in facts if k not in ("policy", "target", "category", "correct", "warps")}
        assert {facts[k] for k in known} == {None}, key
    assert (found["sm_90", ""].answers, found["sm_90", ""].correct) == (1, 3)


def test_resources_that_a_target_does_not_tell_are_none() -> None:
    g = _told(_row("math/a", [_build("gfx942", registers=None, spills=None, shared=512, shared_limit=65536)]))["gfx942", "math"]
    assert (g.kernels, g.built, g.told, g.registers_max, g.spilling) == (1, 1, 0, None, None)
    assert (g.shared_max, g.over_limit, g.device, g.occupancy_median, g.occupancy_bound) == (512, 0, None, None, None)


def test_over_the_limit_of_shared_memory() -> None:
    b = _build("sm_120", ok=False, error="needs more", registers=32, spills=0, shared=200_000, shared_limit=101_376)
    f = _told(_row("math/a", [b]))["sm_120", "math"]
    assert (f.built, f.portable, f.over_limit, f.occupancy_min) == (0, 0, 1, 0.0)


def test_occupancy_by_registers_and_shared_memory() -> None:
    def build(**more: int) -> Build:
        return Build(**_build(**more))

    assert occupancy(build(registers=32)) == (1.0, "warps")
    assert occupancy(build(registers=255)) == (0.125, "registers")  # 2 of the 4-warp programs of a possible 16
    assert occupancy(build(shared=100_000)) == (0.125, "shared memory")
    assert occupancy(build(shared=100_000), warps=8) == (0.25, "shared memory")
    assert occupancy(build(shared=300_000)) == (0.0, "does not fit")
    assert occupancy(Build(**_build("gfx942"))) is None
    rows = _row("math/a", [_build(shared=100_000), _build(registers=255)])
    told, wide = _told(rows)["sm_90", ""], _told(rows, warps=8)["sm_90", ""]
    assert (told.device, told.occupancy_min, told.shared_bound, told.warps) == ("h200", 0.125, 1, 4)
    assert wide.shared_bound == 1 and wide.occupancy_median != told.occupancy_median
    assert told.occupancy_bound == wide.occupancy_bound == (1.0 + 0.125) / 2
    with pytest.raises(UsageError, match="power of two"):
        _told(warps=3)


def test_the_warps_of_a_build_count_and_are_assumed_only_where_it_does_not_say() -> None:
    assert occupancy(Build(**_build(shared=100_000, warps=8)), warps=4) == (0.25, "shared memory")
    told = _told(_row("math/a", [_build(shared=100_000, warps=8), _build(shared=100_000)]))["sm_90", ""]
    assert (told.occupancy_min, told.occupancy_median, told.assumed, told.warps) == (0.125, 0.1875, 1, 4)
    # 65536 registers for 32 warps leave 64 a thread: 60 with local memory is at that cap, of 4 warps it is not.
    wide, plain = _build(registers=60, spills=8, warps=32), _build(registers=60, spills=8)
    assert _told(_row("math/a", [wide, plain]))["sm_90", ""].pressed == 1
    # 168 registers leave 12 warps: one whole program of 8.
    assert _told(_row("math/a", [_build(registers=168, warps=8)]))["sm_90", ""].occupancy_bound == 8 / 64
    assert _told(_row("math/a", [_build(registers=168)]))["sm_90", ""].occupancy_bound == 12 / 64
    assert _told(_row("math/a", [_build(warps=w) for w in (0, 33, -1, "4")]))["sm_90", ""].kernels is None


def test_every_nvidia_target_has_a_device() -> None:
    assert {t: (d.name if (d := device_of(t)) else None) for t in TARGETS} == {
        "sm_80": "a100", "sm_90": "h200", "sm_100": "b200", "sm_120": "rtx5090", "gfx942": None,
    }  # fmt: skip


def test_odd_rows_are_left_out() -> None:
    odd = [{"strange": 1}, _build(registers="many"), _build(registers=-1), 7]
    assert _told(_row("math/a", [*odd, _build()]), _row("math/b", None))["sm_90", ""].kernels == 1  # type: ignore[arg-type]
    masked = _row("math/a", [_build()], verdict="infra_fault", fault="infra")
    assert _told(masked)["sm_90", ""].correct == 0
