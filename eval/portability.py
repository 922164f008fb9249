"""How correct kernels compile for each target: whether they build, registers, spills and shared memory."""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kbx_env.eval.report_data import Study

from kbx_env.backends import cost
from kbx_env.errors import UsageError
from kbx_env.options import TARGETS
from kbx_env.outcome import Build

WARPS = 4
"""Triton's default number of warps of a program, assumed for builds from before warps were recorded."""


@dataclass(frozen=True)
class Portable:
    """The builds of a policy's correct answers for one target. ``None``: not known, or nothing was compiled for it.

    Attributes:
        policy: name of the policy.
        target: that the answers were compiled for.
        category: of the tasks; empty for all of them.
        correct: correct answers, compiled for the target or not.
        answers: correct answers compiled for the target. The attributes below are about these.
        portable: answers of which every kernel builds and fits.
        kernels: kernels; the same kernel of two specialisations counts twice.
        built: kernels that build and fit.
        told: kernels of which registers are known.
        registers_median: of a thread, over kernels of which they are known.
        registers_max: of a thread, over kernels of which they are known.
        spilling: kernels with local memory, of those of which it is known. The table of a library function (cos) counts
            as local memory too.
        pressed: spilling kernels at the cap of registers, on a known device: they need more registers than there are.
        shared_median: bytes of shared memory of a program.
        shared_max: bytes of shared memory of a program.
        shared_limit: most bytes of shared memory that the target gives a program.
        over_limit: kernels that need more than that.
        device: the GPU whose limits determine the occupancy.
        occupancy_median: share of an SM's warps that registers and shared memory allow, at the warps that a program was
            compiled with; 0 for a kernel that does not fit.
        occupancy_min: the smallest of a kernel.
        occupancy_bound: median of the share that registers alone allow, in whole programs if their warps are known: an
            upper bound.
        shared_bound: kernels whose occupancy shared memory limits.
        warps: of a program, assumed if a build does not say.
        assumed: kernels for whose occupancy it was assumed.
    """

    policy: str
    target: str
    category: str
    correct: int
    answers: int | None = None
    portable: int | None = None
    kernels: int | None = None
    built: int | None = None
    told: int | None = None
    registers_median: float | None = None
    registers_max: int | None = None
    spilling: int | None = None
    pressed: int | None = None
    shared_median: float | None = None
    shared_max: int | None = None
    shared_limit: int | None = None
    over_limit: int | None = None
    device: str | None = None
    occupancy_median: float | None = None
    occupancy_min: float | None = None
    occupancy_bound: float | None = None
    shared_bound: int | None = None
    warps: int = WARPS
    assumed: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return dataclasses.asdict(self)


def portability(study: Study, targets: Sequence[str] = TARGETS, warps: int = WARPS) -> list[Portable]:
    """Summarise builds by policy, target and category.

    Args:
        study: the answers; wrong and masked ones are left out.
        targets: get a row even if nothing was compiled for them.
        warps: of a program, assumed if a build does not say.

    Returns:
        A row for all categories together (category empty), then a row for each, for each policy and target.

    Raises:
        UsageError: no such number of warps.
    """
    if warps not in (1, 2, 4, 8, 16, 32):
        raise UsageError(f"warps is {warps}; a power of two, at most 32")
    found = []
    for p in study.policies:
        rows = [
            (r.category, [b for raw in r.raw.get("compile") or () if (b := _build(raw)) is not None])
            for r in p.rows if r.correct and not r.masked
        ]  # fmt: skip
        others = sorted({b.target for _, builds in rows for b in builds} - set(targets))
        for target in (*targets, *others):
            for category in ("", *study.categories):
                chosen = [builds for c, builds in rows if category in ("", c)]
                found.append(_counted(Portable(p.name, target, category, len(chosen), warps=warps), chosen))
    return found


def device_of(target: str) -> cost.Device | None:
    """Return the GPU of `kbx_env.backends.cost` with the target's capability; GPUs of one capability have the same SM."""
    return _devices().get(target)


@functools.cache
def _devices() -> dict[str, cost.Device]:
    known = map(cost.load, sorted(cost.names()))
    return {f"sm_{d.capability}": d for d in known}


def occupancy(build: Build, warps: int = WARPS) -> tuple[float, str] | None:
    """Return the share of an SM's warps that a kernel's resources allow.

    Args:
        build: for an NVIDIA target; the cost model knows no other devices.
        warps: of a program, if the build does not say.

    Returns:
        The share and the resource that limits it; ``None`` if not known.
    """
    device = device_of(build.target)
    if device is None or build.registers is None or build.shared is None:
        return None
    try:
        found = cost.occupancy(build.registers, build.shared, build.warps or warps, device)
    except UsageError:
        return 0.0, "does not fit"
    return found.share, found.limited_by


def _bound(build: Build) -> float | None:
    """Return the share of warps that registers alone allow, in whole programs, or in warps for a build without them."""
    device = device_of(build.target)
    if device is None or build.registers is None:
        return None
    # Registers go to a warp in units of 256, out of a quarter of the SM.
    per_warp = -(-max(build.registers, 1) * 32 // 256) * 256
    most = min(device.registers // 4 // per_warp * 4, device.warps)
    return most // (build.warps or 1) * (build.warps or 1) / device.warps


def _pressed(build: Build, warps: int) -> bool | None:
    """Return whether a kernel lacks registers, as `kbx_env.baselines.search.rank` decides for one target."""
    device = device_of(build.target)
    if device is None or build.spills is None or build.registers is None:
        return None
    return build.spills > 0 and build.registers >= min(255, device.registers // (32 * (build.warps or warps))) - 8


def _build(raw: Any) -> Build | None:
    try:
        build = Build(**raw)
    except TypeError:
        return None  # of another version: not known
    numbers = (build.registers, build.spills, build.shared, build.shared_limit, build.warps)
    sound = all(v is None or (type(v) is int and v >= 0) for v in numbers) and isinstance(build.target, str)
    sound = sound and (build.warps is None or 1 <= build.warps <= 32)
    return build if sound else None


def _counted(empty: Portable, answers: Iterable[Sequence[Build]]) -> Portable:
    compiled = [m for builds in answers if (m := [b for b in builds if b.target == empty.target])]
    kernels = [b for m in compiled for b in m]
    if not kernels:
        return empty
    registers, shared = _known(b.registers for b in kernels), _known(b.shared for b in kernels)
    spills, limits = _known(b.spills for b in kernels), _known(b.shared_limit for b in kernels)
    over = [b.shared > b.shared_limit for b in kernels if b.shared is not None and b.shared_limit is not None]
    occupancies = [(b, s) for b in kernels if (s := occupancy(b, empty.warps)) is not None]
    shares = [s for _, s in occupancies]
    bounds = [most for b in kernels if (most := _bound(b)) is not None]
    device = device_of(empty.target)
    pressed = [b for b in (_pressed(k, empty.warps) for k in kernels) if b is not None]
    return dataclasses.replace(
        empty,
        answers=len(compiled), portable=sum(all(b.ok for b in m) for m in compiled),
        kernels=len(kernels), built=sum(b.ok for b in kernels), told=len(registers),
        registers_median=statistics.median(registers) if registers else None, registers_max=max(registers, default=None),
        spilling=sum(s > 0 for s in spills) if spills else None, pressed=sum(pressed) if pressed else None,
        shared_median=statistics.median(shared) if shared else None, shared_max=max(shared, default=None),
        shared_limit=min(limits, default=None), over_limit=sum(over) if over else None,
        device=device.name if device and shares else None,
        occupancy_median=statistics.median(s for s, _ in shares) if shares else None,
        occupancy_min=min((s for s, _ in shares), default=None),
        occupancy_bound=statistics.median(bounds) if bounds else None,
        shared_bound=sum(by == "shared memory" for _, by in shares) if shares else None,
        assumed=sum(b.warps is None for b, _ in occupancies) if occupancies else None,
    )  # fmt: skip


def _known(values: Iterable[int | None]) -> list[int]:
    return [v for v in values if v is not None]
