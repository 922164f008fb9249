"""Data of each GPU: datasheet peaks, occupancy limits, and constants fitted to measurements."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from kbx_env.errors import UnknownName

_DATA = Path(__file__).resolve().parent / "data"


@dataclass(frozen=True)
class Constants:
    """The fitted constants of the model.

    Attributes:
        launch_us: Microseconds from one event to the next around an empty kernel.
        gap_us: Microseconds that each further launch of a sequence adds.
        program_us: Microseconds to start and end one program on an SM.
        load_us: Microseconds that a program waits for one round of dependent loads.
        sync_us: Microseconds of one reduction, scan or matrix product step of a program.
        issue_cycles: Clock cycles between two dependent arithmetic instructions of a warp.
        dram_share: Fraction of the DRAM peak that a long copy reaches.
        l2_gbs: Gigabytes per second that the L2 cache delivers to all SMs.
        tensor_share: Fraction of the tensor core peak that a long product reaches.
        atomics_per_us: Atomic operations on distinct addresses per microsecond, of the whole GPU.
    """

    launch_us: float = 4.0
    gap_us: float = 1.5
    program_us: float = 0.5
    load_us: float = 0.8
    sync_us: float = 0.1
    issue_cycles: float = 2.0
    dram_share: float = 0.9
    l2_gbs: float = 5500.0
    tensor_share: float = 0.7
    atomics_per_us: float = 2000.0


@dataclass(frozen=True)
class Device:
    """A GPU.

    Attributes:
        name: Short name.
        capability: Compute capability times ten, 90 for sm_90.
        sms: Number of streaming multiprocessors.
        clock_mhz: Boost clock in MHz.
        dram_gbs: Peak DRAM bandwidth in GB/s.
        l2_bytes: Bytes of L2 cache.
        tensor_tflops: Dense peak of the tensor cores by element ("f16", "tf32", "i8", ...), 10^12 operations per
            second.
        fp32_lanes: fp32 operations per clock and SM.
        special_lanes: Special function operations per clock and SM.
        registers: 32-bit registers of an SM.
        warps: Largest number of resident warps of an SM.
        blocks: Largest number of resident programs of an SM.
        shared_bytes: Bytes of shared memory of an SM.
        shared_per_block: Largest number of bytes of shared memory of one program.
        constants: Fitted constants.
        sources: Where the peaks ("datasheet") and the constants ("unfitted", "fitted ...") come from.
    """

    name: str
    capability: int
    sms: int
    clock_mhz: float
    dram_gbs: float
    l2_bytes: int
    tensor_tflops: dict[str, float]
    fp32_lanes: int
    special_lanes: int
    registers: int
    warps: int
    blocks: int
    shared_bytes: int
    shared_per_block: int
    constants: Constants
    sources: dict[str, str]

    def with_constants(self, **values: float) -> Device:
        """Return the device with other values of some constants, by their names in ``Constants``."""
        return replace(self, constants=replace(self.constants, **values))


def names() -> list[str]:
    """Return the names of the devices with a data file, sorted."""
    return sorted(p.stem for p in _DATA.glob("*.json"))


def parse(name: str, data: dict[str, Any]) -> Device:
    """Build a device from the contents of its data file.

    Args:
        name: Name of the device.
        data: The parsed JSON; ``fit`` and unknown constants are ignored.

    Returns:
        The device.
    """
    known = {f.name for f in fields(Constants)}
    constants = {k: float(v) for k, v in data.get("constants", {}).items() if k in known}
    rest = {k: v for k, v in data.items() if k not in ("constants", "fit")}
    return Device(name=name, constants=Constants(**constants), **rest)


@cache
def load(name: str) -> Device:
    """Load a device.

    Args:
        name: Its name, such as "h200".

    Returns:
        The device.

    Raises:
        UnknownName: there is no data for it.
    """
    if name not in names():
        raise UnknownName("device", name, names())
    return parse(name, json.loads((_DATA / f"{name}.json").read_text()))


def path(name: str) -> Path:
    """Return the path of a device's data file."""
    return _DATA / f"{name}.json"
