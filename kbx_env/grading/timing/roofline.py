"""The roofline of a GPU: its physical limits, and the ceilings that were measured, kept apart.

A submission is refused for its speed only if it beats a physical limit: the bytes that the memory's clock and bus width
can carry, or the operations of the data sheet. A measured ceiling depends on the load of the machine while it is
measured. It is kept for reports, and decides nothing where the physical limits are known.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kbx_env.backends import cost
from kbx_env.spec.criteria import QuantizationScheme
from kbx_env.spec.task import Task

IMPOSSIBLE = 0.95
"""A time below this share of the physical floor is impossible. The physical limits are exact to a few parts in a
thousand; GPU events have a resolution of 0.5 us."""
PLAUSIBLE = 0.95
"""Share of the physical roofline above which a time is void until a person has explained it. Expert kernels reach 0.86
on an H200 (docs/measurements)."""
BESIDE_EAGER = 1.05
"""A time above ``PLAUSIBLE`` is void only if its share of the roofline is also above this factor times eager's share in
the same case."""
BOOST = 1.1
"""Factor from the data sheet's operations per second to the operations at the highest clock: an H200 boosts to 1,980
MHz, and its data sheet's peak assumes 1,830 MHz (8 % less)."""
COPY_SHARE = 0.8
"""Share of the memory's peak that a long copy reaches at least (0.88 on an H200: 4.26 of 4.82 TB/s). Where the peak is
not known, the measured copy divided by this is the estimate."""

KEPT_SECONDS = 86_400.0
"""Seconds after which ceilings are measured again: a card may throttle later."""
RUN_SECONDS = 0.025
"""Shortest device time of one measured run."""
RUNS = 8
"""Largest number of runs until two in a row agree."""
AGREE = 0.02
"""Relative difference of two runs that agree."""
COPY_BYTES = 1 << 30
"""Bytes of the measured copy; they are read once and written once."""
PRODUCT = 8192
"""Rows and columns of the measured fp16 product."""


@dataclass(frozen=True)
class Ceilings:
    """Ceilings that were measured with CUDA events, and how they were measured."""

    copy: float
    """Bytes per second, read and written, of a long copy."""
    product: float
    """fp16 operations per second of a large matrix product."""
    runs: Mapping[str, tuple[float, ...]]
    """Every run of ``copy`` and ``product``, in order."""
    agreed: bool
    """Whether the last two runs of both differ by at most ``AGREE``."""
    made: str = ""
    """Date, device, versions, and lengths of the runs."""


@dataclass(frozen=True)
class Roofline:
    """What a device can do at most.

    Attributes:
        bandwidth: bytes per second of its memory; ``None`` where neither driver nor data sheet tell.
        rates: operations per second at most, by the type of the operands (``i8`` for integers, ``bf16`` for floats).
        cache_bytes: bytes of its L2 cache, which need not reach the memory while a call is timed.
        source: where the limits come from.
        measured: the measured ceilings; ``None`` if they were not measured.
    """

    bandwidth: float | None
    rates: Mapping[str, float]
    cache_bytes: int
    source: str
    measured: Ceilings | None = None

    @property
    def physical(self) -> bool:
        """Whether ``bandwidth`` is a limit of the hardware, so that a faster time is impossible."""
        return self.bandwidth is not None

    def floor_us(self, moved: int, operations: float = 0.0, operand: str = "bf16") -> float | None:
        """Return the time below which no kernel can run.

        Args:
            moved: compulsory traffic in bytes. As many bytes as the L2 cache holds are not counted.
            operations: operations that the task must do.
            operand: type of the operands, a key of ``rates``.

        Returns:
            Microseconds; ``None`` where nothing must be done, or the limits are not known.
        """
        times = []
        if self.bandwidth is not None:
            times.append(max(0, moved - self.cache_bytes) / self.bandwidth)
        if operand in self.rates:
            times.append(operations / self.rates[operand])
        return 1e6 * max(times) if times and max(times) > 0 else None

    def likely_us(self, moved: int) -> float | None:
        """Estimate the floor from the measured copy: it may make a time ``void``, but never decides a verdict.

        Args:
            moved: compulsory traffic in bytes.

        Returns:
            Microseconds; ``None`` where a physical limit is known, or nothing was measured.
        """
        if self.physical or self.measured is None:
            return None
        return 1e6 * max(0, moved - self.cache_bytes) * COPY_SHARE / self.measured.copy or None

    def to_dict(self) -> dict[str, Any]:
        """Return plain types, for outcomes and reports."""
        return asdict(self)


def operand_of(task: Task) -> str:
    """Return the fastest operand type for products of a task: ``i8`` for quantized tasks, else ``bf16``.

    fp32 and fp64 products may be composed of 16-bit products; each needs at least one.
    """
    return "i8" if isinstance(task.truth, QuantizationScheme) else "bf16"


def data_sheet(name: str) -> cost.Device | None:
    """Find the data sheet of a device.

    Args:
        name: by the driver, such as ``NVIDIA H100 80GB HBM3``.

    Returns:
        The data sheet with the longest matching name; ``None`` if none matches.
    """
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    return next((cost.load(n) for n in sorted(cost.names(), key=len, reverse=True) if n in plain), None)


def physical_limits(name: str, memory_khz: int, bus_bits: int, cache_bytes: int) -> Roofline:
    """Return the limits by the driver and the data sheet; of two values for one limit the larger one.

    Args:
        name: name of the device.
        memory_khz: highest clock of its memory in kHz (two bits per line and clock: double data rate); 0 if not known.
        bus_bits: width of its memory bus in bits; 0 if not known.
        cache_bytes: bytes of its L2 cache.

    Returns:
        Limits in bytes and operations per second, without measured ceilings.
    """
    driver = memory_khz * 1e3 * 2 * bus_bits / 8
    sheet = data_sheet(name)
    known = {"driver": driver, "data sheet": sheet.dram_gbs * 1e9 if sheet else 0.0}
    source = max(known, key=known.__getitem__)
    rates = {} if sheet is None else {
        kind: BOOST * 1e12 * max(v for k, v in sheet.tensor_tflops.items() if k in kinds)
        for kind, kinds in (("bf16", ("f16", "bf16", "tf32", "f64")), ("i8", ("i8", "f8", "f16", "bf16")))
    }  # fmt: skip
    figures = f"driver: {memory_khz / 1e3:g} MHz x 2 x {bus_bits} bit; " if driver else ""
    figures += f"data sheet of {sheet.name}; " if sheet else ""
    origin = f"{figures}bandwidth from the {source}" if known[source] else "unknown"
    return Roofline(known[source] or None, rates, cache_bytes, origin)


def _of_driver(device: str) -> Roofline:
    """Return the physical limits of a device of this process."""
    properties = torch.cuda.get_device_properties(device)
    khz, bits = getattr(properties, "memory_clock_rate", 0), getattr(properties, "memory_bus_width", 0)
    with contextlib.suppress(Exception):  # no pynvml or no permission: torch's own values are used
        import pynvml as nvml

        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{str(properties.uuid).removeprefix('GPU-')}")
        khz = max(khz, 1000 * int(nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_MEM)))
        bits = max(bits, int(nvml.nvmlDeviceGetMemoryBusWidth(handle)))
    return physical_limits(properties.name, int(khz or 0), int(bits or 0), int(properties.L2_cache_size))


def checked(limits: Roofline, measured: Ceilings) -> Roofline:
    """Combine limits and measured ceilings. A limit that a measurement exceeds is wrong and is removed.

    Args:
        limits: the physical limits.
        measured: the measured ceilings.

    Returns:
        The limits that hold, with the measured ceilings.
    """
    found = replace(limits, measured=measured)
    if limits.bandwidth is not None and measured.copy > limits.bandwidth:
        found = replace(found, bandwidth=None, source=f"{limits.source}; a copy was faster ({measured.copy:.3g} B/s)")
    if any(measured.product > rate for rate in limits.rates.values()):
        found = replace(found, rates={}, source=f"{found.source}; a product was faster ({measured.product:.3g} op/s)")
    return found


@functools.cache
def roofline(device: str = "cuda", kept: Path | None = None) -> Roofline:
    """Return the roofline of this process's GPU. Call it while the GPU is held alone: the first call on a machine
    measures.

    Args:
        device: of torch.
        kept: file through which processes share their measurement; ``None`` for none.

    Returns:
        The limits and ceilings.
    """
    limits = _of_driver(device)
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        if kept is not None and time.time() - kept.stat().st_mtime < KEPT_SECONDS:
            data = json.loads(kept.read_text())
            runs = {name: tuple(map(float, values)) for name, values in data["runs"].items()}
            copy, product, agreed = float(data["copy"]), float(data["product"]), bool(data["agreed"])
            return checked(limits, Ceilings(copy, product, runs, agreed, data["made"]))
    measured = measure_ceilings(device)
    # Runs that never agreed are not stored: the next process measures again.
    if kept is not None and measured.agreed:
        with contextlib.suppress(OSError):
            new = kept.with_name(f"{kept.name}.{os.getpid()}")
            new.write_text(json.dumps(asdict(measured)))
            new.replace(kept)  # atomic: no process reads half of it
    return checked(limits, measured)


def until_agreed(run: Callable[[], float]) -> tuple[float, tuple[float, ...], bool]:
    """Repeat a measurement until two runs in a row agree.

    Args:
        run: measures a rate.

    Returns:
        The mean of the two that agree, or the median of all; all rates in order; whether two agreed.
    """
    runs: list[float] = []
    while len(runs) < RUNS:
        runs.append(run())
        if len(runs) > 1 and abs(runs[-1] - runs[-2]) <= AGREE * max(runs[-2:]):
            return statistics.fmean(runs[-2:]), tuple(runs), True
    return statistics.median(runs), tuple(runs), False


def measure_ceilings(device: str = "cuda") -> Ceilings:
    """Measure a long copy and a large fp16 product with CUDA events, each run ``RUN_SECONDS`` or longer.

    The host only starts a run and then waits, so that busy cores do not change the result.

    Args:
        device: of torch.

    Returns:
        The ceilings.
    """

    def rate(work: float, call: Callable[[], Any]) -> tuple[float, tuple[float, ...], bool]:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

        def seconds(calls: int) -> float:
            begin.record()
            for _ in range(calls):
                call()
            end.record()
            end.synchronize()
            return begin.elapsed_time(end) / 1e3

        seconds(2)  # the first calls load code
        calls = max(2, int(RUN_SECONDS / max(seconds(2) / 2, 1e-6)) + 1)
        return until_agreed(lambda: work * calls / seconds(calls))

    def copied() -> tuple[float, tuple[float, ...], bool]:
        a = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device)
        b = torch.empty_like(a)
        return rate(2.0 * COPY_BYTES, lambda: b.copy_(a))

    def multiplied() -> tuple[float, tuple[float, ...], bool]:
        m = torch.randn(PRODUCT, PRODUCT, device=device, dtype=torch.float16)
        out = torch.empty_like(m)
        return rate(2.0 * PRODUCT**3, lambda: torch.mm(m, m, out=out))

    copy, copies, steady = copied()
    product, products, settled = multiplied()
    torch.cuda.empty_cache()
    made = f"{time.strftime('%Y-%m-%d %H:%M')}, {torch.cuda.get_device_name(device)}, torch {torch.__version__}; "
    made += f"CUDA events, runs of {1e3 * RUN_SECONDS:g} ms or longer, alone on the GPU"
    return Ceilings(copy, product, {"copy": copies, "product": products}, steady and settled, made)
