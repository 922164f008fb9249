"""The limits of a device: what physics forbids, what was measured, and that the two are never mixed up."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kbx_env.grading.timing import roofline
from kbx_env.grading.timing.roofline import Ceilings, Roofline, checked, physical_limits, until_agreed
from kbx_env.spec.catalog import load_tasks

MEASURED = Ceilings(4.26e12, 7.6e14, {"copy": (4.26e12, 4.26e12), "product": (7.6e14,)}, True, "by hand")
H200 = ("NVIDIA H200", 3_201_000, 6016, 62_914_560)
H100 = ("NVIDIA H100 80GB HBM3", 2_619_000, 5120, 52_428_800)


@pytest.mark.parametrize(("device", "terabytes"), [(H200, 4.815), (H100, 3.352)])
def test_the_memory_limit_is_clock_times_width(device: tuple[str, int, int, int], terabytes: float) -> None:
    found = physical_limits(*device)
    assert found.bandwidth == pytest.approx(terabytes * 1e12, rel=2e-3) and found.physical
    assert "driver" in found.source and 1e15 < found.rates["bf16"] < found.rates["i8"]


def test_of_driver_and_data_sheet_the_larger_limit_counts() -> None:
    lame = physical_limits("NVIDIA H200", 1_000_000, 6016, 0)
    assert lame.bandwidth == 4.8e12 and lame.source.endswith("bandwidth from the data sheet")
    assert physical_limits("NVIDIA H200", 0, 0, 0).bandwidth == 4.8e12
    unknown = physical_limits("A card of tomorrow", 0, 0, 1 << 20)
    assert unknown.bandwidth is None and not unknown.physical and unknown.rates == {} and unknown.floor_us(1 << 30, 1e15) is None
    told = physical_limits("A card of tomorrow", 2_000_000, 8192, 0)
    assert told.bandwidth == pytest.approx(4.096e12) and told.rates == {}


def test_devices_are_found_by_the_drivers_names() -> None:
    for name, data in (("NVIDIA A100-SXM4-80GB", "a100"), ("NVIDIA GeForce RTX 4090", "rtx4090"), ("NVIDIA B200", "b200"),
                       ("NVIDIA L40S", "l40s"), ("NVIDIA H100 80GB HBM3", "h100")):  # fmt: skip
        sheet = roofline.data_sheet(name)
        assert sheet is not None and sheet.name == data
    assert roofline.data_sheet("NVIDIA T4") is None


def test_a_measured_ceiling_changes_no_limit_unless_it_beats_it() -> None:
    """Measured beside busy cores a copy once reached 2.9 of 4.8 TB/s, and right kernels were refused."""
    limits = physical_limits(*H200)
    slow = Ceilings(2.9e12, 1e14, {}, True)
    for measured in (MEASURED, slow):
        found = checked(limits, measured)
        assert found.floor_us(1 << 30) == limits.floor_us(1 << 30) and found.rates == limits.rates
        assert found.likely_us(1 << 30) is None, "no measurement stands in for a limit that is known"
    beaten = checked(limits, Ceilings(6e12, 9e15, {}, True))
    assert beaten.bandwidth is None and beaten.rates == {} and "a copy was faster" in beaten.source
    assert beaten.floor_us(1 << 30, 1e15) is None


@given(st.integers(0, 1 << 40), st.floats(0, 1e18), st.sampled_from(["bf16", "i8"]))
def test_the_floor_grows_with_the_work_and_never_counts_the_cache(moved: int, operations: float, operand: str) -> None:
    limits = physical_limits(*H200)
    floor_us = limits.floor_us(moved, operations, operand) or 0.0
    assert 0.0 <= floor_us <= (limits.floor_us(2 * moved, 2 * operations, operand) or 0.0)
    assert limits.floor_us(min(moved, limits.cache_bytes)) is None
    assert limits.bandwidth is not None
    assert floor_us * 1e-6 * limits.bandwidth >= moved - limits.cache_bytes - 1


def test_every_task_has_an_operand_type_with_a_rate() -> None:
    rates = physical_limits(*H200).rates
    found = {t.id: roofline.operand_of(t) for t in load_tasks()}
    assert set(found.values()) == set(rates) and found["quantization/matmul_w8a8"] == "i8"


def test_a_measurement_is_repeated_until_two_runs_agree() -> None:
    values = iter([3.0, 4.2, 4.25, 9.9])
    found, runs, agreed = until_agreed(lambda: next(values))
    assert (found, agreed) == (pytest.approx(4.225), True) and runs == (3.0, 4.2, 4.25)
    wild = iter([1.0, 2.0] * 4)
    found, runs, agreed = until_agreed(lambda: next(wild))
    assert not agreed and len(runs) == roofline.RUNS and found == 1.5


def test_ceilings_are_measured_once_for_all_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, measured = tmp_path / "ceilings.json", []
    limits = physical_limits(*H200)
    monkeypatch.setattr(roofline, "_of_driver", lambda device: limits)
    monkeypatch.setattr(roofline, "measure_ceilings", lambda device: measured.append(device) or MEASURED)
    fresh = roofline.roofline.__wrapped__
    assert fresh("cuda", kept) == fresh("cuda", kept) == checked(limits, MEASURED) and len(measured) == 1
    assert json.loads(kept.read_text())["made"] == "by hand", "how they were made is kept with them"
    for nonsense in ('{"copy": 1', "[]", '{"copy": "fast"}'):
        kept.write_text(nonsense)
        count = len(measured)
        assert fresh("cuda", kept).measured == MEASURED and len(measured) == count + 1
    monkeypatch.setattr(roofline, "KEPT_SECONDS", -1.0)
    count = len(measured)
    assert fresh("cuda", kept).measured == MEASURED and len(measured) == count + 1, "what is old is measured anew"
    assert fresh("cuda", None).measured == MEASURED and [p.name for p in tmp_path.iterdir()] == ["ceilings.json"]


def test_ceilings_that_never_agreed_are_not_handed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "ceilings.json"
    monkeypatch.setattr(roofline, "_of_driver", lambda device: physical_limits(*H200))
    monkeypatch.setattr(roofline, "measure_ceilings", lambda device: Ceilings(3e12, 7e14, {"copy": (3e12, 4e12)}, False))
    found = roofline.roofline.__wrapped__("cuda", kept)
    assert found.measured is not None and not found.measured.agreed and not kept.exists()


def test_a_roofline_is_told_in_plain_types() -> None:
    found = checked(physical_limits(*H200), MEASURED)
    data = json.loads(json.dumps(found.to_dict()))
    assert data["bandwidth"] == found.bandwidth and data["measured"]["copy"] == MEASURED.copy
    assert Roofline(**{**asdict(found), "measured": MEASURED}) == found
