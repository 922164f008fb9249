"""What the driver says of a GPU while it is timed: clocks, temperature, power, throttling, who else is there.

Asked through NVML where ``pynvml`` is installed, through ``nvidia-smi`` otherwise. What neither tells is ``None``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import subprocess
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

HARDWARE = {0x08: "hardware slowdown", 0x20: "software thermal", 0x40: "hardware thermal", 0x80: "power brake"}
"""Reasons for lower clocks that are not the work's own; a power cap that the work itself reaches is not among them."""
_QUERY = "clocks.sm,clocks.mem,temperature.gpu,power.draw,clocks_throttle_reasons.active"


@dataclass(frozen=True)
class Reading:
    """One look at the device."""

    source: str
    sm_mhz: int | None = None
    memory_mhz: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    reasons: int | None = None
    """The driver's mask of reasons for the current clocks."""
    processes: tuple[int, ...] | None = None
    """Process numbers on the device as the driver counts them, which in a container may be other numbers."""
    busy: tuple[int, ...] | None = None
    """Those that computed since the reading before."""

    def to_dict(self) -> dict[str, Any]:
        """Plain types, with the names of the reasons."""
        names = None if self.reasons is None else [n for bit, n in HARDWARE.items() if self.reasons & bit]
        return dataclasses.asdict(self) | {"throttled": names}


def disturbance(before: Reading | None, after: Reading | None, ours: Collection[int]) -> str | None:
    """What spoilt the time between two readings, if they tell.

    Whether a process is ours can only be said where at least one of ours is seen: elsewhere the numbers are another
    namespace's, and only coming and going tells.
    """
    if before is None or after is None:
        return None
    for reading in (before, after):
        for bit, name in HARDWARE.items():
            if reading.reasons is not None and reading.reasons & bit:
                return name
    known = {*(before.processes or ()), *(after.processes or ())} & set(ours)
    if known and after.busy is not None:
        others = sorted(set(after.busy) - set(ours))
        return f"{len(others)} other processes computed" if others else None
    if before.processes is not None and after.processes is not None:
        moved = set(before.processes) ^ set(after.processes)
        if moved - set(ours):
            return f"{len(moved - set(ours))} processes came or went"
    return None


class Telemetry:
    """Reads one device. ``uuid`` as CUDA tells it: the driver's own numbering need not be CUDA's."""

    def __init__(self, uuid: str | None, *, run: Callable[[list[str]], str] | None = None, nvml: Any = None) -> None:
        self._uuid = uuid if uuid is None or uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        self._run = run or _run
        self._nvml, self._handle = nvml, None
        self._last = 0
        if self._nvml is None and run is None:
            with contextlib.suppress(ImportError):
                self._nvml = importlib.import_module("pynvml")
        if self._nvml is not None and self._uuid is not None:
            with contextlib.suppress(Exception):  # no library of the driver's, no rights, an unknown device
                self._nvml.nvmlInit()
                self._handle = self._nvml.nvmlDeviceGetHandleByUUID(self._uuid)

    def read(self) -> Reading | None:
        """One look; ``None`` where the driver cannot be asked."""
        if self._uuid is None:
            return None
        return self._from_nvml() if self._handle is not None else self._from_tool()

    def _from_nvml(self) -> Reading:
        n, h = self._nvml, self._handle

        def ask(call: Callable[[], Any]) -> Any:
            try:
                return call()
            except Exception:  # a query that this card or this container does not answer
                return None

        reasons = getattr(n, "nvmlDeviceGetCurrentClocksEventReasons", None) or getattr(
            n, "nvmlDeviceGetCurrentClocksThrottleReasons", None
        )
        power = ask(lambda: n.nvmlDeviceGetPowerUsage(h))
        processes = ask(lambda: tuple(sorted(p.pid for p in n.nvmlDeviceGetComputeRunningProcesses(h))))
        since, self._last = self._last, time.time_ns() // 1000
        busy = None
        if since:
            busy = ask(lambda: tuple(sorted({u.pid for u in n.nvmlDeviceGetProcessUtilization(h, since) if u.smUtil})))
        return Reading(
            "nvml", sm_mhz=ask(lambda: int(n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_SM))),
            memory_mhz=ask(lambda: int(n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_MEM))),
            temperature_c=ask(lambda: int(n.nvmlDeviceGetTemperature(h, n.NVML_TEMPERATURE_GPU))),
            power_w=None if power is None else power / 1000,
            reasons=ask(lambda: int(reasons(h))) if reasons else None, processes=processes, busy=busy,
        )  # fmt: skip

    def _from_tool(self) -> Reading | None:
        where = ["nvidia-smi", "-i", str(self._uuid)]
        try:
            row = self._run([*where, f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"])
            listed = self._run([*where, "--query-compute-apps=pid", "--format=csv,noheader"])
        except (OSError, subprocess.SubprocessError):
            return None
        cells = [c.strip() for c in row.strip().split(",")]
        if len(cells) != 5:
            return None
        lines = [line.strip() for line in listed.splitlines() if line.strip()]
        return Reading(
            "nvidia-smi", sm_mhz=_whole(cells[0]), memory_mhz=_whole(cells[1]), temperature_c=_whole(cells[2]),
            power_w=_number(cells[3]), reasons=_whole(cells[4], 0),
            processes=tuple(sorted(int(p) for p in lines)) if all(map(str.isdigit, lines)) else None,
        )  # fmt: skip


def _run(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout


def _whole(text: str, base: int = 10) -> int | None:
    try:
        return int(text, base)
    except ValueError:
        return None


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
