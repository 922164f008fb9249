"""The ratio of two sides' times, its interval, and whether it can be trusted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.special import stdtrit

PROCESS_US = 0.11
"""Standard deviation between two fresh processes that time the same kernel. It is the same at 4, 12 and 36 us, and
neither moving the buffers, nor warm code, nor several calls between two readings makes it smaller: what the driver
allots to a process is not ours to move. Measured on an H200 (docs/measurements)."""
TORN = 1.25
"""By this factor eager's middle call and the mean of its blocks may differ."""


@dataclass(frozen=True)
class Paired:
    """The result of timing two sides against each other."""

    a_us: float
    b_us: float
    log_ratio: float
    low: float
    high: float
    pairs: int
    a_mean_us: float | None = None
    """Geometric mean over the baseline's blocks: what its calls count for in the ratio."""

    @property
    def torn(self) -> bool:
        """Whether few calls of the baseline, which is ours, decide the ratio: the host held them up."""
        mean = self.a_mean_us or self.a_us
        return max(mean, self.a_us) > TORN * min(mean, self.a_us)

    def by_most_calls(self) -> Paired:
        """No more than the ratio of the middle calls, as uncertain as the rounds are: what a torn one is worth."""
        ratio = min(self.log_ratio, math.log(self.a_us / self.b_us))
        return replace(self, log_ratio=ratio, low=ratio - (self.log_ratio - self.low), high=max(self.high, ratio))


def interval(rounds: Sequence[float], us: float) -> tuple[float, float, float]:
    """Mean of the rounds' log-ratios and its 95 % interval, for calls of ``us`` microseconds.

    Student's t over the rounds, and in quadrature what no repetition in the same two processes averages out.
    """
    x = np.asarray(rounds)
    spread = float(x.std(ddof=1)) / math.sqrt(len(x)) if len(x) > 1 else math.inf
    half = math.hypot(float(stdtrit(max(1, len(x) - 1), 0.975)) * spread, 1.96 * PROCESS_US / us)
    return float(x.mean()), float(x.mean()) - half, float(x.mean()) + half


def middle(values: Sequence[float]) -> float:
    """Mean without the lowest and the highest: robust as a median, but not bound to the ticks of the clock."""
    kept = sorted(values)[1:-1] if len(values) > 2 else values
    return sum(kept) / len(kept)
