"""Speedup over torch eager on the same device at the same time: interleaved, paired, verified.

Candidate (in its runner) and eager (in the grader) are timed alternately in short blocks of calls. Each call follows a
flush of the L2 cache and uses rotating buffers and values that no call has seen. A round is a few such pairs of blocks
with the buffers at one address; between rounds both contestants move their buffers. The rounds' mean log-ratios are
independent, so Student's interval over them includes the effect of memory placement. The timed calls are checked calls:
of every block the result of a secretly chosen call may be judged, as it was at its end event.
"""

from __future__ import annotations

import math
import random
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kbx_env.grading.timing.contestants import BLOCK, SLOTS, Contestant
from kbx_env.grading.timing.input_windows import InputWindows, Window
from kbx_env.grading.timing.precision import CLEAR_LOG_RATIO, REPORT, Precision
from kbx_env.grading.timing.ratio import (
    LEVEL_BELOW_US,
    LEVELLED_US,
    PROCESS_US,
    Paired,
    interval,
    levelled,
    trimmed_mean,
)

SLOW_US = 10_000.0
"""A block of calls that would take longer than this, in microseconds, has fewer calls, at least one. The two contestants' blocks
differ in length where their times do: one call of a slow baseline says enough, one call of a kernel a thousand times as
fast does not. With 3 ms the GPU would be held for 5 % less, and twice as many cases of 0.8 to 3 ms a call would be off by more than
3 % in training precision."""
LONG_US = 100.0
"""If two calls take longer than this together, a round is one pair of blocks: such calls differ little from block to
block."""
Check = Callable[[list[int], list[Window]], None]
"""May inspect the results of the block just measured; gets the slots and the windows of its calls, in order."""


def pair(
    eager: Contestant,
    candidate: Contestant,
    *,
    windows: InputWindows | None = None,
    check: Check | None = None,
    precision: Precision = REPORT,
    budget: float | None = None,
    about_us: float = 0.0,
    slots: int = SLOTS,
    on_round: Any = None,
) -> Paired:
    """Time two prepared contestants alternately.

    Args:
        eager: the baseline.
        candidate: the contestant that is compared with it.
        windows: source of the values of every call; without it the values stay the same.
        check: called after every measurement of the candidate; its seconds do not count for ``budget``.
        precision: how narrow the interval shall be.
        budget: seconds of measuring after which no round begins; by default those of ``precision``.
        about_us: lower bound in microseconds on a call of both together, if known before the first call.
        slots: sets of buffers that both contestants have.
        on_round: called with the number of rounds so far.

    Returns:
        Times in microseconds, levelled if they are short, and log(eager / candidate) with its 95 % interval: positive when the
        candidate is faster.
    """
    limit = precision.budget if budget is None else budget
    rounds: list[float] = []
    eager_calls: list[float] = []
    candidate_calls: list[float] = []
    eager_blocks: list[float] = []
    start = time.monotonic()
    rng = random.Random(secrets.randbits(64))
    drawn: list[Window] | None = None
    pairs, taken, both_us = 1 if about_us > LONG_US else precision.pairs, 0, 0.0
    shifts: tuple[float, float] | None = None
    process_us = PROCESS_US
    eager_block = candidate_block = _calls(about_us)
    while len(rounds) < precision.max_rounds:
        moved = not rounds or both_us <= precision.still_us
        # In a block of one call the untimed call before it warms the slot.
        for contestant, block in ((eager, eager_block), (candidate, candidate_block)) if moved else ():
            contestant.shuffle(rng.getrandbits(32), block > 1)
        ratios = []
        for index in range(pairs):
            order = [rng.randrange(slots) for _ in range(max(eager_block, candidate_block))]
            if windows is not None:
                drawn = [windows.pick(rng) for _ in range(len(order) + 1)]
            # The contestants alternate in going first, so that a drift of the clock frequency favours neither.
            eager_first = index % 2 == 0
            eager_us = _measure_block(eager, eager_block, order, drawn, moved) if eager_first else []
            candidate_us = _measure_block(candidate, candidate_block, order, drawn, moved)
            start += _checked(check, order[:candidate_block], drawn)
            eager_us = eager_us or _measure_block(eager, eager_block, order, drawn, moved)
            taken += 1
            if shifts is None:
                shifts, process_us = _level(eager, candidate, min(*eager_us, *candidate_us))
            eager_us, candidate_us = [u - shifts[0] for u in eager_us], [u - shifts[1] for u in candidate_us]
            eager_calls += eager_us
            candidate_calls += candidate_us
            both_us = max(eager_us) + max(candidate_us)
            # One long call says as much as five short ones, and other gradings wait for the GPU.
            eager_block, candidate_block = _calls(max(eager_us)), _calls(max(candidate_us))
            eager_blocks.append(math.log(trimmed_mean(eager_us)))
            ratios.append(math.log(trimmed_mean(eager_us) / trimmed_mean(candidate_us)))
        rounds.append(trimmed_mean(ratios))
        pairs = 1 if both_us > LONG_US else precision.pairs
        if on_round:
            on_round(len(rounds))
        if _clear(rounds, min(*eager_calls, *candidate_calls), process_us, precision):
            break
        if len(rounds) >= precision.min_rounds:
            # Repetition does not average out the noise between processes, so an interval narrower than half of it is
            # pointless.
            fastest = min(float(np.median(eager_calls)), float(np.median(candidate_calls)))
            enough = max(precision.half_width, 0.5 * 1.96 * process_us / fastest)
            if _half_width(rounds) < enough or time.monotonic() - start > limit:
                break
    eager_median, candidate_median = float(np.median(eager_calls)), float(np.median(candidate_calls))
    ratio, low, high = interval(rounds, min(eager_median, candidate_median), process_us)
    eager_mean = math.exp(sum(eager_blocks) / len(eager_blocks))
    return Paired(eager_median, candidate_median, ratio, low, high, taken, eager_mean)


def _level(eager: Contestant, candidate: Contestant, us: float) -> tuple[tuple[float, float], float]:
    """Measure how fast both processes launch, if their calls are short.

    Args:
        eager: the baseline.
        candidate: is compared with it.
        us: microseconds of the shortest call so far.

    Returns:
        What is to be taken from eager's and from the candidate's times, and the standard deviation that is left between two
        processes, in microseconds.
    """
    if us > LEVEL_BELOW_US:
        return (0.0, 0.0), PROCESS_US
    launches = eager.launch_us(), candidate.launch_us()
    return levelled(*launches, us), PROCESS_US if None in launches else LEVELLED_US


def _half_width(rounds: Sequence[float]) -> float:
    """Return the half-width of the interval of the rounds' log-ratios, without the noise between processes."""
    _, low, high = interval(rounds, math.inf)
    return (high - low) / 2


def _clear(rounds: Sequence[float], fastest_us: float, process_us: float, precision: Precision) -> bool:
    """Return whether ``early_rounds`` are enough, because the rounds agree or the ratio is far from 1.

    Args:
        rounds: log-ratio of each round.
        fastest_us: the fastest call in microseconds.
        process_us: standard deviation between two processes in microseconds.
        precision: how narrow the interval shall be.
    """
    if len(rounds) < precision.early_rounds:
        return False
    centre, least, most = interval(rounds, fastest_us, process_us)
    if most < -CLEAR_LOG_RATIO or least > CLEAR_LOG_RATIO:
        return _half_width(rounds) < max(precision.clear_half_width, precision.clear_relative_width * abs(centre))
    return _half_width(rounds) < precision.early_half_width


def _calls(us: float) -> int:
    """Return the calls in a block if one call takes so many microseconds."""
    return max(1, min(BLOCK, int(SLOW_US / max(us, 1.0))))


def _measure_block(
    contestant: Contestant, calls: int, order: Sequence[int], drawn: Sequence[Window] | None, moved: bool
) -> list[float]:  # fmt: skip
    """Time the first calls of a block.

    Args:
        contestant: is timed.
        calls: how many.
        order: slots of the block's calls.
        drawn: windows of the untimed call and then of each call in ``order``.
        moved: whether the buffers have moved since the block before.

    Returns:
        Microseconds of each call.
    """
    # Cold instruction caches cost a slow call nothing that shows: it needs no untimed call before it.
    warm = moved or calls == BLOCK
    return contestant.measure(order[:calls], None if drawn is None else drawn[: calls + 1], warm=warm)


def _checked(check: Check | None, order: list[int], drawn: list[Window] | None) -> float:
    """Run a check and return its seconds.

    Args:
        check: the check; ``None`` for none.
        order: slots of the block's calls.
        drawn: windows of the untimed call and then of each call in ``order``.

    Returns:
        Seconds.
    """
    if check is None:
        return 0.0
    began = time.monotonic()
    check(order, (drawn or [{}] * (len(order) + 1))[1:])
    return time.monotonic() - began
