"""Estimate the microseconds of a launch sequence from its facts: a roofline with latencies.

Every number that this module returns is an estimate and is named so; a measured time never passes through it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from kbx_env.backends.cost.counting import SECTOR
from kbx_env.backends.cost.devices import Device
from kbx_env.backends.cost.facts import LaunchFacts
from kbx_env.errors import UsageError

OVERLAP = 3.0
"""Exponent of the norm that joins the parts of a launch: 1 adds them, infinity takes the largest. Not fitted."""
_REGISTER_UNIT, _SHARED_UNIT = 256, 128
"""Allocation units: registers of a warp, and bytes of shared memory of a program."""
_PARTS = 4
"""Parts of an SM with their own schedulers and register files; a warp stays in one of them."""
_RESERVED = 1024
"""Bytes of shared memory that CUDA reserves per program, from sm_80 on."""
_OLD_PRODUCT = 0.62
"""Share of the tensor core peak that Hopper reaches without four warps together: ``mma`` in place of ``wgmma``."""


@dataclass(frozen=True)
class Occupancy:
    """Occupancy of an SM by a kernel.

    Attributes:
        blocks: Resident programs per SM.
        warps: Resident warps per SM.
        share: ``warps`` over the largest number of warps of an SM.
        limited_by: "registers", "shared memory", "warps" or "blocks".
    """

    blocks: int
    warps: int
    share: float
    limited_by: str


@dataclass(frozen=True)
class Estimate:
    """An estimate of a launch sequence.

    Attributes:
        estimated_us: Estimated microseconds of the sequence.
        parts: Estimated microseconds by cause, summed over launches: "launch", "dram", "l2", "tensor", "alu",
            "special", "atomics", "latency". They overlap: their sum exceeds ``estimated_us``.
        occupancy: Occupancy of each launch.
        waves: Programs over the programs that fit at once, of each launch.
        bound_by: The part with the most microseconds.
    """

    estimated_us: float
    parts: dict[str, float]
    occupancy: list[Occupancy]
    waves: list[float]
    bound_by: str


def occupancy(registers: int, shared_bytes: int, num_warps: int, device: Device) -> Occupancy:
    """Compute the occupancy of an SM by CUDA's rules.

    Args:
        registers: 32-bit registers per thread.
        shared_bytes: Bytes of shared memory per program.
        num_warps: Warps per program.
        device: The GPU.

    Returns:
        The occupancy.

    Raises:
        UsageError: not even one program fits.
    """
    per_warp = ceil(max(registers, 1) * 32 / _REGISTER_UNIT) * _REGISTER_UNIT
    warps_by_registers = device.registers // _PARTS // per_warp * _PARTS
    per_block = ceil((shared_bytes + _RESERVED) / _SHARED_UNIT) * _SHARED_UNIT
    limits = {
        "warps": device.warps // num_warps,
        "blocks": device.blocks,
        "registers": warps_by_registers // num_warps,
        "shared memory": device.shared_bytes // per_block if shared_bytes <= device.shared_per_block else 0,
    }
    by = min(limits, key=lambda k: limits[k])
    blocks = limits[by]
    if blocks < 1:
        need = f"{registers} registers per thread, {shared_bytes} bytes of shared memory and {num_warps} warps"
        raise UsageError(f"a program with {need} does not fit on an SM of {device.name}: {by}")
    return Occupancy(blocks, blocks * num_warps, blocks * num_warps / device.warps, by)


def _peak(kind: str, device: Device) -> float:
    """Return the peak operations per microsecond of a kind of product, 0 if it does not run on tensor cores."""
    table = device.tensor_tflops
    if kind.startswith("scaled "):
        kind = "f16"
    elem = kind.split("*")[0]
    for suffix, passes in (("x3", 3), ("x6", 6)):
        if elem.endswith(suffix):
            return table.get(elem[: -len(suffix)], 0.0) * 1e6 / passes
    if elem.startswith("f8"):
        elem = "f8" if "f8" in table else "f16"
    return table.get(elem, 0.0) * 1e6


def _spilled(f: LaunchFacts, device: Device) -> float:
    """Return the bytes of spilled registers that a launch moves.

    A kernel below its register limit does not spill: its local memory is a rarely used array of a library function.
    """
    cap = min(255, device.registers // (32 * f.num_warps))
    if f.registers < cap - 8:
        return 0.0
    return 2.0 * f.local_bytes * 32 * f.num_warps * f.programs * max(1.0, f.load_rounds)


def launch_parts(f: LaunchFacts, device: Device) -> tuple[dict[str, float], Occupancy, float]:
    """Estimate one launch.

    Args:
        f: The launch.
        device: The GPU.

    Returns:
        Microseconds by cause (see ``Estimate.parts``), the occupancy, and the waves: programs over the programs that
        fit on the GPU at once.

    Raises:
        UsageError: a program does not fit on an SM.
    """
    c = device.constants
    occ = occupancy(f.registers, f.shared_bytes, f.num_warps, device)
    programs = max(f.programs, 1)
    waves = programs / (device.sms * occ.blocks)
    # The SM with the most programs ends last; a warp uses one of its four parts.
    most = ceil(programs / device.sms)
    resident = min(occ.blocks, most) * f.num_warps
    used = min(1.0, resident / _PARTS)
    uneven = most * device.sms / programs

    requested = f.sectors * SECTOR
    touched = min(f.unique_bytes, requested) if requested else f.unique_bytes
    # Repeated requests hit L2, unless sectors are used in part (gathers, strides) and the memory exceeds L2.
    in_part = 1.0 - min(1.0, (f.loaded_bytes + f.stored_bytes) / requested) if requested else 0.0
    missed = max(0.0, 1.0 - device.l2_bytes / f.unique_bytes) if f.unique_bytes else 0.0
    dram = touched + max(0.0, requested - touched) * in_part * missed

    tensor, scalar = 0.0, 0.0
    for kind, flops in f.dot_flops.items():
        peak = _peak(kind, device)
        if peak:
            slow = _OLD_PRODUCT if device.capability == 90 and f.num_warps % 4 else 1.0
            tensor += flops / (peak * slow)
        else:
            # Two operations are one multiply-add of an ordinary lane.
            scalar += flops / 2
    lanes = device.sms * device.clock_mhz * used
    alu = f.alu_flops + scalar
    issued = alu / (programs * 32 * f.num_warps) * c.issue_cycles / device.clock_mhz
    one_program = c.program_us + f.load_rounds * c.load_us + f.syncs * c.sync_us + issued
    parts = {
        "dram": dram / (device.dram_gbs * c.dram_share * 1e3),
        "l2": (requested + _spilled(f, device)) / (c.l2_gbs * 1e3) * (uneven if programs < device.sms else 1.0),
        "tensor": tensor / (c.tensor_share * used) * uneven,
        "alu": alu / (lanes * device.fp32_lanes) * uneven,
        "special": f.special_flops / (lanes * device.special_lanes) * uneven,
        "atomics": f.atomic_lines / c.atomics_per_us,
        "latency": ceil(waves) * one_program,
    }
    return parts, occ, waves


def combine(parts: dict[str, float]) -> float:
    """Return the microseconds of one launch: the ``OVERLAP`` norm of its parts, which mostly run at the same time."""
    return sum(v**OVERLAP for v in parts.values()) ** (1 / OVERLAP)


def estimate_us(facts: Sequence[LaunchFacts], device: Device) -> Estimate:
    """Estimate the device time of a launch sequence that starts with a cold L2 cache.

    Args:
        facts: The launches in order.
        device: The GPU.

    Returns:
        The estimate.

    Raises:
        UsageError: a program of a launch does not fit on an SM.
    """
    c = device.constants
    parts: dict[str, float] = {"launch": c.launch_us + c.gap_us * max(len(facts) - 1, 0) if facts else 0.0}
    total = parts["launch"]
    occupancies, waves = [], []
    for f in facts:
        one, occ, w = launch_parts(f, device)
        total += combine(one)
        occupancies.append(occ)
        waves.append(w)
        for k, v in one.items():
            parts[k] = parts.get(k, 0.0) + v
    return Estimate(total, parts, occupancies, waves, max(parts, key=lambda k: parts[k]))
