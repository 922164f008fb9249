"""Judges results of timed calls: the timed calls are checked calls."""

from __future__ import annotations

import contextlib
import math
import random
import secrets
import time
from collections.abc import Callable, Sequence

from kbx_env.grading import gpu_turns
from kbx_env.grading.runtime.untrusted import GradingAborted
from kbx_env.grading.timing.contestants import Fetched, faster_on_host
from kbx_env.grading.timing.input_windows import InputWindows, Window
from kbx_env.grading.timing.measuring import ATTEMPTS, Measured, Measuring
from kbx_env.grading.timing.plausibility import believed
from kbx_env.outcome import CaseTime, Verdict, Violation
from kbx_env.spec.task import Task

JUDGE_SECONDS, JUDGE_MIN_RESULTS = 0.75, 3
"""Seconds after which no further result of a case's timed calls (and of its captured calls) is judged, once so many
are. The results are drawn at random after all calls were made: a call that is wrong now and then cannot know whether it
is checked."""


def _judge(
    task: Task, one: Measured, windows: InputWindows, results: Sequence[tuple[Window, Fetched]]
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


def case_time(
    task: Task, one: Measured, draw: Callable[[], InputWindows], device: Measuring, allocate: Callable[[], None]
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
    belief = believed(task, one.work, device.roofline, paired)
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
