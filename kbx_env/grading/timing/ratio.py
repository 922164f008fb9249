"""The ratio of two contestants' times, its interval, and whether it can be trusted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.special import stdtrit

PROCESS_US = 0.11
"""Standard deviation in microseconds between two fresh processes that time the same kernel. It is the same for kernels
of 4, 12 and 36 us. Moving the buffers, warm code, or several calls between two readings do not reduce it: it depends on
what the driver allots to a process. Measured on an H200 (docs/measurements)."""
LEVELLED_US = 0.07
"""The same once both processes' times are ``levelled``."""
LEVEL_BELOW_US = 100.0
"""Calls that take longer need not be levelled: 0.1 us is a thousandth of them."""
MAX_LAUNCH_GAP_US, MAX_LAUNCH_SHARE = 0.3, 0.1
"""Most microseconds by which the launches of two processes differ, and the share of the shortest call; more is not levelled."""
MAX_SKEW = 1.25
"""Largest factor between eager's median call and the mean of its blocks."""


@dataclass(frozen=True)
class Paired:
    """The result of timing a candidate against eager."""

    eager_us: float
    """Median microseconds of a call of eager."""
    candidate_us: float
    """Median microseconds of a call of the candidate."""
    log_ratio: float
    """log(eager / candidate): positive when the candidate is faster."""
    low: float
    """Lower end of the 95 % interval of ``log_ratio``."""
    high: float
    """Upper end of that interval."""
    pairs: int
    """Pairs of blocks that were measured."""
    eager_mean_us: float | None = None
    """Geometric mean over eager's blocks: its calls enter the ratio by this mean."""

    @property
    def skewed(self) -> bool:
        """Whether few of eager's calls decide the ratio, because the host delayed them."""
        mean = self.eager_mean_us or self.eager_us
        return max(mean, self.eager_us) > MAX_SKEW * min(mean, self.eager_us)

    @property
    def candidate_mean_us(self) -> float:
        """Geometric mean over the candidate's blocks, at most its median call: what its own calls say, whatever held up eager."""
        return min(self.candidate_us, (self.eager_mean_us or self.eager_us) * math.exp(-self.log_ratio))

    def by_medians(self) -> Paired:
        """Return a skewed result with a ratio of at most that of the median calls, and the uncertainty of its
        rounds.
        """
        ratio = min(self.log_ratio, math.log(self.eager_us / self.candidate_us))
        return replace(self, log_ratio=ratio, low=ratio - (self.log_ratio - self.low), high=max(self.high, ratio))


def levelled(eager_us: float | None, candidate_us: float | None, shortest_us: float) -> tuple[float, float]:
    """Return what is to be taken from the times of both, so that neither gains by how fast its process launches kernels.

    An empty kernel takes longer in one process than in another, and every call of that process takes longer by as much.

    Args:
        eager_us: microseconds of an empty kernel in eager's process; ``None`` if not known.
        candidate_us: the same in the candidate's process.
        shortest_us: microseconds of the shortest call.

    Returns:
        Microseconds for eager and for the candidate: half of the difference each, with opposite signs.
    """
    if eager_us is None or candidate_us is None:
        return 0.0, 0.0
    most = min(MAX_LAUNCH_GAP_US, MAX_LAUNCH_SHARE * shortest_us)
    gap = max(-most, min(most, eager_us - candidate_us))
    return gap / 2, -gap / 2


def interval(rounds: Sequence[float], us: float, process_us: float = PROCESS_US) -> tuple[float, float, float]:
    """Return the mean of the rounds' log-ratios and its 95 % interval.

    The half-width is Student's t over the rounds and, in quadrature, ``process_us``: noise that no repetition in the
    same two processes averages out.

    Args:
        rounds: log-ratio of each round.
        us: microseconds of a call; ``math.inf`` to leave out the noise between processes.
        process_us: standard deviation between two processes in microseconds.

    Returns:
        Mean, lower end and upper end, in log units.
    """
    x = np.asarray(rounds)
    spread = float(x.std(ddof=1)) / math.sqrt(len(x)) if len(x) > 1 else math.inf
    half = math.hypot(float(stdtrit(max(1, len(x) - 1), 0.975)) * spread, 1.96 * process_us / us)
    return float(x.mean()), float(x.mean()) - half, float(x.mean()) + half


def trimmed_mean(values: Sequence[float]) -> float:
    """Return the mean without the lowest and the highest: as robust as a median, but not a multiple of the clock's
    ticks.
    """
    kept = sorted(values)[1:-1] if len(values) > 2 else values
    return sum(kept) / len(kept)
