"""Orders outcomes of one task, best first, with the reason for each rank.

Correct outcomes come first, then wrong ones, then masked ones. On CUDA the measured time orders correct outcomes. The
CPU backend measures no time; there the following criteria apply, each one where all earlier ones are equal:

1. every build fits the target (shared memory, registers); a kernel that does not fit cannot run;
2. less estimated time on the timed sizes, if the run estimates it (``report.py --estimate h200``);
3. no kernel spills at its limit of registers, because the following numbers of bytes do not contain spills;
4. fewer 32-byte sectors, then fewer bytes moved (both in steps of ``TRAFFIC``), then fewer launches;
5. fewer spilled bytes of any kind;
6. a larger occupancy, up to ``ENOUGH``: beyond half of an SM's warps, more warps seldom hide more latency. Matrix
   products hide latency by pipelining and need large tiles, next to which few programs fit; there two warps for each of
   an SM's four schedulers are enough (``ENOUGH_PRODUCTS``).

Occupancy follows CUDA's rule, as ``backends/cost`` implements it for an H200 (sm_90): an SM has 65536 registers,
allocated to a warp in units of 256, 228 KiB of shared memory (of which each program takes 1 KiB more than it uses), 64
warps and 32 programs. An old ``Build`` does not know the warps of a program; then shared memory is ignored, and the
occupancy is an upper bound. The traffic is counted on the small sizes of the correctness cases. An unknown number ranks
after every known one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kbx_env.backends import cost
from kbx_env.errors import UsageError
from kbx_env.outcome import Build, Fault, Outcome

TRAFFIC = 0.02
"""Step of traffic, as a share of the least: traffic within one step counts as equal."""
ENOUGH, ENOUGH_PRODUCTS = 0.5, 0.125
"""Occupancy beyond which more does not count; 0.125 is 8 of 64 warps, two for each of four schedulers."""
TARGET, DEVICE = "sm_90", "h200"
_Key = tuple[tuple[int, float], ...]
"""Orders outcomes, smaller is better. Of each pair the first number is 1 where the second is unknown."""
_UNKNOWN = (1, 0.0)


@dataclass(frozen=True)
class Ranked:
    """An outcome with its rank.

    Attributes:
        index: its position in the argument of ``rank``.
        outcome: the outcome.
        key: orders outcomes, smaller is better.
        why: the reason, as text.
    """

    index: int
    outcome: Outcome
    key: _Key
    why: str


@dataclass(frozen=True)
class Pressure:
    """Use of resources by a source: the worst of its kernels. ``None`` for unknown facts.

    Attributes:
        fits: false if a build failed.
        capped: whether a kernel spills at its limit of registers.
        spills: most bytes that a kernel spills per thread.
        share: least occupancy of a kernel, from 0 to 1.
        limit: the resource that limits the occupancy, or the error of the build that failed.
    """

    fits: bool | None
    capped: bool | None
    spills: int | None
    share: float | None
    limit: str = ""


def pressure(builds: Sequence[Build]) -> Pressure:
    """Summarise the builds of a source.

    Args:
        builds: of all kernels, for any targets; only those for ``TARGET`` count.

    Returns:
        The worst use of each resource.
    """
    relevant = [b for b in builds if b.target == TARGET]
    if not relevant:
        return Pressure(None, None, None, None)
    if not all(b.ok for b in relevant):
        return Pressure(False, None, None, None, next(b.error or "" for b in relevant if not b.ok))
    spills = None if any(b.spills is None for b in relevant) else max(b.spills or 0 for b in relevant)
    caps = [_capped(b) for b in relevant]
    shares = [occupancy(b) for b in relevant]
    known = [s for s in shares if s is not None]
    share, limit = min(known) if len(known) == len(shares) else (None, "")
    return Pressure(True, None if None in caps else any(caps), spills, share, limit)


def _capped(build: Build) -> bool | None:
    """Return whether a kernel spills registers; ``None`` if unknown.

    Below the limit of registers, local memory is a table of a library function and no spill.
    """
    if build.spills is None or build.registers is None:
        return None
    cap = min(255, cost.load(DEVICE).registers // (32 * (build.warps or 4)))
    return build.spills > 0 and build.registers >= cap - 8


def occupancy(build: Build) -> tuple[float, str] | None:
    """Compute the occupancy of a kernel.

    Args:
        build: the kernel's resources.

    Returns:
        The share of an SM's warps that can be resident, from 0 to 1, and the resource that limits it; ``None`` if
        registers or shared memory are unknown.
    """
    if build.registers is None or build.shared is None:
        return None
    warps = build.warps
    try:
        # If the warps are unknown: one warp a program and no shared memory, so that only registers limit.
        one = cost.occupancy(build.registers, build.shared if warps else 0, warps or 1, cost.load(DEVICE))
    except UsageError:
        return 0.0, "does not fit"
    if warps:
        return one.share, one.limited_by
    # The limit of 32 programs would wrongly limit programs that are assumed to have one warp; count registers only.
    per_warp = math.ceil(build.registers * 32 / 256) * 256
    device = cost.load(DEVICE)
    return min(1.0, device.registers // 4 // max(per_warp, 1) * 4 / device.warps), "registers; warps not known"


def rank(outcomes: Sequence[Outcome]) -> list[Ranked]:
    """Order outcomes of one task on one backend.

    Args:
        outcomes: the outcomes.

    Returns:
        The outcomes, best first; equal ones keep their order.

    Raises:
        UsageError: the outcomes are of several tasks or of both backends, which cannot be compared.
    """
    kinds = {(o.task, o.backend) for o in outcomes}
    if len(kinds) > 1:
        raise UsageError(f"outcomes of one task on one backend compare, got {sorted(kinds)}")
    good = [o.evidence for o in outcomes if o.correct and o.evidence is not None]
    sectors = min((e.sector_bytes for e in good if e.sector_bytes is not None), default=None)
    moved = min((e.moved_bytes for e in good if e.moved_bytes is not None), default=None)
    rows = []
    for index, outcome in enumerate(outcomes):
        if not outcome.correct or masked(outcome):
            key, why = _bad(outcome)
        elif outcome.backend == "cuda":
            key, why = _timed(outcome)
        else:
            key, why = _metered(outcome, pressure(outcome.compile), sectors, moved)
        rows.append(Ranked(index, outcome, key, why))
    return sorted(rows, key=lambda r: r.key)


def masked(outcome: Outcome) -> bool:
    """Return whether an outcome says nothing about the source: an infrastructure fault, or a defence was left out."""
    return outcome.fault is Fault.INFRA or bool(outcome.manifest.get("without"))


def _bad(o: Outcome) -> tuple[_Key, str]:
    if masked(o):
        return ((3, 0.0),), f"masked: {o.message or 'graded without some defences'}"[:200]
    share = o.cases.passed / o.cases.total if o.cases and o.cases.total else None
    return ((2, 0.0), _least(None if share is None else -share)), f"{o.verdict}: {o.message}"[:200]


def _timed(o: Outcome) -> tuple[_Key, str]:
    t = o.timing
    if t is None:
        return ((0, 0.0), (2, 0.0)), "correct; not timed"
    if any(c.void for c in t.cases):
        return ((0, 0.0), _UNKNOWN), "correct; a time faster than physically possible (void)"
    # The lower end of the interval, so that a noisy measurement gains nothing.
    return ((0, 0.0), (0, -t.low), (0, -t.speedup)), f"correct; {t.speedup:.3f} times eager, at least {t.low:.3f}"


def _metered(o: Outcome, p: Pressure, sectors: int | None, moved: int | None) -> tuple[_Key, str]:
    e = o.evidence
    own_sectors, own_moved, launches = (e.sector_bytes, e.moved_bytes, e.launches) if e else (None, None, None)
    unfit = p.fits is False
    share = None if p.share is None else min(p.share, ENOUGH_PRODUCTS if e is not None and e.dots else ENOUGH)
    key = (
        (1 if unfit else 0, 0.0), _least(o.estimate.estimated_us if o.estimate else None),
        _least(None if p.capped is None else float(p.capped)),
        _least(_step(own_sectors, sectors)), _least(_step(own_moved, moved)),
        _least(launches), _least(p.spills), _least(None if share is None else -share),
    )  # fmt: skip
    if unfit:
        return key, f"correct on the CPU tier, but does not run on {TARGET}: {p.limit}"[:300]
    estimated = [f"estimated {o.estimate.estimated_us:.1f} us on {o.estimate.device}"] if o.estimate else []
    words = [
        "correct", *estimated, _traffic(own_sectors, sectors, "in sectors"), _traffic(own_moved, moved, "moved"),
        "launches not known" if launches is None else f"{launches} launches",
        "spills not known" if p.spills is None else "no spills" if not p.spills else f"{p.spills} bytes spilled per thread"
        + (" at the cap of registers" if p.capped else ""),
        "occupancy not known" if p.share is None else f"occupancy {p.share:.2f} ({p.limit})",
    ]  # fmt: skip
    return key, "; ".join(words)


def _least(value: float | None) -> tuple[int, float]:
    """Return the pair of a key for a number of which less is better."""
    return _UNKNOWN if value is None else (0, float(value))


def _step(value: int | None, least: int | None) -> float | None:
    """Return the number of steps of ``TRAFFIC`` above the least. Without steps the order would not be transitive."""
    if value is None or least is None:
        return None
    return float(math.floor(math.log(max(value, 1) / max(least, 1)) / math.log1p(TRAFFIC) + 1e-9))


def _traffic(value: int | None, least: int | None, what: str) -> str:
    if value is None or least is None:
        return f"bytes {what} not known"
    return f"{value / 1e6:.3f} MB {what} ({value / max(least, 1):.2f} times the least)"
