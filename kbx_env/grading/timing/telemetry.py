"""Telemetry of a GPU while it is timed: clocks, temperature, power, throttling, other processes.

The driver is asked through NVML where ``pynvml`` is installed, and through ``nvidia-smi`` otherwise. Values that
neither reports are ``None``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import subprocess
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

HARDWARE = {0x08: "hardware slowdown", 0x20: "software thermal", 0x40: "hardware thermal", 0x80: "power brake"}
"""Bits of NVML's clock event reasons that make a time invalid. A power cap, which the work itself may reach, is not
included."""
_QUERY = "clocks.sm,clocks.mem,temperature.gpu,power.draw,clocks_throttle_reasons.active"
"""Fields to query from ``nvidia-smi``, in the order in which ``_from_tool`` reads them."""


_REPORTS_BUSY: set[str] = set()
"""Devices whose driver has told who computed. Where it does not, the lists of processes are all there is to compare."""


@dataclass(frozen=True)
class Reading:
    """The state of the device at one time."""

    source: str
    """``nvml`` or ``nvidia-smi``."""
    sm_mhz: int | None = None
    memory_mhz: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    reasons: int | None = None
    """The driver's bit mask of reasons for the current clocks."""
    processes: tuple[int, ...] | None = None
    """Ids of the processes on the device, in the driver's namespace: in a container processes have other ids."""
    busy: tuple[int, ...] | None = None
    """Ids of the processes that computed since the last reading that tells this; ``None`` in one that does not."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain types, with the names of the reasons that are in ``HARDWARE``."""
        names = None if self.reasons is None else [n for bit, n in HARDWARE.items() if self.reasons & bit]
        return dataclasses.asdict(self) | {"throttled": names}


def disturbance(before: Reading | None, after: Reading | None, ours: Collection[int]) -> str | None:
    """Return a text if the time between two readings was disturbed.

    Other processes can be told from the grader's only if at least one of the grader's ids appears in a reading.
    Otherwise the ids belong to another namespace, and only processes that start or end are counted.

    Args:
        before: the first reading.
        after: the second one.
        ours: ids of the processes that respect the GPU lock.

    Returns:
        The disturbance; ``None`` if there was none, or a reading is missing.
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


def strangers(reading: Reading | None, ours: Collection[int]) -> frozenset[int]:
    """Return the ids of other processes that computed before a reading; none where ids belong to another namespace.

    Args:
        reading: the reading.
        ours: ids of the processes that respect the GPU lock.
    """
    if reading is None or not set(reading.processes or ()) & set(ours):
        return frozenset()
    return frozenset(reading.busy or ()) - set(ours)


class Telemetry:
    """Reads one device.

    Args:
        uuid: of the device by CUDA, whose numbering of devices may differ from the driver's; ``None`` to read nothing.
        run: runs a command and returns its output; for tests.
        nvml: the NVML module; for tests.
    """

    def __init__(self, uuid: str | None, *, run: Callable[[list[str]], str] | None = None, nvml: Any = None) -> None:
        self._uuid = uuid if uuid is None or uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        self._run = run or _run
        self._nvml, self._handle = nvml, None
        self._last = 0
        self._listed: frozenset[int] = frozenset()  # the latest processes on the device
        self._executor: ThreadPoolExecutor | None = None  # ends with this object
        if self._nvml is None and run is None:
            with contextlib.suppress(ImportError):
                self._nvml = importlib.import_module("pynvml")
        if self._nvml is not None and self._uuid is not None:
            with contextlib.suppress(Exception):  # no driver library, no permission, an unknown device
                self._nvml.nvmlInit()
                self._handle = self._nvml.nvmlDeviceGetHandleByUUID(self._uuid)

    def read(self, ours: Collection[int] = (), whole: bool = True) -> Reading | None:
        """Return the current state of the device; ``None`` where the driver does not answer.

        Who has computed takes the driver 1.5 ms, and which processes there are 1 ms, during which it keeps all GPUs of the host
        waiting.

        Args:
            ours: ids of the processes that respect the GPU lock; where the driver's ids belong to another namespace, nobody asks
                who has computed.
            whole: the reading is for all that happened since the last whole one. Otherwise NVML is not asked for clocks,
                temperature and power, and for processes only if the latest list had others than ``ours``; a whole reading later
                tells whether another process has computed meanwhile.
        """
        if self._uuid is None:
            return None
        return self._from_nvml(ours, whole) if self._handle is not None else self._from_tool()

    def begin_reading(self, ours: Collection[int] = (), whole: bool = True) -> Future[Reading | None]:
        """Begin to read the device, beside other work of the caller; arguments as for ``read``.

        Returns:
            What ``read`` returns.
        """
        self._executor = self._executor or ThreadPoolExecutor(1, "telemetry")
        return self._executor.submit(self.read, ours, whole)

    def memory_of_others(self, ours: Collection[int]) -> int | None:
        """Return how much of the device's memory other processes hold, such as a trainer or a server of a model.

        Args:
            ours: ids of the processes that respect the GPU lock.

        Returns:
            Bytes; ``None`` where the driver does not tell, or its ids belong to another namespace.
        """
        if self._uuid is None:
            return None
        held = self._memory_by_nvml() if self._handle is not None else self._memory_by_tool()
        if held is None or not set(ours) & set(held):
            return None
        others = [size for pid, size in held.items() if pid not in ours]
        return sum(size for size in others if size is not None)

    def _memory_by_nvml(self) -> dict[int, int | None] | None:
        """Return the bytes that each process holds, by NVML."""
        found = _ask(lambda: self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle))
        return None if found is None else {p.pid: getattr(p, "usedGpuMemory", None) for p in found}

    def _memory_by_tool(self) -> dict[int, int | None] | None:
        """Return the bytes that each process holds, by ``nvidia-smi``, which tells them in MiB."""
        columns = "--query-compute-apps=pid,used_memory"
        try:
            listed = self._run(["nvidia-smi", "-i", str(self._uuid), columns, "--format=csv,noheader,nounits"])
        except (OSError, subprocess.SubprocessError):
            return None
        rows = [[cell.strip() for cell in line.split(",")] for line in listed.splitlines() if line.strip()]
        if not all(len(row) == 2 and row[0].isdigit() for row in rows):
            return None
        return {int(pid): int(size) << 20 if size.isdigit() else None for pid, size in rows}

    def _from_nvml(self, ours: Collection[int], whole: bool) -> Reading:
        """Read the device through NVML; arguments as for ``read``."""
        n, h, ask = self._nvml, self._handle, _ask
        reasons = getattr(n, "nvmlDeviceGetCurrentClocksEventReasons", None) or getattr(
            n, "nvmlDeviceGetCurrentClocksThrottleReasons", None
        )
        ask_if_whole = ask if whole else lambda call: None
        power = ask_if_whole(lambda: n.nvmlDeviceGetPowerUsage(h))
        processes, busy, since = None, None, self._last
        tells = self._uuid in _REPORTS_BUSY
        if listed := whole or not tells or not self._listed or not self._listed <= set(ours):
            processes = ask(lambda: tuple(sorted(p.pid for p in n.nvmlDeviceGetComputeRunningProcesses(h))))
            self._listed = frozenset(processes or ())
        strange = processes is None or (set(processes) & set(ours) and (whole or not set(processes) <= set(ours)))
        if listed and (not ours or strange):
            self._last = time.time_ns() // 1000
            if since:
                busy = ask(lambda: tuple(sorted({u.pid for u in n.nvmlDeviceGetProcessUtilization(h, since) if u.smUtil})))
                _REPORTS_BUSY.update({str(self._uuid)} if busy is not None else ())
        return Reading(
            "nvml", sm_mhz=ask_if_whole(lambda: int(n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_SM))),
            memory_mhz=ask_if_whole(lambda: int(n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_MEM))),
            temperature_c=ask_if_whole(lambda: int(n.nvmlDeviceGetTemperature(h, n.NVML_TEMPERATURE_GPU))),
            power_w=None if power is None else power / 1000,
            reasons=ask(lambda: int(reasons(h))) if reasons else None, processes=processes, busy=busy,
        )  # fmt: skip

    def _from_tool(self) -> Reading | None:
        """Read the device through ``nvidia-smi``."""
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
            "nvidia-smi", sm_mhz=_integer(cells[0]), memory_mhz=_integer(cells[1]), temperature_c=_integer(cells[2]),
            power_w=_number(cells[3]), reasons=_integer(cells[4], 0),
            processes=tuple(sorted(int(p) for p in lines)) if all(map(str.isdigit, lines)) else None,
        )  # fmt: skip


def _ask(call: Callable[[], Any]) -> Any:
    """Return what a query of NVML returns; ``None`` where this card or container does not support it."""
    try:
        return call()
    except Exception:
        return None


def _run(command: list[str]) -> str:
    """Return the output of a command; it may take ten seconds."""
    return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout


def _integer(text: str, base: int = 10) -> int | None:
    """Return an integer, ``None`` where the text is none; base 0 also reads hexadecimal ones."""
    try:
        return int(text, base)
    except ValueError:
        return None


def _number(text: str) -> float | None:
    """Return a number, ``None`` where the text is none."""
    try:
        return float(text)
    except ValueError:
        return None
