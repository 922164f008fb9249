"""What the driver says of a GPU, and what counts as a disturbance."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace
from typing import Any

import pytest

from kbx_env.grading.timing import telemetry as telemetry_module
from kbx_env.grading.timing.telemetry import Reading, Telemetry, disturbance, strangers


def _tool(row: str, processes: str = "") -> Any:
    return lambda command: processes if any("compute-apps" in c for c in command) else row


def test_the_tool_is_read() -> None:
    got = Telemetry("abc", run=_tool("1980, 3201, 41, 312.55, 0x0000000000000044\n", "17\n4\n")).read()
    assert got == Reading("nvidia-smi", 1980, 3201, 41, 312.55, 0x44, (4, 17))
    assert got.to_dict()["throttled"] == ["hardware thermal"]


def test_what_is_not_told_is_none() -> None:
    got = Telemetry("abc", run=_tool("[N/A], 3201, ERR!, [N/A], [N/A]\n", "[Insufficient Permissions]\n")).read()
    assert got == Reading("nvidia-smi", None, 3201)
    assert got.to_dict()["throttled"] is None
    assert Telemetry("abc", run=_tool("No devices were found")).read() is None
    assert Telemetry(None).read() is None

    def fails(command: list[str]) -> str:
        raise subprocess.CalledProcessError(1, command)

    assert Telemetry("abc", run=fails).read() is None


class _Nvml:
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    def __init__(self) -> None:
        self.busy: list[Any] = []

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        assert uuid == "GPU-abc"
        return "handle"

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        return 1000 * kind

    def nvmlDeviceGetTemperature(self, handle: str, kind: int) -> int:
        raise RuntimeError("not supported")

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        return 250_500

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:
        return 4

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:
        return [SimpleNamespace(pid=7), SimpleNamespace(pid=5)]

    def nvmlDeviceGetProcessUtilization(self, handle: str, since: int) -> list[Any]:
        return [SimpleNamespace(pid=7, smUtil=0), SimpleNamespace(pid=5, smUtil=3)]


def test_the_library_is_read() -> None:
    telemetry = Telemetry("abc", nvml=_Nvml())
    first, second = telemetry.read(), telemetry.read()
    assert first == Reading("nvml", 1000, 2000, None, 250.5, 4, (5, 7), None)
    assert second is not None and second.busy == (5,)


def test_between_cases_the_driver_is_asked_for_what_tells_a_disturbance() -> None:
    telemetry = Telemetry("abc", nvml=_Nvml())
    assert telemetry.read((5, 7), False) == Reading("nvml", reasons=4, processes=(5, 7))


def test_who_has_computed_is_asked_only_where_the_answer_matters() -> None:
    telemetry = Telemetry("abc", nvml=_Nvml())
    readings = [telemetry.read()]
    for ours, whole in (((5, 7), False), ((5, 7), True), ((5,), False), ((70, 80), True)):
        readings.append(telemetry.read(ours, whole))
    asked = [r is not None and r.busy is not None for r in readings]
    # Nothing came before the first; then: only ours are there, ours for the whole hold, a stranger, another namespace.
    assert asked == [False, False, True, True, False]
    assert strangers(readings[3], (7,)) == {5} and not strangers(readings[3], (5,)) and not strangers(readings[1], (7,))


def test_processes_are_not_listed_again_while_only_gradings_use_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each list is a request to the driver, which has one lock for all GPUs of a host."""
    monkeypatch.setattr(telemetry_module, "_REPORTS_BUSY", set())
    telemetry, ours = Telemetry("abc", nvml=_Nvml()), (5, 7)
    first = [telemetry.read(ours, whole) for whole in (True, False, True)]
    assert all(r is not None and r.processes == (5, 7) for r in first), "nobody knows yet whether the driver tells who computed"
    listed = [telemetry.read(ours, whole) for whole in (False, False, True)]
    assert [r is not None and r.processes for r in listed] == [None, None, (5, 7)]
    assert [r is not None and r.busy for r in listed] == [None, None, (5,)]
    telemetry.read((7,))  # a stranger: whoever measures wants to know at once whether it computes
    seen = telemetry.read((7,), False)
    assert seen is not None and strangers(seen, (7,)) == {5}


def test_processes_are_listed_where_the_driver_does_not_tell_who_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry_module, "_REPORTS_BUSY", set())
    nvml = _Nvml()
    monkeypatch.setattr(nvml, "nvmlDeviceGetProcessUtilization", None, raising=False)
    telemetry = Telemetry("abc", nvml=nvml)
    assert all(r is not None and r.processes for r in [telemetry.read((5, 7), whole) for whole in (True, True, False, False)])


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        (None, Reading("m"), None),
        (Reading("m"), Reading("m"), None),
        (Reading("m", reasons=0x4), Reading("m", reasons=0x1), None),  # the work's own power cap, an idle GPU
        (Reading("m"), Reading("m", reasons=0x8), "hardware slowdown"),
        (Reading("m", processes=(1, 2, 9)), Reading("m", processes=(1, 2, 9), busy=(1, 2)), None),
        (
            Reading("m", processes=(1, 2, 9)),
            Reading("m", processes=(1, 2, 9), busy=(1, 9)),
            "1 other processes computed",
        ),
        # Numbers of another namespace: nobody knows which are ours.
        (Reading("m", processes=(70, 80)), Reading("m", processes=(70, 80), busy=(70, 80)), None),
        (Reading("m", processes=(70, 80)), Reading("m", processes=(70, 80, 90)), "1 processes came or went"),
    ],
)
def test_disturbances(before: Reading | None, after: Reading | None, found: str | None) -> None:
    assert disturbance(before, after, (1, 2)) == found


@pytest.mark.parametrize(
    ("listed", "held"),
    [
        ("1, 900\n2, 1024\n77, 24000\n", 24000 << 20),
        ("1, 900\n", 0),
        ("1, 900\n77, [N/A]\n78, 5\n", 5 << 20),
        ("70, 900\n80, 24000\n", None),  # ids of another namespace: nobody knows which are ours
        ("", None),
        ("[Insufficient Permissions]\n", None),
    ],
)
def test_memory_of_processes_that_do_not_grade(listed: str, held: int | None) -> None:
    """A trainer on the same GPU keeps its weights while kernels are graded."""
    assert Telemetry("abc", run=_tool("", listed)).memory_of_others({1, 2}) == held
    if listed.startswith("["):
        return

    class Listing(_Nvml):
        def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:
            rows = [line.split(", ") for line in listed.splitlines()]
            sizes = [(int(pid), int(size) << 20 if size.isdigit() else None) for pid, size in rows]
            return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in sizes]

    assert Telemetry("abc", nvml=Listing()).memory_of_others({1, 2}) == held


def test_memory_that_nobody_tells() -> None:
    def fails(command: list[str]) -> str:
        raise subprocess.CalledProcessError(1, command)

    assert Telemetry("abc", run=fails).memory_of_others({1}) is None
    assert Telemetry(None).memory_of_others({1}) is None


def test_a_reading_beside_other_work_is_the_same() -> None:
    telemetry = Telemetry("abc", run=_tool("1980, 3201, 41, 312.55, 0x0\n", "17\n"))
    pending = telemetry.begin_reading({17}, whole=False)
    assert pending.result(timeout=30) == telemetry.read({17}, whole=False)
    assert pending.result() == Reading("nvidia-smi", 1980, 3201, 41, 312.55, 0, (17,))
    assert Telemetry(None).begin_reading().result(timeout=30) is None
