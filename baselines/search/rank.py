"""Orders outcomes of one task, best first, and says why.

Correct outcomes come first, then wrong ones, then masked ones. Among correct ones a GPU's measured time decides. On the CPU
tier nothing is measured; there the order is, each step deciding where those before it tie:

1. every build fits the target (shared memory, registers): what does not fit does not run;
2. less estimated time on the timed sizes, where the run estimates it (``report.py --estimate h200``);
3. no kernel spills at its cap of registers: the bytes that spills move are missing from the meters below;
4. fewer 32-byte sectors, then fewer bytes moved (both within ``TRAFFIC``), then fewer launches;
5. fewer spilled bytes of any kind;
6. a larger share of the SM's warps, up to ``ENOUGH``: beyond half of it, more warps seldom hide more latency. Matrix products
   hide it by their pipelines instead, and live on large tiles, which few programs fit beside: two warps for each scheduler
   are enough there (``ENOUGH_PRODUCTS``).

The share is CUDA's occupancy rule as ``backends/cost`` has it for an H200 (sm_90): an SM has 65536 registers, given to a warp in
units of 256, 228 KiB of shared memory (1 KiB more is taken per program), 64 warps, 32 programs. A ``Build`` of before says not how
many warps a program has; then shared memory cannot limit it and the share is an upper bound.
Without estimates this is an order by cause, metered on the small sizes that decide about right and wrong; a missing
number ranks after every known one and is never 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kbx_env.backends import cost
from kbx_env.errors import UsageError
from kbx_env.outcome import Build, Fault, Outcome

TRAFFIC = 0.02
"""Traffic within this share of the least counts as equal."""
ENOUGH, ENOUGH_PRODUCTS = 0.5, 0.125
TARGET, DEVICE = "sm_90", "h200"
_UNKNOWN = (1, 0.0)


@dataclass(frozen=True)
class Ranked:
    """One outcome in its place. ``index`` is its place in what was given; ``key`` orders, smaller is better."""

    index: int
    outcome: Outcome
    key: tuple[tuple[int, float], ...]
    why: str


@dataclass(frozen=True)
class Pressure:
    """What the builds of a source say, over its kernels: the worst of each.

    ``fits`` is false when a build failed; ``capped`` when a kernel spills at its cap of registers; ``spills`` in bytes per
    thread; ``share`` of the warps of an SM with ``limit`` naming what limits it. ``None``: not known.
    """

    fits: bool | None
    capped: bool | None
    spills: int | None
    share: float | None
    limit: str = ""


def pressure(builds: Sequence[Build]) -> Pressure:
    """Sums up the builds for ``TARGET``, of any targets."""
    mine = [b for b in builds if b.target == TARGET]
    if not mine:
        return Pressure(None, None, None, None)
    if not all(b.ok for b in mine):
        return Pressure(False, None, None, None, next(b.error or "" for b in mine if not b.ok))
    spills = None if any(b.spills is None for b in mine) else max(b.spills or 0 for b in mine)
    caps = [_capped(b) for b in mine]
    shares = [occupancy(b) for b in mine]
    known = [s for s in shares if s is not None]
    share, limit = min(known) if len(known) == len(shares) else (None, "")
    return Pressure(True, None if None in caps else any(caps), spills, share, limit)


def _capped(build: Build) -> bool | None:
    """Local memory below the cap is a library function's table; at the cap it is registers that do not fit."""
    if build.spills is None or build.registers is None:
        return None
    cap = min(255, cost.load(DEVICE).registers // (32 * (build.warps or 4)))
    return build.spills > 0 and build.registers >= cap - 8


def occupancy(build: Build) -> tuple[float, str] | None:
    """Share of the warps of an SM that the kernel's resources allow, and what limits it; ``None`` where not known."""
    if build.registers is None or build.shared is None:
        return None
    warps = build.warps
    try:
        # One warp a program and no shared memory: what registers alone allow, whatever a program's warps are.
        one = cost.occupancy(build.registers, build.shared if warps else 0, warps or 1, cost.load(DEVICE))
    except UsageError:
        return 0.0, "does not fit"
    if warps:
        return one.share, one.limited_by
    # Thirty-two programs of one warp are no limit of the kernel's own.
    per_warp = math.ceil(build.registers * 32 / 256) * 256
    device = cost.load(DEVICE)
    return min(1.0, device.registers // 4 // max(per_warp, 1) * 4 / device.warps), "registers; warps not known"


def rank(outcomes: Sequence[Outcome]) -> list[Ranked]:
    """The outcomes of one task on one backend, best first; equal ones in the order given.

    Raises:
        UsageError: outcomes of several tasks, or of both backends, which do not compare.
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
    """Whether the outcome says nothing about the source: an infrastructure fault, or a grading without all defences."""
    return outcome.fault is Fault.INFRA or bool(outcome.manifest.get("without"))


def _bad(o: Outcome) -> tuple[tuple[tuple[int, float], ...], str]:
    if masked(o):
        return ((3, 0.0),), f"masked: {o.message or 'graded without some defences'}"[:200]
    share = o.cases.passed / o.cases.total if o.cases and o.cases.total else None
    return ((2, 0.0), _least(None if share is None else -share)), f"{o.verdict}: {o.message}"[:200]


def _timed(o: Outcome) -> tuple[tuple[tuple[int, float], ...], str]:
    t = o.timing
    if t is None:
        return ((0, 0.0), (2, 0.0)), "correct; not timed"
    if any(c.void for c in t.cases):
        return ((0, 0.0), _UNKNOWN), "correct; a time that nobody believes (void)"
    # The lower end of the interval: a noisy measurement must not win by its noise.
    return ((0, 0.0), (0, -t.low), (0, -t.speedup)), f"correct; {t.speedup:.3f} times eager, at least {t.low:.3f}"


def _metered(
    o: Outcome, p: Pressure, sectors: int | None, moved: int | None
) -> tuple[tuple[tuple[int, float], ...], str]:
    e = o.evidence
    mine = (e.sector_bytes, e.moved_bytes, e.launches) if e is not None else (None, None, None)
    unfit = p.fits is False
    share = None if p.share is None else min(p.share, ENOUGH_PRODUCTS if e is not None and e.dots else ENOUGH)
    key = (
        (1 if unfit else 0, 0.0), _least(o.estimate.estimated_us if o.estimate else None),
        _least(None if p.capped is None else float(p.capped)),
        _least(_step(mine[0], sectors)), _least(_step(mine[1], moved)),
        _least(mine[2]), _least(p.spills), _least(None if share is None else -share),
    )  # fmt: skip
    if unfit:
        return key, f"correct on the CPU tier, but does not run on {TARGET}: {p.limit}"[:300]
    estimated = [f"estimated {o.estimate.estimated_us:.1f} us on {o.estimate.device}"] if o.estimate else []
    words = [
        "correct", *estimated, _traffic(mine[0], sectors, "in sectors"), _traffic(mine[1], moved, "moved"),
        "launches not known" if mine[2] is None else f"{mine[2]} launches",
        "spills not known" if p.spills is None else "no spills" if not p.spills else f"{p.spills} bytes spilled per thread"
        + (" at the cap of registers" if p.capped else ""),
        "occupancy not known" if p.share is None else f"occupancy {p.share:.2f} ({p.limit})",
    ]  # fmt: skip
    return key, "; ".join(words)


def _least(value: float | None) -> tuple[int, float]:
    return _UNKNOWN if value is None else (0, float(value))


def _step(value: int | None, least: int | None) -> float | None:
    """How many steps of ``TRAFFIC`` above the least: steps keep the order transitive."""
    if value is None or least is None:
        return None
    return float(math.floor(math.log(max(value, 1) / max(least, 1)) / math.log1p(TRAFFIC) + 1e-9))


def _traffic(value: int | None, least: int | None, what: str) -> str:
    if value is None or least is None:
        return f"bytes {what} not known"
    return f"{value / 1e6:.3f} MB {what} ({value / max(least, 1):.2f} times the least)"
