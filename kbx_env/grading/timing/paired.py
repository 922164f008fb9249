"""Speedup over torch eager on the same device in the same minute: interleaved, paired, verified.

Candidate (in its runner) and eager (in the grader) take turns in short blocks, each call after an L2 flush, on rotating
buffers and on values that no call has seen. A round is a few such pairs with the buffers in one place; then both sides move
theirs. The rounds' mean log-ratios are independent, so that Student's interval over them covers what placement does.
The timed calls are checked calls: of every block the result of a secret one may be judged, as it was at its end event.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kbx_env.grading import compulsory_work, inputs, reference
from kbx_env.grading.runtime.session import RunnerSession
from kbx_env.grading.runtime.untrusted import GradingAborted
from kbx_env.grading.sizes import timed
from kbx_env.grading.timing import input_windows
from kbx_env.grading.timing import roofline as rooflines
from kbx_env.grading.timing.contestants import SLOTS, EagerSide, Fetched, RunnerSide, Side, faster_on_host
from kbx_env.grading.timing.input_windows import InputWindows, Window
from kbx_env.grading.timing.ratio import PROCESS_US, Paired, interval, middle
from kbx_env.grading.timing.roofline import Roofline
from kbx_env.grading.timing.telemetry import Reading, Telemetry, disturbance
from kbx_env.outcome import CaseTime, Timing, Verdict, Violation
from kbx_env.spec.criteria import Sample, Windows
from kbx_env.spec.task import Case, Task

__all__ = ["SLOTS", "EagerSide", "Paired", "RunnerSide", "Side", "interval", "pair", "time_task"]

BLOCK = 5
"""Calls in one block."""
PAIRS = 2
"""Pairs of blocks in one round."""
MIN_ROUNDS, MAX_ROUNDS = 6, 24
CLEAR, FEW, WIDE, QUIET = math.log(2.0), 4, 0.015, 0.005
"""Stop after FEW rounds if the half-width of the interval is below QUIET (log units). Where the interval lies wholly beyond a
factor of two from eager, on either side, below WIDE or below SMALL of the log-ratio is enough."""
SMALL = 0.01
"""Rewards are logarithms of the speedup: one per cent of a kernel's own."""
HELD, HELD_BYTES = 24, 256 << 20
"""Results of timed calls that are judged, for each case: at most, and together, but never fewer than three."""
BUDGET = 1.0
"""Seconds of measuring per case: what is noisier than that for its process' sake does not become quiet in three."""
WIDTH = 0.01
"""Stop when half the 95 % interval of the log-ratio is narrower."""
COMPILING, MEASURING, JUDGING = 10, 24, 20
"""Times its inputs that each step of timing a case takes of the device's memory at most: laying out the values to compile for,
measuring (per side two draws, three slots, and room to move them), judging. Compiling itself keeps some three times, and holds
no room: a compiler may take minutes, and the next one who needs much room would keep everybody else waiting behind it."""
CONTEXT_BYTES = 1400 << 20
"""Of the device's memory that each process takes for its CUDA context and the kernels that torch loads (1.2 to 1.4 GiB on an
H200); graders and runners each have one, and none of it is anybody's to give away."""
SHARE = 0.3
"""Of the device's memory, for all who compile for timing or judge what was timed. Who measures is alone and has the rest."""
SLOW_US = 20_000.0
"""Two blocks of calls that take longer than this have fewer calls; where two calls do, a round is one pair."""
EARLY = 0.003
"""Share of the device's memory that one grading may hold in values while it stands in line."""
ATTEMPTS = 3
"""Measurements of a case that something disturbs, or whose time is too good to be true; the last is kept, and says so."""
LONG_US = 100.0
"""Of two calls that take longer than this together a round is one pair of blocks: they differ little from block to block."""
JUDGE_TURN = 0.5
"""Seconds of judging on the GPU after which those are let in who wait for it."""
JUDGE_SECONDS, JUDGE_LEAST = 0.75, 3
"""Seconds after which no further result of a case's timed calls (and of its captured calls) is judged, once so many are. Chance
decides which ones they are, after all calls were made: a call that is wrong now and then cannot know whether it is looked at."""


Check = Callable[[list[int], list[Window]], None]
"""May look at what the calls just measured have returned: slots and windows, in order."""


def pair(
    a: Side,
    b: Side,
    *,
    ring: InputWindows | None = None,
    check: Check | None = None,
    budget: float = BUDGET,
    about_us: float = 0.0,
    on_turn: Any = None,
) -> Paired:
    """Time two prepared sides in turns; log_ratio = log(a / b): positive when ``b`` is faster.

    Args:
        a: the baseline.
        b: the candidate.
        ring: where every call's values come from; without it they stay what they are.
        check: called after every measurement of ``b``.
        budget: seconds of measuring after which no round begins.
        about_us: what both together take at least, if it is known before the first call.
        on_turn: called with the number of rounds.
    """
    rounds: list[float] = []
    all_a: list[float] = []
    all_b: list[float] = []
    blocks: list[float] = []
    start = time.monotonic()
    rng = random.Random(secrets.randbits(64))
    turns: list[Window] | None = None
    block, pairs, taken, both = _calls(about_us), 1 if about_us > LONG_US else PAIRS, 0, 0.0
    while len(rounds) < MAX_ROUNDS:
        # A block of one call has its slot warmed by the untimed call before it.
        for side in (a, b):
            side.shuffle(rng.getrandbits(32), block > 1)
        ratios = []
        for turn in range(pairs):
            order = [rng.randrange(SLOTS) for _ in range(block)]
            if ring is not None:
                turns = [ring.pick(rng) for _ in range(block + 1)]
            # Who goes first changes, so that a drift of the clock frequency favours nobody.
            if turn % 2:
                got_b = b.measure(order, turns)
                start += _checked(check, order, turns)
                got_a = a.measure(order, turns)
            else:
                got_a, got_b = a.measure(order, turns), b.measure(order, turns)
                start += _checked(check, order, turns)
            taken += 1
            all_a += got_a
            all_b += got_b
            # Of calls that last long one tells what five tell of short ones, and others wait for the GPU.
            both = max(got_a) + max(got_b)
            block = min(block, _calls(both))
            blocks.append(math.log(middle(got_a)))
            ratios.append(math.log(middle(got_a) / middle(got_b)))
        rounds.append(middle(ratios))
        if len(rounds) >= FEW:
            centre, low, high = interval(rounds, math.inf)
            _, least, most = interval(rounds, min(*all_a, *all_b))
            clear = most < -CLEAR or least > CLEAR
            if (high - low) / 2 < (max(WIDE, SMALL * abs(centre)) if clear else QUIET):
                break
        block, pairs = _calls(both), 1 if both > LONG_US else PAIRS
        if on_turn:
            on_turn(len(rounds))
        if len(rounds) >= MIN_ROUNDS:
            spread = interval(rounds, math.inf)
            # What no repetition averages out makes narrower ones pointless.
            enough = max(WIDTH, 0.5 * 1.96 * PROCESS_US / min(float(np.median(all_a)), float(np.median(all_b))))
            if (spread[2] - spread[1]) / 2 < enough or time.monotonic() - start > budget:
                break
    us_a, us_b = float(np.median(all_a)), float(np.median(all_b))
    ratio, low, high = interval(rounds, min(us_a, us_b))
    return Paired(us_a, us_b, ratio, low, high, taken, math.exp(sum(blocks) / len(blocks)))


def _calls(both_us: float) -> int:
    """In a block, of two sides that take so long together."""
    return max(1, min(BLOCK, int(SLOW_US / max(both_us, 1.0))))


def _checked(check: Check | None, order: list[int], turns: list[Window] | None) -> float:
    """Seconds that a check took."""
    if check is None:
        return 0.0
    began = time.monotonic()
    check(order, (turns or [{}] * (len(order) + 1))[1:])
    return time.monotonic() - began


def time_task(task: Task, talk: RunnerSession, sizes: str = "published") -> Timing:
    """Time every timing case of a task that the device's memory holds: none may be missing.

    Args:
        task: the task.
        talk: to the loaded submission.
        sizes: which timing cases, one of ``grading.sizes.SIZES``.

    Raises:
        GradingAborted: a timed call was wrong or failed, or the claimed times cannot be true.
    """
    memory = torch.cuda.get_device_properties(0).total_memory
    cases = compulsory_work.fitting(task, memory, timed(task, sizes))
    # Which cases are timed must not depend on who else is there; what is shared out does.
    memory = max(memory // 2, memory - CONTEXT_BYTES * len(talk.gpu.living()))
    # Of a task without inputs the results count.
    needed = [max(compulsory_work.input_bytes(task, c), int(compulsory_work.declared_bytes(task, c) or 0)) for c in cases]
    largest = max(needed)
    sides = [RunnerSide(talk, case) for case in cases]
    needs: list[_Needs] = []

    def draw(index: int, purpose: str) -> InputWindows:
        split = f"{talk.split}/{purpose}"
        seeds = [inputs.case_seed(talk.secret, task.id, split, index, k) for k in range(input_windows.MORE)]
        return InputWindows.draw(task, cases[index], seeds, talk.backend)

    # Everything is compiled before anybody has to wait; on values of its own, which no timed call sees again. Nothing of
    # it stays in memory while others are waited for.
    early, kept = dict[int, InputWindows](), 0
    for index, side in enumerate(sides):
        with talk.gpu.room(COMPILING * needed[index] / (SHARE * memory)), talk.gpu.using():
            ring = draw(index, "compile")
            side.lay(ring, slots=1)
            # The reference's first call loads torch's kernels, too: nobody waits for that while the GPU is held exclusively.
            needs.append(_Needs.of(task, side.case, ring.draws[0], talk.backend))
            del ring
            # Values that are slow to draw (eigenvectors of thousands of small matrices) are small.
            size = input_windows.ring_bytes(compulsory_work.input_bytes(task, side.case))
            if kept + size <= EARLY * memory:
                kept += size
                early[index] = draw(index, "time")
            _give_back()
        side.dry()
    sides[-1].release()

    def drawn(index: int) -> InputWindows:
        return early.pop(index, None) or draw(index, "time")

    # The few that need more than the rest take it from the others before they stand in line: nobody waits for room alone.
    more = (MEASURING * largest - (1 - SHARE) * 0.8 * memory) / (SHARE * memory)
    with talk.gpu.room(more) if more > 0 else contextlib.nullcontext():
        measured, rest = _measured_all(task, talk, sides, needs, drawn)
    # The GPU is free for the next one while results are looked at.
    rows = []
    for one, size in zip(measured, needed, strict=True):
        with talk.gpu.room(JUDGING * size / (SHARE * memory)):
            rows.append(_told(task, one, rest))
            _give_back()
    return _summed(measured, rows, rest)


def _give_back() -> None:
    """What torch keeps for later, others need now."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class _Needs:
    """What any right kernel needs in one case.

    Attributes:
        result_bytes: of a right result.
        kept_bytes: of a right result and of what is written in place.
        ideal: compulsory traffic in bytes.
        operations: that the task must do.
        tensor_bytes: of all arguments and results, needed or not.
    """

    result_bytes: int
    kept_bytes: int
    ideal: int
    operations: int
    tensor_bytes: int

    @classmethod
    def of(cls, task: Task, case: Case, args: dict[str, Any], backend: str) -> _Needs:
        """From one draw of the case; every other draw needs as much."""
        expected = reference.expect(task, case, args, backend, exact=False)
        result_bytes = sum(o.numel() * o.element_size() for o in expected.native)
        kept_bytes = result_bytes + sum(o.numel() * o.element_size() for o in expected.native_written.values())
        ideal = compulsory_work.ideal_bytes(task, case, args, expected)
        tensor_bytes = kept_bytes + sum(v.numel() * v.element_size() for v in args.values() if isinstance(v, torch.Tensor))
        return cls(result_bytes, kept_bytes, ideal, compulsory_work.flops(task, case, args), tensor_bytes)


@dataclass(frozen=True)
class _Around:
    """What holds for all cases of one timing."""

    roofline: Roofline
    before: Reading | None
    after: Reading | None
    notes: list[str]


def _measured_all(
    task: Task, talk: RunnerSession, sides: Sequence[RunnerSide], needs: Sequence[_Needs], drawn: Callable[[int], InputWindows]
) -> tuple[list[_Measured], _Around]:  # fmt: skip
    """What needs the GPU alone, for every case."""
    uuid = getattr(torch.cuda.get_device_properties(0), "uuid", None)
    telemetry = Telemetry(None if uuid is None else str(uuid))

    measured: list[_Measured] = []
    notes: list[str] = []
    with talk.gpu.alone():
        found = rooflines.roofline("cuda", talk.gpu.file(f"ceilings-{torch.__version__}.json"))
        before = telemetry.read()
        for index, side in enumerate(sides):
            eager = EagerSide(task, side.case, talk.backend)
            try:
                measured.append(_measure(task, side, eager, drawn(index), needs[index], found, telemetry, notes))
            finally:
                eager.watch.close()
            _give_back()
        after = telemetry.read()
        sides[-1].release()
    return measured, _Around(found, before, after, notes)


def _summed(measured: Sequence[_Measured], rows: Sequence[CaseTime], around: _Around) -> Timing:
    """The speedup over all cases."""
    parts = [one.paired for one in measured]
    n = len(parts)
    middle = sum(p.log_ratio for p in parts) / n
    # Independent cases: the half-widths of the mean add in quadrature.
    down = math.sqrt(sum((p.log_ratio - p.low) ** 2 for p in parts)) / n
    up = math.sqrt(sum((p.high - p.log_ratio) ** 2 for p in parts)) / n
    floors = [r.eager_us / r.floor_us for r in rows if r.floor_us]
    ratio = math.exp(sum(map(math.log, floors)) / len(floors)) if floors else None
    return Timing(
        speedup=math.exp(middle), low=math.exp(middle - down), high=math.exp(middle + up), floor_ratio=ratio,
        cases=tuple(rows), device=torch.cuda.get_device_name(0), before=around.before.to_dict() if around.before else None,
        after=around.after.to_dict() if around.after else None, notes=tuple(around.notes),
        roofline=around.roofline.to_dict(),
    )  # fmt: skip


@dataclass(frozen=True)
class _Measured:
    """One case: its times, and results of calls that were timed, still to be judged."""

    side: RunnerSide
    ring: InputWindows
    paired: Paired
    needs: _Needs
    disturbed: bool
    held: list[tuple[Window, Fetched]]


def _measure(
    task: Task, mine: RunnerSide, eager: EagerSide, ring: InputWindows, needs: _Needs, roofline: Roofline, telemetry: Telemetry,
    notes: list[str],
) -> _Measured:  # fmt: skip
    """What needs the GPU alone."""
    talk, case = mine.talk, mine.case
    result_bytes = needs.result_bytes
    about_us = eager.prepare(ring)
    mine.lay(ring, result_bytes)
    mine.warm()
    held: list[tuple[Window, Fetched]] = []
    # What is kept until the GPU is free again; chance decides on the host, and takes its time.
    most = 3 if isinstance(task.truth, Sample | Windows) else max(3, min(HELD, HELD_BYTES // max(1, needs.kept_bytes)))
    seen = 0

    def check(order: list[int], turns: list[Window]) -> None:
        # Any timed call may be judged, and which one a runner learns after all of its block: who works only now and then
        # is found out. Of more calls than are kept each stays with the same chance.
        nonlocal seen
        seen += 1
        place = len(held) if len(held) < most else secrets.randbelow(seen)
        if place < most:
            k = secrets.randbelow(len(order))
            # Inputs may be large; now and then is often enough to see that a call leaves them alone.
            inputs = order[k] not in order[k + 1 :] and secrets.randbelow(4) == 0
            held[place : place + 1] = [(turns[k], mine.fetch(k, inputs=inputs))]

    for attempt in range(1, ATTEMPTS + 1):
        # Of what was measured in vain nothing is judged: else who is wrong now would hide behind who was right then.
        held.clear()
        seen = 0
        first = telemetry.read()
        paired = pair(eager, mine, ring=ring, check=check, about_us=about_us)
        ours = {os.getpid(), talk.runner.pid, *talk.gpu.users()}
        disturbed = disturbance(first, telemetry.read(), ours) or _torn(paired)
        again = disturbed or _belief(task, needs, roofline, paired).doubt
        if again is None:
            break
        if attempt < ATTEMPTS:
            notes.append(f"{case.label()}: measured again: {again}")
    else:
        if disturbed is not None:
            notes.append(f"{case.label()}: disturbed in {ATTEMPTS} attempts: {disturbed}")
    if paired.torn:
        paired = paired.by_most_calls()
    claimed = _claimed(paired)
    captured = mine.capture(result_bytes, claimed)
    mine.audit(claimed, captured)
    if captured and not task.written(case.args):
        # A call that behaves otherwise while it is captured must be right all the same.
        held += mine.replayed(ring, result_bytes)
    return _Measured(mine, ring, paired, needs, disturbed is not None, held)


def _claimed(paired: Paired) -> float:
    """Microseconds of a candidate's call that its speedup amounts to: most calls may take longer where few decide the ratio."""
    return min(paired.b_us, paired.a_us * math.exp(-paired.log_ratio))


def _torn(paired: Paired) -> str | None:
    """What is wrong where few calls of eager decide the ratio. A submission's own calls give it no second try."""
    return f"eager took {paired.a_us:.1f} us in most calls, {paired.a_mean_us or 0:.1f} in the mean" if paired.torn else None


@dataclass(frozen=True)
class _Belief:
    """What the roofline says of one case's times.

    Attributes:
        floor_us: microseconds below which no kernel can run; ``None`` where that is not known, or proved wrong.
        doubt: why the case is measured again; ``None`` where nothing is odd.
        impossible: the candidate beats what physics allows, and eager does not.
        void: the candidate's time is too good to be believed, but not proved to be a lie.
    """

    floor_us: float | None
    doubt: str | None = None
    impossible: bool = False
    void: bool = False


def _belief(task: Task, needs: _Needs, roofline: Roofline, paired: Paired) -> _Belief:
    """Hold both times against the roofline.

    Eager is ours and honest. If it beats the floor, the floor is wrong: then the candidate is not held against it.
    """
    claimed, floor_us = _claimed(paired), roofline.floor_us(needs.ideal, needs.operations, rooflines.operand_of(task))
    if floor_us is None:
        likely = roofline.likely_us(needs.ideal)
        if likely is None or claimed >= rooflines.PLAUSIBLE * likely or paired.a_us < likely:
            return _Belief(None)
        return _Belief(None, f"{claimed:.1f} us; by the measured copy {likely:.1f} us would be needed", void=True)
    if paired.a_us < rooflines.IMPOSSIBLE * floor_us:
        why = f"the floor of {floor_us:.1f} us is wrong: eager itself took {paired.a_us:.1f} us"
        return _Belief(None, why)
    if claimed < rooflines.IMPOSSIBLE * floor_us:
        return _Belief(floor_us, f"{claimed:.1f} us, the device needs {floor_us:.1f} us to move the data", impossible=True)
    share = floor_us / claimed
    if share > max(rooflines.PLAUSIBLE, rooflines.BESIDE_EAGER * floor_us / paired.a_us):
        return _Belief(floor_us, f"{claimed:.1f} us is {share:.2f} of the roofline", void=True)
    return _Belief(floor_us)


def _judge(task: Task, one: _Measured, held: Sequence[tuple[Window, Fetched]]) -> None:
    """Judge results of timed calls in a random order, for ``JUDGE_SECONDS``, but ``JUDGE_LEAST`` of them in any case.

    Raises:
        GradingAborted: one of them is wrong.
    """
    mine, gpu = one.side, one.side.talk.gpu
    hosted = faster_on_host(task, one.needs.tensor_bytes, one.paired.a_us)
    left = random.Random(secrets.randbits(64)).sample(held, len(held))
    judged, spent = 0, 0.0  # waiting for the GPU is not judging: a busy machine must not look at fewer results
    while left and (judged < JUDGE_LEAST or spent < JUDGE_SECONDS):
        # On the host nobody is kept from the GPU; on the GPU several results are judged in one turn.
        with contextlib.nullcontext() if hosted else gpu.using():
            began, before = time.monotonic(), spent
            while left and (judged < JUDGE_LEAST or spent < JUDGE_SECONDS):
                turn, fetched = left.pop()
                with gpu.using():
                    given = one.ring.args(turn)
                mine.rule(task, given, fetched, hosted)
                judged, spent = judged + 1, before + time.monotonic() - began
                if spent - before > JUDGE_TURN:
                    break


def _told(task: Task, one: _Measured, around: _Around) -> CaseTime:
    """Judge what timed calls returned, and hold the times against what the device can do.

    Raises:
        GradingAborted: a timed call was wrong, or the claimed time is impossible.
    """
    case, paired, notes = one.side.case, one.paired, around.notes
    for captured in (False, True):
        _judge(task, one, [h for h in one.held if h[1].captured is captured])
    belief = _belief(task, one.needs, around.roofline, paired)
    if belief.impossible and not one.disturbed:
        detail = f"{case.label()}: {belief.doubt}"
        raise GradingAborted(Verdict.REJECTED, detail, [Violation("impossible_speed", detail)])
    if belief.doubt is not None:
        notes.append(f"{case.label()}: in {ATTEMPTS} attempts {belief.doubt}{'; not believed unexplained' if belief.void else ''}")
    return CaseTime(
        case=case.label(), eager_us=round(paired.a_us, 3), candidate_us=round(paired.b_us, 3),
        speedup=math.exp(paired.log_ratio), low=math.exp(paired.low), high=math.exp(paired.high), pairs=paired.pairs,
        floor_us=round(belief.floor_us, 3) if belief.floor_us else None, disturbed=one.disturbed,
        void=belief.void or belief.impossible, ideal_bytes=one.needs.ideal, flops=one.needs.operations,
    )  # fmt: skip
