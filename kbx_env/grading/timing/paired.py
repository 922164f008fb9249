"""Speedup over torch eager on the same device at the same time: interleaved, paired, verified.

Candidate (in its runner) and eager (in the grader) are timed alternately in short blocks of calls. Each call follows a
flush of the L2 cache and uses rotating buffers and values that no call has seen. A round is a few such pairs of blocks
with the buffers at one address; between rounds both contestants move their buffers. The rounds' mean log-ratios are
independent, so Student's interval over them includes the effect of memory placement. The timed calls are checked calls:
of every block the result of a secretly chosen call may be judged, as it was at its end event.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

from kbx_env.device.driver import KEPT_BYTES, KEPT_CACHE_BYTES, give_back, preallocate, preallocate_outside_pool
from kbx_env.device.stopwatch import (
    AMPLE_GRAPH_RESERVE_BYTES,
    FLUSH_BYTES,
    Stopwatch,
    pool_bytes,
)
from kbx_env.errors import SandboxError
from kbx_env.grading import compulsory_work, gpu_turns, inputs, reference
from kbx_env.grading.runtime.session import RunnerSession
from kbx_env.grading.runtime.untrusted import GradingAborted
from kbx_env.grading.sizes import timed
from kbx_env.grading.timing import gpu_lock, input_windows
from kbx_env.grading.timing import roofline as rooflines
from kbx_env.grading.timing.contestants import (
    BLOCK,
    JUDGED,
    SLOTS,
    Contestant,
    EagerContestant,
    Fetched,
    RunnerContestant,
    bytes_beside_slots,
    faster_on_host,
)
from kbx_env.grading.timing.input_windows import InputWindows, Window
from kbx_env.grading.timing.precision import BY_NAME, CLEAR_LOG_RATIO, REPORT, Precision
from kbx_env.grading.timing.ratio import (
    LEVEL_BELOW_US,
    LEVELLED_US,
    PROCESS_US,
    Paired,
    interval,
    levelled,
    trimmed_mean,
)
from kbx_env.grading.timing.roofline import Roofline
from kbx_env.grading.timing.telemetry import Reading, Telemetry, disturbance, strangers
from kbx_env.outcome import CaseTime, Timing, Verdict, Violation
from kbx_env.protocol.wire import assembled
from kbx_env.spec.criteria import Sample, Windows
from kbx_env.spec.task import Case, Task

__all__ = ["SLOTS", "Contestant", "EagerContestant", "Paired", "RunnerContestant", "interval", "pair", "time_task"]

MAX_KEPT_RESULTS, MAX_KEPT_BYTES = 24, 256 << 20
"""Results of timed calls that are kept for the judge, for each case: their number and bytes, but never fewer than
three."""
COUNT_MEMORY, MEASURE_MEMORY, JUDGE_MEMORY = 10, 24, 12
"""Device memory reserved for each step of timing a case, in multiples of the bytes of its inputs (judging a large case took
up to 35 on an H100, most of them less; work that needs more is repeated with more): evaluating the
reference to count its work; measuring (for each contestant two draws, three slots, and space to move them); judging.
Compiling keeps the inputs once and reserves no memory: a compiler may take minutes, and the next large reservation
would keep all others waiting behind it."""
LIKELY_JUDGE_MEMORY = 8.0
"""Of these, how much the driver is asked for at once before judging, where nothing is known of a smaller case."""
KNOWN_MEMORY = 1.15
"""Device memory reserved for judging a case, in multiples of what a smaller case of the task took for each byte of its inputs, if
that is less than ``JUDGE_MEMORY``: elementwise tasks take 6 to 8."""
MORE_MEMORY, MEMORY_SLACK = 4, 2.0
"""Work whose memory was not enough is repeated with so many times as much. Torch may allocate ``MEMORY_SLACK`` times what
is reserved: its allocator rounds up and keeps gaps, and graders use less than they reserve most of the time."""
MEMORY_ATTEMPTS, MEASURE_ATTEMPTS, MEMORY_PAUSE_SECONDS, MEMORY_WAIT_SECONDS = 4, 3, 1.0, 20.0
"""Attempts at work that has all the memory reserved that timing may reserve, and at measuring, and least and most seconds between
them, by when enough memory is free. In a pause others judge results that they hold; they cannot while all memory is reserved. With
14 workers on a GPU of 80 GB they may have to wait for seconds before they do."""
MEASURED_MEMORY = 13
"""Free device memory for which measuring waits after it had too little, in multiples of the bytes of the inputs: the largest
case of all tasks took 36 GiB for 2.9 GiB."""
LATE_FREE_BYTES = 40 << 30
"""Free device memory beside which a grading gives its own back only after it has left the GPU: more than the next one may need (see
``MEASURED_MEMORY``)."""
AMPLE = 1.25
"""Memory is ample for a case if so many times as much is free as both processes will ask for."""
FREE_SHARE = 0.8
"""Share of the free device memory for work that has all the memory reserved that timing may reserve. On a GPU of 80 GB
judging one GiB of inputs needs 22 GiB, almost twice that memory; the rest is for who measures."""
KEPT_MEMORY_SHARE, KEPT_MEMORY_MOST = 0.3, 0.03
"""Shares of the device's memory for results that were measured and not judged yet, and that nobody reserves: of all gradings
together, and of one at most. A grading whose further cases would need more judges what it has before it measures them."""
KEPT_POOL_SHARE = 0.25
"""Share of the device's memory for results of a case that need more than that. A grading reserves its part before it measures the
case, until the results are judged: on 80 GB those of six gradings with cases of 1 to 3 GiB took 30 GiB, and nobody could measure
another case of this size."""
CONTEXT_BYTES = 900 << 20
"""Device memory of each process for its CUDA context and the kernels that torch loads (0.8 to 1 GiB on an H100, with two
hardware queues). Graders and runners each have one; this memory cannot be reserved."""
SHARE = 0.5
"""Share of the device's memory for all gradings that count work or judge timed results. The grading that measures holds the GPU
alone and has the rest; for a case that needs more than that it reserves the difference. With 0.35, three gradings waited for memory
beside each that had it, on an H100 of 80 GB with 14 workers (docs/measurements)."""
FEW_SLOTS, FEW_SLOTS_BYTES = 2, 1 << 30
"""Sets of buffers of a case whose arguments and results have more than so many bytes."""
LIKELY_RESULTS, PREALLOCATED_BYTES, AMPLE_RESULTS_BYTES = 8, 256 << 20, 8 << 30
"""Results of a case that wait for the judge in training precision, and most bytes of them for which the driver is asked at once:
usually, and where there is ample memory."""
SLOW_US = 10_000.0
"""A block of calls that would take longer than this, in microseconds, has fewer calls, at least one. The two contestants' blocks
differ in length where their times do: one call of a slow baseline says enough, one call of a kernel a thousand times as
fast does not. With 3 ms the GPU would be held for 5 % less, and twice as many cases of 0.8 to 3 ms a call would be off by more than
3 % in training precision."""
QUEUED_MEMORY_SHARE = 0.003
"""Share of the device's memory that one grading may hold in values while it waits for the GPU."""
ATTEMPTS = 3
"""Measurements of a case that was disturbed or whose time is too good to be true; the last is kept, with a note."""
LONG_US = 100.0
"""If two calls take longer than this together, a round is one pair of blocks: such calls differ little from block to
block."""
JUDGE_SECONDS, JUDGE_MIN_RESULTS = 0.75, 3
"""Seconds after which no further result of a case's timed calls (and of its captured calls) is judged, once so many
are. The results are drawn at random after all calls were made: a call that is wrong now and then cannot know whether it
is checked."""


_Done = TypeVar("_Done")
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


def time_task(
    task: Task, session: RunnerSession, sizes: str = "published", precision: str = "report"
) -> Timing:  # fmt: skip
    """Time every timing case of a task that fits into the device's memory.

    Args:
        task: the task.
        session: with the loaded submission.
        sizes: which timing cases, one of ``kbx_env.options.SIZES``.
        precision: how precisely, one of ``kbx_env.options.PRECISIONS``.

    Returns:
        The speedup over eager and its interval, over all cases and for each.

    Raises:
        GradingAborted: a timed call was wrong or failed, or the claimed times cannot be true.
    """
    memory = torch.cuda.get_device_properties(0).total_memory
    cases = compulsory_work.fitting(task, memory, timed(task, sizes))
    # The choice of cases must not depend on the other processes on the GPU; the memory that can be reserved does.
    memory = reservable(memory, _telemetry().memory_of_others(session.gpu.living()), len(session.gpu.living()))
    # A task without inputs counts by its results.
    declared = [int(compulsory_work.declared_bytes(task, c) or 0) for c in cases]
    needed = [max(compulsory_work.input_bytes(task, c), d) for c, d in zip(cases, declared, strict=True)]
    # The largest first: the others use the memory again that it has asked the driver for.
    order = sorted(range(len(cases)), key=lambda k: -needed[k])
    cases, needed = tuple(cases[k] for k in order), [needed[k] for k in order]
    largest = needed[0]
    candidates = [RunnerContestant(session, case) for case in cases]

    def draw(index: int, purpose: str) -> InputWindows:
        split = f"{session.split}/{purpose}"
        seeds = [inputs.case_seed(session.secret, task.id, split, index, k) for k in range(input_windows.MAX_DRAWS)]
        return InputWindows.draw(task, cases[index], seeds, session.backend)

    # All cases are compiled before the GPU is held alone. A kernel is compiled for shapes and strides, so the runner
    # gets no values, and the GPU is not used. Compilers need no inputs, and take their time while work is counted and drawn.
    for candidate in candidates:
        _with_memory(session, 0.0, partial(_compile, candidate))
    candidates[-1].release(ahead=True)
    _load_reference(task, session)

    reserve = _Reservations(session, memory)
    smallest = needed.index(min(needed))
    work: list[_CaseWork] = []
    for index, case in enumerate(cases):
        counted = _CaseWork.by_shapes(task, case)
        # One call of the reference and of eager also loads or compiles torch's kernels, while no other grading waits.
        if counted is None or index == smallest:
            counted = reserve.run(COUNT_MEMORY * needed[index], partial(_counted, task, case, session))
        work.append(counted)

    early = _drawn_early(task, cases, draw, session, QUEUED_MEMORY_SHARE * memory, reserve)
    candidates[-1].finish_compiling(len(cases))

    def draw_timed(index: int) -> InputWindows:
        # Large values are drawn again for the judge: they would fill the GPU while the grading waits.
        return early[index].to(session.backend) if index in early else draw(index, "time")

    # A case that needs more memory than the rest reserves the difference before it queues for the GPU: a grading that
    # holds the GPU alone must not wait for memory.
    more = (MEASURE_MEMORY * largest - (1 - SHARE) * 0.8 * memory) / (SHARE * memory)
    graders = max(1, len(session.gpu.living()) // 2)  # each has a runner
    unreserved = min(KEPT_MEMORY_SHARE / graders, KEPT_MEMORY_MOST) * memory
    measuring = _Measuring(task, draw_timed, BY_NAME[precision], unreserved)
    measured: list[_Measured] = []
    rows: list[CaseTime] = []
    while len(rows) < len(cases):
        todo = slice(len(rows), None)
        measure = partial(measuring.run, candidates[todo], work[todo], len(rows))
        results = measuring.bytes_to_judge(work[len(rows)])
        pool = results / (KEPT_POOL_SHARE * memory) if results > unreserved else 0.0
        with session.gpu.room(pool, "kept") if pool else contextlib.nullcontext():
            latest = _with_memory(session, more, measure, MEASURED_MEMORY * needed[len(rows)])
            measured += latest
            # The lock is released: other gradings use the GPU while the results are judged. The smallest case comes first: a
            # larger one needs no more memory for each byte of its inputs.
            each, judged = float(JUDGE_MEMORY), list[CaseTime]()
            for one, index in zip(reversed(latest), range(len(measured) - 1, len(rows) - 1, -1), strict=True):
                work_of_judge = partial(_case_time, task, one, partial(draw_timed, index), measuring, reserve.preallocate)
                likely = min(each, LIKELY_JUDGE_MEMORY) * needed[index]
                judged.insert(0, reserve.run(each * needed[index], work_of_judge, likely))
                each = min(each, KNOWN_MEMORY * reserve.peak_bytes / max(1, needed[index])) if reserve.peak_bytes else each
                one.results.clear()
        rows += judged
    places = [order.index(k) for k in range(len(cases))]
    return _summary([measured[k] for k in places], [rows[k] for k in places], measuring, precision)


def _drawn_early(
    task: Task, cases: Sequence[Case], draw: Callable[[int, str], InputWindows], session: RunnerSession, most: float,
    reserve: _Reservations,
) -> dict[int, InputWindows]:  # fmt: skip
    """Draw values before the GPU is held alone: small ones, and matrices of special kinds, which are slow to draw.

    Args:
        task: the task.
        cases: the timed cases.
        draw: draws the values of a case by its index, for a purpose.
        session: of the grading.
        most: bytes that they may take on the device; large ones wait in the host's memory.
        reserve: reserves memory for drawing those.

    Returns:
        The values by the index of the case.
    """
    early, taken = dict[int, InputWindows](), 0
    for index, case in enumerate(cases):
        input_bytes = compulsory_work.input_bytes(task, case)
        size = input_windows.bytes_of_draws(input_bytes)
        if taken + size <= most:
            taken += size
            with session.gpu.using():
                early[index] = draw(index, "time")
        elif input_windows.slow_to_draw(task, case):
            # A task without inputs draws none, so its declared bytes do not matter here.
            early[index] = reserve.run(COUNT_MEMORY * input_bytes, partial(_drawn_to_host, draw, index, session))
    return early


def _compile(candidate: RunnerContestant) -> None:
    """Begin to compile the kernels that a case needs."""
    candidate.describe()
    candidate.dry()


def _with_memory(session: RunnerSession, share: float, work: Callable[[], _Done], needed: float = 0.0) -> _Done:
    """Do work, and where the GPU's memory does not last, do it again while no other grading has memory reserved.

    Memory that others hold must not count against a submission. If it is not enough without them either, it does.

    Args:
        session: of the grading.
        share: of the memory that timing may reserve, which the work needs besides its own; 0 or less for none.
        work: may be called ``MEASURE_ATTEMPTS`` times.
        needed: bytes that it may need; another attempt waits until so much is free.

    Returns:
        What the work returns.
    """
    for attempt in range(1, MEASURE_ATTEMPTS + 1):
        try:
            with session.gpu.room(share) if share > 0 else contextlib.nullcontext():
                return work()
        except (RuntimeError, GradingAborted, SandboxError) as e:  # torch.OutOfMemoryError is a RuntimeError
            if attempt == MEASURE_ATTEMPTS or not session.gpu.contended or "out of memory" not in str(e).lower():
                raise
        give_back()
        _await_memory(session, needed, MEMORY_PAUSE_SECONDS if share >= 1.0 else 0.0)
        share = 1.0
    raise AssertionError("unreachable")


def _await_memory(session: RunnerSession, needed: float, least: float) -> None:
    """Wait until so much memory of the device is free, for at most ``MEMORY_WAIT_SECONDS``.

    Args:
        session: of the grading; its ``waited`` grows.
        needed: bytes; for more than ``FREE_SHARE / 2`` of the device nobody waits, because contexts may take the rest.
        least: seconds that are waited in any case, for others to judge what they hold.
    """
    began = time.monotonic()
    if least:
        time.sleep(least)
    if not torch.cuda.is_available():
        return
    needed = min(needed, FREE_SHARE / 2 * torch.cuda.get_device_properties(0).total_memory)
    while _free_bytes() < needed and time.monotonic() - began < MEMORY_WAIT_SECONDS:
        time.sleep(0.1)
    session.gpu.waited += time.monotonic() - began


def reservable(total: int, others: int | None, contexts: int) -> int:
    """Return how much memory of a device all gradings together may reserve.

    Args:
        total: bytes of the device.
        others: bytes that processes beside the gradings hold, such as a trainer on the same GPU; ``None`` if not known.
        contexts: processes of gradings on the device.

    Returns:
        Bytes: what others leave, without the contexts and what graders keep for themselves, but at least half of it.
    """
    left = total - (others or 0)
    return max(left // 2, left - (CONTEXT_BYTES + KEPT_BYTES) * contexts)


def _telemetry() -> Telemetry:
    """Return the telemetry of the device on which this process grades."""
    uuid = getattr(torch.cuda.get_device_properties(0), "uuid", None)
    return Telemetry(None if uuid is None else str(uuid))


class _Reservations:
    """Runs work that needs device memory within a reservation, so that it takes no memory from other gradings.

    Args:
        session: of the grading.
        memory: bytes of the device without the contexts of its processes.

    Attributes:
        peak_bytes: most memory that torch had for the latest work; 0 without a device.
    """

    def __init__(self, session: RunnerSession, memory: int) -> None:
        self._session, self._shared_bytes = session, SHARE * memory
        self.peak_bytes = 0
        self._likely = 0.0

    def preallocate(self) -> None:
        """Ask the driver at once for what the work of ``run`` is likely to need. For the work to call, while it shares the GPU."""
        if self._likely:
            preallocate(int(self._likely))
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()  # it was not needed yet

    def run(self, needed: float, work: Callable[[], _Done], likely: float = 0.0) -> _Done:
        """Do work on the GPU, and give its memory back. Work that needs more memory than expected is repeated with more.

        Args:
            needed: bytes that it is expected to need at most.
            work: may be called several times.
            likely: bytes that it is likely to need, for ``preallocate``: each request to the driver waits for a lock of the host.

        Returns:
            What the work returns.
        """
        sizes = [size for size in (needed, MORE_MEMORY * needed) if size < self._shared_bytes]
        sizes += [self._shared_bytes] * MEMORY_ATTEMPTS
        for k, size in enumerate(sizes):
            with self._session.gpu.room(size / self._shared_bytes):
                try:
                    free = FREE_SHARE * _free_bytes() if size == self._shared_bytes else 0.0
                    with _limited(max(free, MEMORY_SLACK * max(size, gpu_lock.UNRESERVED * self._shared_bytes))), self._counted():
                        # A process keeps little anyway, and nothing of more is asked for than is reserved.
                        self._likely = likely if KEPT_BYTES < likely <= size else 0.0
                        return work()
                except torch.OutOfMemoryError:
                    if k == len(sizes) - 1:
                        raise
                finally:
                    give_back(KEPT_BYTES)
            if size == self._shared_bytes:
                # Others hold results that they could not judge while all memory was reserved here.
                _await_memory(self._session, needed / FREE_SHARE, MEMORY_PAUSE_SECONDS)
        raise AssertionError("unreachable")

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """Set ``peak_bytes`` to what the block takes."""
        if not torch.cuda.is_available():
            yield
            return
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        yield
        self.peak_bytes = torch.cuda.max_memory_allocated() - before


def _free_bytes() -> int:
    """Return the free memory of the device; 0 without one."""
    return int(torch.cuda.mem_get_info()[0]) if torch.cuda.is_available() else 0


@contextlib.contextmanager
def _limited(more: float) -> Iterator[None]:
    """Let torch ask the device for at most so many bytes more within the block; libraries then use less workspace.

    Args:
        more: bytes.
    """
    if not torch.cuda.is_available():
        yield
        return
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, (torch.cuda.memory_reserved() + more) / total))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def _load_reference(task: Task, session: RunnerSession) -> None:
    """Evaluate the reference and eager on the smallest case, without the GPU lock.

    Torch loads a kernel at its first use, and compiles some (``torch.special.zeta`` for five seconds); whoever waits to
    measure should not wait for that. Loading Triton's modules and short kernels did not disturb a measurement
    (``benchmarks/timing_disturbances.py``); this call itself was not measured.

    Args:
        task: the task.
        session: of the grading.
    """
    cases = sorted((c for c in task.cases if not c.raises and c.elements()), key=lambda c: c.elements())
    # An error here says nothing: the reference meets other sizes later.
    with contextlib.suppress(RuntimeError, ValueError, TypeError), reference.exact_matmul():
        for case in cases[:1]:
            args = inputs.draw(task, case, secrets.randbits(63), session.backend)
            exact = not isinstance(task.truth, Sample | Windows)
            reference.expect(task, case, args, session.backend, exact=exact)
            if task.eager is not None:
                task.eager(**assembled(reference.resolve(args, session.backend)))


def _counted(task: Task, case: Case, session: RunnerSession) -> _CaseWork:
    """Count the work of a case from a draw, after a call of eager."""
    with session.gpu.using():
        args = inputs.draw(task, case, secrets.randbits(63), session.backend)
        gpu_turns.yield_gpu()
        if task.eager is not None:
            with reference.exact_matmul():
                task.eager(**assembled(reference.resolve(args, session.backend)))
            gpu_turns.yield_gpu()
        return _CaseWork.of(task, case, args, session.backend)


def _drawn_to_host(draw: Callable[[int, str], InputWindows], index: int, session: RunnerSession) -> InputWindows:
    """Draw the timed values of a case on the device, and return them in the host's memory."""
    with session.gpu.using():
        return draw(index, "time").to("cpu")


@dataclass(frozen=True)
class _CaseWork:
    """Sizes and compulsory work of one case, the same for every draw of its inputs.

    Attributes:
        result_bytes: bytes of a correct result.
        kept_bytes: bytes of a correct result and of the tensors written in place.
        ideal_bytes: compulsory traffic in bytes.
        operations: operations that the task must do.
        tensor_bytes: bytes of all arguments and results.
    """

    result_bytes: int
    kept_bytes: int
    ideal_bytes: int
    operations: int
    tensor_bytes: int

    @property
    def input_bytes(self) -> int:
        """Bytes of all arguments."""
        return self.tensor_bytes - self.kept_bytes

    @classmethod
    def by_shapes(cls, task: Task, case: Case) -> _CaseWork | None:
        """Count without values, by running the reference on the meta device.

        Args:
            task: the task.
            case: the case.

        Returns:
            The counts; ``None`` where they depend on values, or where an operation has no implementation for meta
            tensors.
        """
        try:
            return cls.of(task, case, inputs.described(task, case), "meta")
        except Exception:  # torch raises several types where a value of a meta tensor is asked for
            return None

    @classmethod
    def of(cls, task: Task, case: Case, args: dict[str, Any], backend: str) -> _CaseWork:
        """Count from one draw of the case.

        Args:
            task: the task.
            case: the case.
            args: from ``inputs.draw``.
            backend: where the reference is evaluated.

        Returns:
            The counts.
        """
        expected = reference.expect(task, case, args, backend, exact=False)
        result_bytes = sum(o.numel() * o.element_size() for o in expected.native)
        kept_bytes = result_bytes + sum(o.numel() * o.element_size() for o in expected.native_written.values())
        ideal = compulsory_work.ideal_bytes(task, case, args, expected)
        tensors = [v for v in args.values() if isinstance(v, torch.Tensor)]
        tensor_bytes = kept_bytes + sum(v.numel() * v.element_size() for v in tensors)
        return cls(result_bytes, kept_bytes, ideal, compulsory_work.flops(task, case, args), tensor_bytes)


def _summary(
    measured: Sequence[_Measured], rows: Sequence[CaseTime], device: _Measuring, precision: str
) -> Timing:  # fmt: skip
    """Return the geometric mean of the cases' speedups, with its interval.

    Args:
        measured: the measurement of each case.
        rows: what is reported of each case.
        device: the state of the device.
        precision: the name of the precision.

    Returns:
        The timing of the task.
    """
    assert device.roofline is not None
    parts = [one.paired for one in measured]
    n = len(parts)
    mean = sum(p.log_ratio for p in parts) / n
    # The cases are independent: the half-widths of the mean add in quadrature.
    down = math.sqrt(sum((p.log_ratio - p.low) ** 2 for p in parts)) / n
    up = math.sqrt(sum((p.high - p.log_ratio) ** 2 for p in parts)) / n
    floors = [r.eager_us / r.floor_us for r in rows if r.floor_us]
    ratio = math.exp(sum(map(math.log, floors)) / len(floors)) if floors else None
    return Timing(
        speedup=math.exp(mean), low=math.exp(mean - down), high=math.exp(mean + up), floor_ratio=ratio,
        cases=tuple(rows), device=torch.cuda.get_device_name(0), notes=tuple(device.notes),
        before=device.before.to_dict() if device.before else None,
        after=device.after.to_dict() if device.after else None, roofline=device.roofline.to_dict(), precision=precision,
    )  # fmt: skip


@dataclass(frozen=True)
class _Measured:
    """One case: its times, and results of timed calls that are still to be judged."""

    candidate: RunnerContestant
    paired: Paired
    work: _CaseWork
    disturbed: bool
    results: list[tuple[Window, Fetched]]
    after: Reading | None
    host_bound: bool = False  # of eager

    @property
    def kept_bytes(self) -> int:
        """Bytes of device memory of the results."""
        return sum({at: size for _, fetched in self.results for at, size in fetched.storages.items()}.values())


@dataclass
class _Measuring:
    """Measures the cases of one submission, with the GPU held alone.

    Attributes:
        task: the task.
        draw: draws the values of a case by its index.
        precision: how narrow the intervals shall be.
        kept_bytes: bytes of results that may wait for the judge while further cases are measured.
        notes: repetitions and disturbances are appended here.
        roofline: of the device, once something was measured.
        before: the device's telemetry before the first case.
        after: the latest reading.
        disturbed_by_others: whether another process computed at some time while the GPU was held.
        sparing: an attempt has failed, perhaps for want of memory: no more than usual is asked for at once.
    """

    task: Task
    draw: Callable[[int], InputWindows]
    precision: Precision
    kept_bytes: float
    notes: list[str] = field(default_factory=list)
    roofline: Roofline | None = None
    before: Reading | None = None
    after: Reading | None = None
    disturbed_by_others: bool = False
    sparing: bool = False

    def run(
        self, candidates: Sequence[RunnerContestant], work: Sequence[_CaseWork], first: int
    ) -> list[_Measured]:  # fmt: skip
        """Measure cases until their results need more memory than ``kept_bytes``, at least one.

        Args:
            candidates: the submission, for each case that is left.
            work: of each of these cases.
            first: index of the first of them.

        Returns:
            The measurements, in the order of the cases.
        """
        telemetry, session = _telemetry(), candidates[0].session
        measured: list[_Measured] = []
        ample, reading = False, None
        with contextlib.ExitStack() as later, session.gpu.alone(quiet=self.precision.quiet):
            # Whoever asks the driver for anything waits for a lock of the host: the device is read beside what else is asked for.
            pending = telemetry.begin_reading(self._own(session))
            self.roofline = rooflines.roofline("cuda", session.gpu.file(f"ceilings-{torch.__version__}.json"))
            watch = Stopwatch(session.backend)
            try:
                for index, candidate in enumerate(candidates):
                    # The next case has results too. Those of the first, which is the largest, may always wait.
                    waiting = sum(m.kept_bytes for m in measured[1:])
                    if measured and waiting + self.bytes_to_judge(work[index]) > self.kept_bytes:
                        self._look_for_strangers(telemetry.read(self._own(session)), session)
                        break
                    eager = EagerContestant(self.task, candidate.case, session.backend, watch)
                    whole = candidate is candidates[-1]
                    ample = self._preallocate(eager, work[index:], None if index == 0 else ample)
                    if index == 0:
                        reading = pending.result()
                        self.before = self.before or reading
                    # Readings take milliseconds: the last one of a case serves as the first one of the next.
                    since = reading if not measured else None if measured[-1].disturbed else measured[-1].after
                    measured.append(self._drawn(candidate, eager, first + index, work[index], telemetry, since, whole, ample))
            except BaseException:
                self.sparing = True  # another attempt, if there is one, asks for each part when it needs it
                raise
            finally:
                # The driver clears what is freed, which disturbs others by some per cent. Who measures within 1 % must not be.
                quiet = self.precision.quiet or session.gpu.quiet_wanted
                if ample and not quiet and _free_bytes() >= LATE_FREE_BYTES:
                    later.callback(self._release_memory, watch, candidates[-1], ended=len(measured) == len(candidates))
                else:
                    self._release_memory(watch, candidates[-1])
        self.after = measured[-1].after
        return [replace(m, disturbed=True) for m in measured] if self.disturbed_by_others else measured

    @staticmethod
    def _release_memory(watch: Stopwatch, candidate: RunnerContestant, ended: bool = False) -> None:
        """Give the memory of both contestants back.

        Args:
            watch: of eager.
            candidate: the submission.
            ended: nothing more is asked of it: its process ends, which asks the driver for less than giving back would.
        """
        if ended:
            candidate.session.end_runner()
        watch.close()
        if not ended:
            with contextlib.suppress(GradingAborted):  # it may have ended itself
                candidate.release()
        give_back(KEPT_BYTES)

    @staticmethod
    def _own(session: RunnerSession) -> set[int]:
        """Return the ids of the processes that respect the GPU lock."""
        return {os.getpid(), session.runner.pid, *session.gpu.users()}

    def _look_for_strangers(self, reading: Reading | None, session: RunnerSession) -> None:
        """Note whether another process has computed before a reading: then all cases of this turn are disturbed."""
        self.disturbed_by_others = self.disturbed_by_others or bool(strangers(reading, self._own(session)))

    def _kept(self, work: _CaseWork) -> tuple[int, bool]:
        """Plan what is kept of timed calls until the GPU is free again.

        Args:
            work: of the case.

        Returns:
            The number of results, and whether inputs are so large that only one of the results may come with its inputs. Three
            copies of the largest case's inputs would be 9 GiB.
        """
        if isinstance(self.task.truth, Sample | Windows):  # these judges work on the host and take long
            most = 3
        else:
            most = max(3, min(MAX_KEPT_RESULTS, MAX_KEPT_BYTES // max(1, work.kept_bytes)))
        return most, most * work.input_bytes > MAX_KEPT_BYTES

    def bytes_to_judge(self, work: _CaseWork) -> int:
        """Return how much device memory the results of a case may take until they are judged, in bytes."""
        most, few_inputs = self._kept(work)
        timed_calls = most * work.kept_bytes + (1 if few_inputs else most) * work.input_bytes
        return timed_calls + JUDGED * work.result_bytes + (1 if few_inputs else SLOTS) * work.input_bytes

    def _memory(self, eager: EagerContestant, work: _CaseWork) -> tuple[int, int, int]:
        """Return what memory a case takes in this process, as ``Stopwatch.preallocate`` takes it.

        Args:
            eager: the baseline of the case.
            work: of the case.
        """
        described = inputs.described(self.task, eager.case).values()
        input_bytes = sum(v.untyped_storage().nbytes() for v in described if isinstance(v, torch.Tensor))
        return input_bytes, _slots(work), input_windows.bytes_of_draws(input_bytes)

    def _preallocate(self, eager: EagerContestant, work: Sequence[_CaseWork], ample: bool | None) -> bool:
        """Ask the driver at once for the memory of a case in this process.

        Args:
            eager: the baseline of the case.
            work: of the case and of all after it, which are smaller and use its memory again.
            ample: whether there was ample memory for the case before; ``None`` for the first case of this turn.

        Returns:
            Whether there is ample memory for the case.
        """
        if first := ample is None:
            give_back(KEPT_CACHE_BYTES)
        memory = self._memory(eager, work[0])
        results = sum(min(self.bytes_to_judge(w), LIKELY_RESULTS * w.kept_bytes + 2 * w.input_bytes) for w in work)
        if ample is None:
            ample = not self.sparing and self._is_ample(memory, work[0], min(AMPLE_RESULTS_BYTES, results))
        eager.watch.preallocate(*memory, ample)
        if first:
            many = ample and eager.watch.pooled  # without a pool each step gives back what it does not need
            preallocate_outside_pool(min(AMPLE_RESULTS_BYTES if many else PREALLOCATED_BYTES, results))
        return ample

    def _is_ample(self, memory: tuple[int, int, int], work: _CaseWork, results: int) -> bool:
        """Return whether so much memory is free that both processes may ask for more than usual at once.

        Args:
            memory: of the case in this process, as ``_memory`` returns it.
            work: of the case.
            results: bytes of results that are asked for at once.
        """
        slot_bytes, slots, others = memory
        pool, of_runner = pool_bytes(slots * slot_bytes), bytes_beside_slots(others, work.kept_bytes)
        asked = 2 * (pool + FLUSH_BYTES) + others + of_runner
        return AMPLE * (asked + AMPLE_GRAPH_RESERVE_BYTES + max(results, self.bytes_to_judge(work))) <= _free_bytes()

    def _drawn(
        self, candidate: RunnerContestant, eager: EagerContestant, index: int, work: _CaseWork, telemetry: Telemetry,
        before: Reading | None, whole: bool, ample: bool,
    ) -> _Measured:  # fmt: skip
        """Draw the values of a case, and measure it; arguments as for ``_case``, ``index`` is that of the case."""
        try:
            # Each step frees what the next one does not need, if it is much: the largest cases take half of a GPU.
            if not eager.watch.pooled:
                give_back(KEPT_CACHE_BYTES)
            return self._case(candidate, eager, self.draw(index), work, telemetry, before, whole, ample)
        finally:
            eager.watch.clear()

    def _case(
        self, candidate: RunnerContestant, eager: EagerContestant, windows: InputWindows, work: _CaseWork,
        telemetry: Telemetry, before: Reading | None, whole: bool, ample: bool,
    ) -> _Measured:  # fmt: skip
        """Measure one case.

        Args:
            candidate: the submission.
            eager: the baseline.
            windows: the values of the calls.
            work: of the case.
            telemetry: of the device.
            before: an earlier reading since which only this grading used the device; ``None`` for a new one.
            whole: the last reading tells who has computed while the GPU was held.
            ample: there is ample memory for the case.

        Returns:
            The times, and results that are to be judged.
        """
        assert self.roofline is not None
        session, case = candidate.session, candidate.case
        result_bytes = work.result_bytes
        slots = _slots(work)
        candidate.lay(windows, result_bytes, slots, ample)
        draws, windows = list(windows.draws), windows.without_values()  # the runner has copies
        about_us = eager.prepare(draws, slots, windows.turning)
        if not eager.watch.pooled:
            give_back(KEPT_CACHE_BYTES)
        candidate.warm()
        results: list[tuple[Window, Fetched]] = []
        most, few_inputs = self._kept(work)
        seen = 0

        def check(order: list[int], drawn: list[Window]) -> None:
            # Any timed call may be judged, and the runner learns which one after all calls of its block: a kernel that
            # works only now and then is detected. Reservoir sampling keeps each of the results with the same chance.
            nonlocal seen
            seen += 1
            place = len(results) if len(results) < most else secrets.randbelow(seen)
            if place < most:
                k = secrets.randbelow(len(order))
                # One time in four is often enough to see that a call leaves its inputs unchanged.
                room = not (few_inputs and any(fetched.inputs for _, fetched in results))
                inputs = order[k] not in order[k + 1 :] and room and secrets.randbelow(4) == 0
                results[place : place + 1] = [(drawn[k], candidate.fetch([(k, inputs)])[0])]

        for attempt in range(1, ATTEMPTS + 1):
            # Results of a discarded attempt are not judged: correct ones could hide wrong ones of the attempt that counts.
            results.clear()
            seen = 0
            first = before if attempt == 1 and before is not None else telemetry.read(self._own(session))
            paired = pair(
                eager, candidate, windows=windows, check=check, precision=self.precision, about_us=about_us, slots=slots
            )  # fmt: skip
            own_pids = self._own(session)
            pending = telemetry.begin_reading(own_pids, whole)
            captured = candidate.capture(result_bytes, _claimed_us(paired), self.precision.graph_us)  # beside the reading
            after = pending.result()
            for reading in (first, after):
                self._look_for_strangers(reading, session)
            disturbed = disturbance(first, after, own_pids) or _skewed(paired)
            again = disturbed or _belief(self.task, work, self.roofline, paired).doubt
            if again is None or attempt == ATTEMPTS:
                if disturbed is not None:
                    self.notes.append(f"{case.label()}: disturbed in {ATTEMPTS} attempts: {disturbed}")
                if paired.skewed:
                    paired = paired.by_medians()
                claimed = _claimed_us(paired)
                again = candidate.audit(claimed, captured, self.precision.audit_us, paired.candidate_mean_us)
                if again is None:
                    break
            if attempt < ATTEMPTS:
                self.notes.append(f"{case.label()}: measured again: {again}")
            else:
                self.notes.append(f"{case.label()}: eager was held up in {ATTEMPTS} attempts: {again}")
                paired = paired.by_medians()
        if captured and not self.task.written(case.args):
            # A call may detect that it is captured and behave otherwise; it must be right all the same.
            results += candidate.replayed(windows, result_bytes, few_inputs)
        return _Measured(candidate, paired, work, disturbed is not None, results, after, eager.host_bound)


def _slots(work: _CaseWork) -> int:
    """Return how many sets of buffers a case has."""
    return FEW_SLOTS if work.tensor_bytes > FEW_SLOTS_BYTES else SLOTS


def _claimed_us(paired: Paired) -> float:
    """Return the microseconds of a candidate's call that its speedup amounts to: few calls may decide the ratio."""
    return min(paired.candidate_us, paired.eager_us * math.exp(-paired.log_ratio))


def _skewed(paired: Paired) -> str | None:
    """Return a text if few calls of eager decide the ratio. A submission's own calls give it no second attempt."""
    if not paired.skewed:
        return None
    return f"eager took {paired.eager_us:.1f} us in most calls, {paired.eager_mean_us or 0:.1f} in the mean"


@dataclass(frozen=True)
class _Belief:
    """Whether one case's times are possible by the roofline.

    Attributes:
        floor_us: microseconds below which no kernel can run; ``None`` where that is not known, or refuted by eager.
        doubt: why the case is measured again; ``None`` where nothing is odd.
        impossible: the candidate is faster than physics allows, and eager is not.
        void: the candidate's time is too good to be believed, but not proved to be wrong.
    """

    floor_us: float | None
    doubt: str | None = None
    impossible: bool = False
    void: bool = False


def _belief(task: Task, work: _CaseWork, roofline: Roofline, paired: Paired) -> _Belief:
    """Compare both times with the roofline.

    Eager runs in the grader and is trusted. If it is faster than the floor, the floor is wrong and the candidate is not
    compared with it.

    Args:
        task: the task.
        work: of the case.
        roofline: of the device.
        paired: the times.

    Returns:
        The result.
    """
    claimed = _claimed_us(paired)
    floor_us = roofline.floor_us(work.ideal_bytes, work.operations, rooflines.operand_of(task))
    if floor_us is None:
        likely = roofline.likely_us(work.ideal_bytes)
        if likely is None or claimed >= rooflines.PLAUSIBLE * likely or paired.eager_us < likely:
            return _Belief(None)
        return _Belief(None, f"{claimed:.1f} us; by the measured copy {likely:.1f} us would be needed", void=True)
    if paired.eager_us < rooflines.IMPOSSIBLE * floor_us:
        why = f"the floor of {floor_us:.1f} us is wrong: eager itself took {paired.eager_us:.1f} us"
        return _Belief(None, why)
    if claimed < rooflines.IMPOSSIBLE * floor_us:
        why = f"{claimed:.1f} us, the device needs {floor_us:.1f} us to move the data"
        return _Belief(floor_us, why, impossible=True)
    share = floor_us / claimed
    if share > max(rooflines.PLAUSIBLE, rooflines.BESIDE_EAGER * floor_us / paired.eager_us):
        return _Belief(floor_us, f"{claimed:.1f} us is {share:.2f} of the roofline", void=True)
    return _Belief(floor_us)


def _judge(
    task: Task, one: _Measured, windows: InputWindows, results: Sequence[tuple[Window, Fetched]]
) -> None:  # fmt: skip
    """Judge results in a random order for ``JUDGE_SECONDS``, but at least ``JUDGE_MIN_RESULTS`` of them.

    Args:
        task: the task.
        one: the measurement of a case.
        windows: the values of its calls.
        results: those of its timed calls, or of its captured calls, with the windows of their values.

    Raises:
        GradingAborted: one of them is wrong.
    """
    candidate, gpu = one.candidate, one.candidate.session.gpu
    hosted = faster_on_host(task, one.work.tensor_bytes, one.paired.eager_us)
    left = random.Random(secrets.randbits(64)).sample(results, len(results))
    right: dict[int, Fetched] = {}  # by the window, of which several captured calls may have the same
    judged, spent = 0, 0.0  # seconds without those waited for the GPU: a busy machine must not judge fewer results
    # Judging on the host does not keep others from the GPU; on the GPU several results are judged in one turn.
    with contextlib.nullcontext() if hosted else gpu.using():
        began, waited = time.monotonic(), gpu.waited
        while left and (judged < JUDGE_MIN_RESULTS or spent < JUDGE_SECONDS):
            window, fetched = left.pop()
            with gpu.using():
                same = id(window) in right and right[id(window)].equals(fetched)
                args = {} if same else windows.args(window)
            if not same:
                candidate.rule(task, args, fetched, hosted)
                right[id(window)] = fetched
            gpu_turns.yield_gpu()
            judged, spent = judged + 1, time.monotonic() - began - (gpu.waited - waited)


def _case_time(
    task: Task, one: _Measured, draw: Callable[[], InputWindows], device: _Measuring, allocate: Callable[[], None]
) -> CaseTime:  # fmt: skip
    """Judge the results of a case's timed calls, and compare its times with the limits of the device.

    Args:
        task: the task.
        one: the measurement of the case.
        draw: draws the values of its calls.
        device: the state of the device; notes are appended.
        allocate: asks for the memory of a judge on the GPU.

    Returns:
        What is reported of the case.

    Raises:
        GradingAborted: a timed call was wrong, or the claimed time is impossible.
    """
    assert device.roofline is not None
    case, paired, notes = one.candidate.case, one.paired, device.notes
    with one.candidate.session.gpu.using():
        if not faster_on_host(task, one.work.tensor_bytes, paired.eager_us):
            allocate()
        windows = draw()
    for captured in (False, True):
        _judge(task, one, windows, [r for r in one.results if r[1].captured is captured])
    belief = _belief(task, one.work, device.roofline, paired)
    if belief.impossible and not one.disturbed:
        detail = f"{case.label()}: {belief.doubt}"
        raise GradingAborted(Verdict.REJECTED, detail, [Violation("impossible_speed", detail)])
    if one.host_bound:
        notes.append(f"{case.label()}: eager's calls wait for the host, so other work of the machine changes the speedup")
    if belief.doubt is not None:
        unexplained = "; not believed unexplained" if belief.void else ""
        notes.append(f"{case.label()}: in {ATTEMPTS} attempts {belief.doubt}{unexplained}")
    return CaseTime(
        case=case.label(), eager_us=round(paired.eager_us, 3), candidate_us=round(paired.candidate_us, 3),
        speedup=math.exp(paired.log_ratio), low=math.exp(paired.low), high=math.exp(paired.high), pairs=paired.pairs,
        floor_us=round(belief.floor_us, 3) if belief.floor_us else None, disturbed=one.disturbed,
        void=belief.void or belief.impossible, ideal_bytes=one.work.ideal_bytes, flops=one.work.operations,
    )  # fmt: skip
