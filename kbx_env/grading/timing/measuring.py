"""Measures the cases of one submission while the GPU is held alone.

The results of timed calls that will be judged are kept meanwhile; other gradings use the GPU while they are judged.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from kbx_env.device.driver import KEPT_BYTES, KEPT_CACHE_BYTES, give_back, preallocate_outside_pool
from kbx_env.device.stopwatch import AMPLE_GRAPH_RESERVE_BYTES, FLUSH_BYTES, Stopwatch, pool_bytes
from kbx_env.grading import inputs
from kbx_env.grading.runtime.session import RunnerSession
from kbx_env.grading.runtime.untrusted import GradingAborted
from kbx_env.grading.timing import input_windows
from kbx_env.grading.timing import roofline as rooflines
from kbx_env.grading.timing.case_work import CaseWork, slots_of
from kbx_env.grading.timing.contestants import (
    JUDGED,
    SLOTS,
    EagerContestant,
    Fetched,
    RunnerContestant,
    bytes_beside_slots,
)
from kbx_env.grading.timing.input_windows import InputWindows, Window
from kbx_env.grading.timing.paired import pair
from kbx_env.grading.timing.plausibility import believed, claimed_us, skewed
from kbx_env.grading.timing.precision import Precision
from kbx_env.grading.timing.ratio import Paired
from kbx_env.grading.timing.reservations import free_bytes
from kbx_env.grading.timing.roofline import Roofline
from kbx_env.grading.timing.telemetry import Reading, Telemetry, disturbance, strangers
from kbx_env.spec.criteria import Sample, Windows
from kbx_env.spec.task import Task

MAX_KEPT_RESULTS, MAX_KEPT_BYTES = 24, 256 << 20
"""Results of timed calls that are kept for the judge, for each case: their number and bytes, but never fewer than
three."""
LATE_FREE_BYTES = 40 << 30
"""Free device memory beside which a grading gives its own back only after it has left the GPU: more than the next one may need (see
``task_timing.MEASURED_MEMORY``)."""
AMPLE = 1.25
"""Memory is ample for a case if so many times as much is free as both processes will ask for."""
LIKELY_RESULTS, PREALLOCATED_BYTES, AMPLE_RESULTS_BYTES = 8, 256 << 20, 8 << 30
"""Results of a case that wait for the judge in training precision, and most bytes of them for which the driver is asked at once:
usually, and where there is ample memory."""
ATTEMPTS = 3
"""Measurements of a case that was disturbed or whose time is too good to be true; the last is kept, with a note."""


@dataclass(frozen=True)
class Measured:
    """One case: its times, and results of timed calls that are still to be judged."""

    candidate: RunnerContestant
    paired: Paired
    work: CaseWork
    disturbed: bool
    results: list[tuple[Window, Fetched]]
    after: Reading | None
    host_bound: bool = False  # of eager

    @property
    def kept_bytes(self) -> int:
        """Bytes of device memory of the results."""
        return sum({at: size for _, fetched in self.results for at, size in fetched.storages.items()}.values())


@dataclass
class Measuring:
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
        self, candidates: Sequence[RunnerContestant], work: Sequence[CaseWork], first: int
    ) -> list[Measured]:  # fmt: skip
        """Measure cases until their results need more memory than ``kept_bytes``, at least one.

        Args:
            candidates: the submission, for each case that is left.
            work: of each of these cases.
            first: index of the first of them.

        Returns:
            The measurements, in the order of the cases.
        """
        telemetry, session = device_telemetry(), candidates[0].session
        measured: list[Measured] = []
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
                if ample and not quiet and free_bytes() >= LATE_FREE_BYTES:
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

    def _kept(self, work: CaseWork) -> tuple[int, bool]:
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

    def bytes_to_judge(self, work: CaseWork) -> int:
        """Return how much device memory the results of a case may take until they are judged, in bytes."""
        most, few_inputs = self._kept(work)
        timed_calls = most * work.kept_bytes + (1 if few_inputs else most) * work.input_bytes
        return timed_calls + JUDGED * work.result_bytes + (1 if few_inputs else SLOTS) * work.input_bytes

    def _memory(self, eager: EagerContestant, work: CaseWork) -> tuple[int, int, int]:
        """Return what memory a case takes in this process, as ``Stopwatch.preallocate`` takes it.

        Args:
            eager: the baseline of the case.
            work: of the case.
        """
        described = inputs.described(self.task, eager.case).values()
        input_bytes = sum(v.untyped_storage().nbytes() for v in described if isinstance(v, torch.Tensor))
        return input_bytes, slots_of(work), input_windows.bytes_of_draws(input_bytes)

    def _preallocate(self, eager: EagerContestant, work: Sequence[CaseWork], ample: bool | None) -> bool:
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

    def _is_ample(self, memory: tuple[int, int, int], work: CaseWork, results: int) -> bool:
        """Return whether so much memory is free that both processes may ask for more than usual at once.

        Args:
            memory: of the case in this process, as ``_memory`` returns it.
            work: of the case.
            results: bytes of results that are asked for at once.
        """
        slot_bytes, slots, others = memory
        pool, of_runner = pool_bytes(slots * slot_bytes), bytes_beside_slots(others, work.kept_bytes)
        asked = 2 * (pool + FLUSH_BYTES) + others + of_runner
        return AMPLE * (asked + AMPLE_GRAPH_RESERVE_BYTES + max(results, self.bytes_to_judge(work))) <= free_bytes()

    def _drawn(
        self, candidate: RunnerContestant, eager: EagerContestant, index: int, work: CaseWork, telemetry: Telemetry,
        before: Reading | None, whole: bool, ample: bool,
    ) -> Measured:  # fmt: skip
        """Draw the values of a case, and measure it; arguments as for ``_case``, ``index`` is that of the case."""
        try:
            # Each step frees what the next one does not need, if it is much: the largest cases take half of a GPU.
            if not eager.watch.pooled:
                give_back(KEPT_CACHE_BYTES)
            return self._case(candidate, eager, self.draw(index), work, telemetry, before, whole, ample)
        finally:
            eager.watch.clear()

    def _case(
        self, candidate: RunnerContestant, eager: EagerContestant, windows: InputWindows, work: CaseWork,
        telemetry: Telemetry, before: Reading | None, whole: bool, ample: bool,
    ) -> Measured:  # fmt: skip
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
        slots = slots_of(work)
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
            captured = candidate.capture(result_bytes, claimed_us(paired), self.precision.graph_us)  # beside the reading
            after = pending.result()
            for reading in (first, after):
                self._look_for_strangers(reading, session)
            disturbed = disturbance(first, after, own_pids) or skewed(paired)
            again = disturbed or believed(self.task, work, self.roofline, paired).doubt
            if again is None or attempt == ATTEMPTS:
                if disturbed is not None:
                    self.notes.append(f"{case.label()}: disturbed in {ATTEMPTS} attempts: {disturbed}")
                if paired.skewed:
                    paired = paired.by_medians()
                claimed = claimed_us(paired)
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
        return Measured(candidate, paired, work, disturbed is not None, results, after, eager.host_bound)


def device_telemetry() -> Telemetry:
    """Return the telemetry of the device on which this process grades.

    Returns:
        Readings of clocks, temperature, and who computes.
    """
    uuid = getattr(torch.cuda.get_device_properties(0), "uuid", None)
    return Telemetry(None if uuid is None else str(uuid))
