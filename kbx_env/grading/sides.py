"""The two sides of a comparison: torch eager in the grader's process, and a submission in its runner, whose times are claims."""

from __future__ import annotations

import math
import random
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from kbx_env.grading import judge as judges
from kbx_env.grading import reference
from kbx_env.grading.calls import Stopped, Talk, readable
from kbx_env.grading.fresh import Ring, Turn
from kbx_env.outcome import Verdict, Violation
from kbx_env.sandbox.stopwatch import Stopwatch
from kbx_env.task import Case, GeneratorArg, Task
from kbx_env.wire import assembled

SLOTS = 3
"""Sets of buffers that rotate."""
PREPARE_SECONDS = 120.0
"""For compilation and autotuning, once for each timed case; nothing is tuned after that."""
COMMAND_SECONDS = 60.0
GRAPH_CALLS = (12, 24)
"""Calls in one graph: at least and at most, drawn in secret."""
GRAPH_BYTES = 2 << 30
"""Results that one graph may hold, if three calls fit."""
JUDGED, JUDGED_BYTES = 3, 64 << 20
"""Captured calls that are judged, and results up to which all are."""
AUDITS = 3
"""Attempts at the audit; one that fits is enough."""
AUDIT_US = 100_000.0
"""Length of the back-to-back run: long beside the milliseconds that one command to a runner takes."""
SLACK, GAP_US = 1.3, 10.0
"""A replayed graph may take this factor of the claimed device time plus this per call under the grader's clock."""
HOST_SLACK, HOST_US = 2.0, 1000.0
"""The same where a call reads back to the host and no graph can be captured: Python's launches count as well."""


class Side(Protocol):
    """Something that can be timed."""

    def shuffle(self, seed: int) -> None:
        """Move the buffers."""

    def measure(self, order: Sequence[int], turns: Sequence[Turn] | None = None, flush: bool = True) -> list[float]:
        """Device microseconds of each call: ``turns`` are the values of an untimed call and then of each in ``order``."""


class EagerSide:
    """Torch eager, in the grader's own process, with TF32 off as the contracts demand."""

    def __init__(self, task: Task, case: Case, device: str = "cuda", watch: Stopwatch | None = None) -> None:
        self.task, self.case = task, case
        self.watch = watch or Stopwatch(device)
        self.device = device
        self._function = task.eager or task.reference

    def prepare(self, draws: Sequence[dict[str, Any]] | Ring) -> None:
        """Take inputs and warm up."""
        given = draws.draws if isinstance(draws, Ring) else draws
        turning = draws.turning if isinstance(draws, Ring) else None
        mine = [reference.resolve(d, self.device, generator_seed=i) for i, d in enumerate(given)]
        with reference.exact_matmul():
            self.watch.prepare(lambda s: self._function(**assembled(s)), mine, slots=SLOTS, turning=turning)

    def shuffle(self, seed: int) -> None:
        """See ``Side``."""
        with reference.exact_matmul():
            self.watch.shuffle(seed)

    def measure(self, order: Sequence[int], turns: Sequence[Turn] | None = None, flush: bool = True) -> list[float]:
        """See ``Side``."""
        with reference.exact_matmul():
            got = self.watch.measure({"order": list(order), "turns": turns, "flush": flush})
        return [float(u) for u in got["us"]]


class RunnerSide:
    """A submission in its runner. Every time it tells is held against the grader's own clock."""

    def __init__(self, talk: Talk, case: Case) -> None:
        self.talk, self.case = talk, case

    def _ask(self, header: dict[str, Any], blobs: list[bytes] | None = None, seconds: float = COMMAND_SECONDS) -> Any:
        self.talk.left = seconds
        return self.talk.ask({"op": "time"} | header, blobs)

    def prepare(self, draws: Sequence[dict[str, Any]] | Ring) -> None:
        """Take inputs and warm up; autotuning may take its time here."""
        blobs: list[bytes] = []
        ring = draws if isinstance(draws, Ring) else None
        given = draws.draws if isinstance(draws, Ring) else draws
        messages = [self.talk.header(d, 1000 + i, blobs) for i, d in enumerate(given)]
        header = {"do": "prepare", "slots": [m["args"] for m in messages], "count": SLOTS}
        header |= {"entry": messages[0]["entry"], "positional": messages[0]["positional"]}
        header |= {"turning": ring.turning if ring else None, "written": list(self.talk.task.written(self.case.args))}
        self._ask(header, blobs, PREPARE_SECONDS)

    def shuffle(self, seed: int) -> None:
        """See ``Side``."""
        self._ask({"do": "shuffle", "seed": seed})

    def measure(self, order: Sequence[int], turns: Sequence[Turn] | None = None, flush: bool = True) -> list[float]:
        """See ``Side``.

        Raises:
            Stopped: times that the wall clock contradicts, or an autotuner at work.
        """
        start = time.perf_counter()
        reply, _ = self._ask({"do": "measure", "order": list(order), "turns": turns, "flush": flush})
        wall_us = (time.perf_counter() - start) * 1e6
        with readable():
            us = [float(u) for u in reply["us"]]
            tuned = int(reply.get("tuned", 0))
        right = len(us) == (len(order) if flush else 1) and min(us) > 0 and all(map(math.isfinite, us))
        if not right or sum(us) > wall_us:
            raise _refused("times that do not fit the wall clock")
        if tuned:
            raise _refused("an autotuner measured its configurations again in a timed call")
        return us

    def capture(self, result_bytes: int = 0) -> int:
        """Have a graph of calls captured, on slots and in a number that nobody knows before; how many, or 0 where that is
        not possible."""
        rng = random.Random(secrets.randbits(64))
        most = max(SLOTS, min(GRAPH_CALLS[1], GRAPH_BYTES // max(1, result_bytes)))
        count = rng.randint(min(GRAPH_CALLS[0], most), most)
        order = [rng.randrange(SLOTS) for _ in range(count)]
        self._order = order
        return count if bool(self._ask({"do": "capture", "order": order})[0].get("captured")) else 0

    def audit(self, claimed_us: float, captured: int) -> None:
        """Run back to back under the grader's own clock: device work cannot hide from it."""
        reps = max(5, min(10_000 if captured else 200, int(AUDIT_US / max(claimed_us, 1.0))))
        graphs = 0
        if captured:
            graphs = max(1, reps // captured)
            reps = graphs * captured
        slack, more = (SLACK, GAP_US) if captured else (HOST_SLACK, HOST_US)
        walls = []
        # Work that hides from the clock is there every time; a hiccup of the host is not.
        for _ in range(AUDITS):
            start = time.perf_counter()
            if captured:
                self._ask({"do": "replay", "times": graphs})
            else:
                self.measure([i % SLOTS for i in range(reps)], flush=False)
            walls.append((time.perf_counter() - start) * 1e6 / reps)
            if walls[-1] <= slack * claimed_us + more:
                return
        raise _refused(f"claims {claimed_us:.0f} us a call, {reps} calls in a row took {min(walls):.0f} us each")

    def verify_graph(self, task: Task, ring: Ring, result_bytes: int) -> None:
        """Replay the captured calls once on new values and judge what secret ones of them left behind."""
        rng = random.Random(secrets.randbits(64))
        turns = [ring.pick(rng) for _ in range(SLOTS)]
        self._ask({"do": "replay", "times": 1, "turns": {str(i): t for i, t in enumerate(turns)}})
        count = len(self._order)
        few = JUDGED if count * result_bytes > JUDGED_BYTES else count
        known: dict[int, Any] = {}
        for k in rng.sample(range(count), min(count, few)):
            slot = self._order[k]
            args = known.setdefault(slot, ring.args(turns[slot]))
            self.verify(task, args, slot, captured=k)

    def verify(self, task: Task, args: Mapping[str, Any], slot: int, captured: int | None = None) -> None:
        """Judge what the last timed call on this slot returned, or a captured call.

        Raises:
            Stopped: it is wrong.
        """
        reply, data = self._ask({"do": "result", "slot": slot, "captured": captured}, seconds=2 * COMMAND_SECONDS)
        with readable():
            answer, broken = self.talk._answer(reply, data)
        if broken is None and not any(isinstance(v, GeneratorArg) for v in args.values()):
            ruling = judges.judge(task, self.case, args, [answer] * judges.calls_needed(task, self.case),
                                  device=self.talk.backend, generator_seeds=[0, 0, 1], timed=True)  # fmt: skip
            broken = None if ruling.passed else ruling.reason
        if broken:
            how = "timed call" if captured is None else "captured call"
            raise Stopped(Verdict.INCORRECT, f"{how} wrong ({self.case.label()}): {broken}")


def _refused(detail: str) -> Stopped:
    return Stopped(Verdict.REJECTED, detail, [Violation("clock", detail)])
