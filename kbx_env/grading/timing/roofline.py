"""The roofline of a GPU: the limits that physics sets, and the ceilings that were measured. The two are never mixed up.

A submission is refused for its speed only if it beats a physical limit: the bytes that the memory's clock and bus width can
carry, or the operations of the data sheet. A measured ceiling depends on who else uses the machine while it is measured. It
is kept for reports, and decides nothing where the physical limits are known.
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
"""A time below this share of the physical floor is impossible. The physical limits are exact to a few parts in a thousand; the
clock of the GPU's events ticks every 0.5 us."""
PLAUSIBLE = 0.95
"""Share of the physical roofline above which a time is not believed until a person has explained it. Our experts reach 0.86
on an H200 (docs/measurements)."""
BESIDE_EAGER = 1.05
"""Nor is a time believed that is nearer to the roofline than eager's in the same case by this factor, if it is above
``PLAUSIBLE`` as well."""
BOOST = 1.1
"""Factor from the data sheet's operations a second to what the highest clock allows: an H200 boosts to 1,980 MHz, its data
sheet's peak stands for 1,830 MHz (8 % less)."""
COPY_SHARE = 0.8
"""Share of the memory's peak that a long copy surely reaches. Where the peak is not known, a copy divided by this stands for
it (0.88 on an H200: 4.26 of 4.82 TB/s)."""

KEPT_SECONDS = 86_400.0
"""Measured ceilings are measured again after this time: a card may throttle today."""
RUN_SECONDS = 0.025
"""Least device time of one measured run."""
RUNS = 8
"""Runs at most until two in a row agree."""
AGREE = 0.02
"""Relative difference of two runs that agree."""
COPY_BYTES = 1 << 30
PRODUCT = 8192
"""Rows and columns of the measured fp16 product."""


@dataclass(frozen=True)
class Ceilings:
    """Ceilings that were measured with CUDA events, and how."""

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
        measured: the measured ceilings; ``None`` where nobody measured.
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
        """Microseconds below which no kernel can run.

        Args:
            moved: compulsory traffic in bytes. As much as the L2 cache holds is not counted.
            operations: that the task must do.
            operand: type of the operands, a key of ``rates``.

        Returns:
            The floor; ``None`` where nothing must be done, or the limits are not known.
        """
        times = []
        if self.bandwidth is not None:
            times.append(max(0, moved - self.cache_bytes) / self.bandwidth)
        if operand in self.rates:
            times.append(operations / self.rates[operand])
        return 1e6 * max(times) if times and max(times) > 0 else None

    def likely_us(self, moved: int) -> float | None:
        """Microseconds that the measured copy suggests where no physical limit is known: good for ``void``, not for a verdict."""
        if self.physical or self.measured is None:
            return None
        return 1e6 * max(0, moved - self.cache_bytes) * COPY_SHARE / self.measured.copy or None

    def to_dict(self) -> dict[str, Any]:
        """Plain types, for outcomes and reports."""
        return asdict(self)


def operand_of(task: Task) -> str:
    """The fastest operand type that an honest kernel of the task may multiply in: ``i8`` for quantized tasks, else ``bf16``.

    fp32 and fp64 products may be put together from 16-bit ones, never from fewer than one.
    """
    return "i8" if isinstance(task.truth, QuantizationScheme) else "bf16"


def data_sheet(name: str) -> cost.Device | None:
    """The data of a device by the name that the driver gives it, such as ``NVIDIA H100 80GB HBM3``; ``None`` if there is none."""
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    return next((cost.load(n) for n in sorted(cost.names(), key=len, reverse=True) if n in plain), None)


def physical_limits(name: str, memory_khz: int, bus_bits: int, cache_bytes: int) -> Roofline:
    """The limits from the driver's figures and the data sheet; of two figures for one limit the larger one.

    Args:
        name: of the device.
        memory_khz: highest clock of its memory in kHz, which moves two bits a line and clock; 0 if not known.
        bus_bits: width of its memory's bus; 0 if not known.
        cache_bytes: of its L2 cache.
    """
    driver = memory_khz * 1e3 * 2 * bus_bits / 8
    sheet = data_sheet(name)
    known = {"driver": driver, "data sheet": sheet.dram_gbs * 1e9 if sheet else 0.0}
    source = max(known, key=known.__getitem__)
    rates = {} if sheet is None else {
        kind: BOOST * 1e12 * max(v for k, v in sheet.tensor_tflops.items() if k in kinds)
        for kind, kinds in (("bf16", ("f16", "bf16", "tf32", "f64")), ("i8", ("i8", "f8", "f16", "bf16")))
    }  # fmt: skip
    told = f"driver: {memory_khz / 1e3:g} MHz x 2 x {bus_bits} bit; " if driver else ""
    told += f"data sheet of {sheet.name}; " if sheet else ""
    return Roofline(known[source] or None, rates, cache_bytes, f"{told}bandwidth from the {source}" if known[source] else "unknown")


def _of_driver(device: str) -> Roofline:
    properties = torch.cuda.get_device_properties(device)
    khz, bits = getattr(properties, "memory_clock_rate", 0), getattr(properties, "memory_bus_width", 0)
    with contextlib.suppress(Exception):  # no pynvml, no rights: torch's own figures have to do
        import pynvml as nvml

        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{str(properties.uuid).removeprefix('GPU-')}")
        khz = max(khz, 1000 * int(nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_MEM)))
        bits = max(bits, int(nvml.nvmlDeviceGetMemoryBusWidth(handle)))
    return physical_limits(properties.name, int(khz or 0), int(bits or 0), int(properties.L2_cache_size))


def checked(limits: Roofline, measured: Ceilings) -> Roofline:
    """Both together. A limit that a measurement beats is wrong, and limits nothing any more."""
    found = replace(limits, measured=measured)
    if limits.bandwidth is not None and measured.copy > limits.bandwidth:
        found = replace(found, bandwidth=None, source=f"{limits.source}; a copy was faster ({measured.copy:.3g} B/s)")
    if any(measured.product > rate for rate in limits.rates.values()):
        found = replace(found, rates={}, source=f"{found.source}; a product was faster ({measured.product:.3g} op/s)")
    return found


@functools.cache
def roofline(device: str = "cuda", kept: Path | None = None) -> Roofline:
    """The roofline of this process's GPU. Call it while nobody else uses the GPU: the first call on a machine measures.

    Args:
        device: of torch.
        kept: file in which processes find each other's measurement; ``None`` for none.
    """
    limits = _of_driver(device)
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        if kept is not None and time.time() - kept.stat().st_mtime < KEPT_SECONDS:
            data = json.loads(kept.read_text())
            runs = {name: tuple(map(float, values)) for name, values in data["runs"].items()}
            return checked(limits, Ceilings(float(data["copy"]), float(data["product"]), runs, bool(data["agreed"]), data["made"]))
    measured = measure_ceilings(device)
    # Runs that never agreed are not handed on: the next process tries again.
    if kept is not None and measured.agreed:
        with contextlib.suppress(OSError):
            new = kept.with_name(f"{kept.name}.{os.getpid()}")
            new.write_text(json.dumps(asdict(measured)))
            new.replace(kept)  # at once: nobody reads half of it
    return checked(limits, measured)


def until_agreed(run: Callable[[], float]) -> tuple[float, tuple[float, ...], bool]:
    """Repeat a measurement until two runs in a row agree.

    Args:
        run: gives a rate.

    Returns:
        The mean of the two that agree, or the median of all; every run; whether two agreed.
    """
    runs: list[float] = []
    while len(runs) < RUNS:
        runs.append(run())
        if len(runs) > 1 and abs(runs[-1] - runs[-2]) <= AGREE * max(runs[-2:]):
            return statistics.fmean(runs[-2:]), tuple(runs), True
    return statistics.median(runs), tuple(runs), False


def measure_ceilings(device: str = "cuda") -> Ceilings:
    """Measure a long copy and a large fp16 product with CUDA events, each run ``RUN_SECONDS`` or longer.

    The host only starts a run: while the device works it does nothing, so that busy cores change no result.
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
