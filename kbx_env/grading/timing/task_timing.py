"""Times a task: compiles, counts work and draws values before the GPU is held alone, measures, and judges afterwards."""

from __future__ import annotations

import contextlib
import math
import secrets
from collections.abc import Callable, Sequence
from functools import partial

import torch

from kbx_env.grading import compulsory_work, gpu_turns, inputs, reference
from kbx_env.grading.runtime.session import RunnerSession
from kbx_env.grading.sizes import timed
from kbx_env.grading.timing import input_windows
from kbx_env.grading.timing.case_work import CaseWork
from kbx_env.grading.timing.contestants import RunnerContestant
from kbx_env.grading.timing.input_windows import InputWindows
from kbx_env.grading.timing.measuring import Measured, Measuring, device_telemetry
from kbx_env.grading.timing.precision import BY_NAME
from kbx_env.grading.timing.reservations import (
    COUNT_MEMORY,
    JUDGE_MEMORY,
    MEASURE_MEMORY,
    SHARE,
    Reservations,
    reservable,
    with_memory,
)
from kbx_env.grading.timing.timed_results import case_time
from kbx_env.outcome import CaseTime, Timing
from kbx_env.protocol.wire import assembled
from kbx_env.spec.criteria import Sample, Windows
from kbx_env.spec.task import Case, Task

LIKELY_JUDGE_MEMORY = 8.0
"""Device memory for which the driver is asked at once before a case is judged, in multiples of the bytes of its inputs, where
nothing is known of a smaller case."""
KNOWN_MEMORY = 1.15
"""Device memory reserved for judging a case, in multiples of what a smaller case of the task took for each byte of its inputs, if
that is less than ``JUDGE_MEMORY``: elementwise tasks take 6 to 8."""
MEASURED_MEMORY = 13
"""Free device memory for which measuring waits after it had too little, in multiples of the bytes of the inputs: the largest
case of all tasks took 36 GiB for 2.9 GiB."""
KEPT_MEMORY_SHARE, KEPT_MEMORY_MOST = 0.3, 0.03
"""Shares of the device's memory for results that were measured and not judged yet, and that nobody reserves: of all gradings
together, and of one at most. A grading whose further cases would need more judges what it has before it measures them."""
KEPT_POOL_SHARE = 0.25
"""Share of the device's memory for results of a case that need more than that. A grading reserves its part before it measures the
case, until the results are judged: on 80 GB those of six gradings with cases of 1 to 3 GiB took 30 GiB, and nobody could measure
another case of this size."""
QUEUED_MEMORY_SHARE = 0.003
"""Share of the device's memory that one grading may hold in values while it waits for the GPU."""


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
    cases, needed, order = _largest_first(task, sizes)
    # The choice of cases must not depend on the other processes on the GPU; the memory that can be reserved does.
    memory = torch.cuda.get_device_properties(0).total_memory
    memory = reservable(memory, device_telemetry().memory_of_others(session.gpu.living()), len(session.gpu.living()))
    largest = needed[0]
    candidates = [RunnerContestant(session, case) for case in cases]

    def draw(index: int, purpose: str) -> InputWindows:
        split = f"{session.split}/{purpose}"
        seeds = [inputs.case_seed(session.secret, task.id, split, index, k) for k in range(input_windows.MAX_DRAWS)]
        return InputWindows.draw(task, cases[index], seeds, session.backend)

    # All cases are compiled before the GPU is held alone. Compilers take their time while work is counted and drawn.
    if not session.compiled:
        begin_compiling(task, session, sizes, partial(with_memory, session, 0.0))
    _load_reference(task, session)

    reserve = Reservations(session, memory)
    smallest = needed.index(min(needed))
    work: list[CaseWork] = []
    for index, case in enumerate(cases):
        counted = CaseWork.by_shapes(task, case)
        # One call of the reference and of eager also loads or compiles torch's kernels, while no other grading waits.
        if counted is None or index == smallest:
            counted = reserve.run(COUNT_MEMORY * needed[index], partial(_counted, task, case, session))
        work.append(counted)

    early = _drawn_early(task, cases, draw, session, QUEUED_MEMORY_SHARE * memory, reserve)
    candidates[-1].finish_compiling(len(cases))  # also what calls without launches have begun with since

    def draw_timed(index: int) -> InputWindows:
        # Large values are drawn again for the judge: they would fill the GPU while the grading waits.
        return early[index].to(session.backend) if index in early else draw(index, "time")

    # A case that needs more memory than the rest reserves the difference before it queues for the GPU: a grading that
    # holds the GPU alone must not wait for memory.
    more = (MEASURE_MEMORY * largest - (1 - SHARE) * 0.8 * memory) / (SHARE * memory)
    graders = max(1, len(session.gpu.living()) // 2)  # each has a runner
    unreserved = min(KEPT_MEMORY_SHARE / graders, KEPT_MEMORY_MOST) * memory
    measuring = Measuring(task, draw_timed, BY_NAME[precision], unreserved)
    measured: list[Measured] = []
    rows: list[CaseTime] = []
    while len(rows) < len(cases):
        todo = slice(len(rows), None)
        measure = partial(measuring.run, candidates[todo], work[todo], len(rows))
        results = measuring.bytes_to_judge(work[len(rows)])
        pool = results / (KEPT_POOL_SHARE * memory) if results > unreserved else 0.0
        with session.gpu.room(pool, "kept") if pool else contextlib.nullcontext():
            latest = with_memory(session, more, measure, MEASURED_MEMORY * needed[len(rows)])
            measured += latest
            # The lock is released: other gradings use the GPU while the results are judged. The smallest case comes first: a
            # larger one needs no more memory for each byte of its inputs.
            each, judged = float(JUDGE_MEMORY), list[CaseTime]()
            for one, index in zip(reversed(latest), range(len(measured) - 1, len(rows) - 1, -1), strict=True):
                work_of_judge = partial(case_time, task, one, partial(draw_timed, index), measuring, reserve.preallocate)
                likely = min(each, LIKELY_JUDGE_MEMORY) * needed[index]
                judged.insert(0, reserve.run(each * needed[index], work_of_judge, likely))
                each = min(each, KNOWN_MEMORY * reserve.peak_bytes / max(1, needed[index])) if reserve.peak_bytes else each
                one.results.clear()
        rows += judged
    places = [order.index(k) for k in range(len(cases))]
    return _summary([measured[k] for k in places], [rows[k] for k in places], measuring, precision)


def begin_compiling(
    task: Task, session: RunnerSession, sizes: str, attempt: Callable[[Callable[[], None]], None] = lambda work: work()
) -> None:  # fmt: skip
    """Begin to compile what timed calls launch.

    A kernel is compiled for shapes and strides, so the runner gets no values, and nothing is launched.

    Args:
        task: the task.
        session: with the loaded submission.
        sizes: as for ``time_task``.
        attempt: does the work of a case, and does it again if memory is short, or not.

    Raises:
        GradingAborted: the submission failed.
        SandboxError: the machine is to blame.
    """
    candidates = [RunnerContestant(session, case) for case in _largest_first(task, sizes)[0]]
    for candidate in candidates:
        attempt(partial(_compile, candidate))
    candidates[-1].release(ahead=True)
    session.case_bytes = 0


def _largest_first(task: Task, sizes: str) -> tuple[tuple[Case, ...], list[int], list[int]]:
    """Choose the timed cases that fit into the device's memory.

    Args:
        task: the task.
        sizes: as for ``time_task``.

    Returns:
        The cases, the largest first: the others use the memory again that it has asked the driver for. Bytes of the inputs of each.
        The places that they have in the declared order.
    """
    cases = compulsory_work.fitting(task, torch.cuda.get_device_properties(0).total_memory, timed(task, sizes))
    # A task without inputs counts by its results.
    declared = [int(compulsory_work.declared_bytes(task, c) or 0) for c in cases]
    needed = [max(compulsory_work.input_bytes(task, c), d) for c, d in zip(cases, declared, strict=True)]
    order = sorted(range(len(cases)), key=lambda k: -needed[k])
    return tuple(cases[k] for k in order), [needed[k] for k in order], order


def _drawn_early(
    task: Task, cases: Sequence[Case], draw: Callable[[int, str], InputWindows], session: RunnerSession, most: float,
    reserve: Reservations,
) -> dict[int, InputWindows]:  # fmt: skip
    """Draw values before the GPU is held alone: small ones, and matrices that are drawn by factorising, which is slow.

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


def _counted(task: Task, case: Case, session: RunnerSession) -> CaseWork:
    """Count the work of a case from a draw, after a call of eager."""
    with session.gpu.using():
        args = inputs.draw(task, case, secrets.randbits(63), session.backend)
        gpu_turns.yield_gpu()
        if task.eager is not None:
            with reference.exact_matmul():
                task.eager(**assembled(reference.resolve(args, session.backend)))
            gpu_turns.yield_gpu()
        return CaseWork.of(task, case, args, session.backend)


def _drawn_to_host(draw: Callable[[int, str], InputWindows], index: int, session: RunnerSession) -> InputWindows:
    """Draw the timed values of a case on the device, and return them in the host's memory."""
    with session.gpu.using():
        return draw(index, "time").to("cpu")


def _summary(
    measured: Sequence[Measured], rows: Sequence[CaseTime], device: Measuring, precision: str
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
