"""The two sides of a comparison: torch eager in the grader's process, and a submission in its runner, whose times are claims."""

from __future__ import annotations

import contextlib
import math
import random
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch

from kbx_env.device.ipc_grader import IpcReceiver, claimed
from kbx_env.device.layout import flat
from kbx_env.device.stopwatch import Stopwatch
from kbx_env.grading import judge as judges
from kbx_env.grading import reference
from kbx_env.grading.judge import Answer
from kbx_env.grading.runtime.session import RunnerSession
from kbx_env.grading.runtime.untrusted import GradingAborted, count, readable
from kbx_env.grading.runtime.zygote_client import TIMED_BYTES
from kbx_env.grading.timing.input_windows import InputWindows, Window
from kbx_env.outcome import Verdict, Violation
from kbx_env.protocol import wire
from kbx_env.protocol.wire import assembled
from kbx_env.spec.criteria import Close, Invariant
from kbx_env.spec.task import Case, GeneratorArg, Task

SLOTS = 3
"""Sets of buffers that rotate."""
PREPARE_SECONDS = 120.0
"""For compilation and autotuning, once for each timed case; nothing is tuned after that."""
COMMAND_SECONDS = 60.0
GRAPH_CALLS = (12, 24)
"""Calls in one graph: at least and at most, drawn in secret."""
GRAPH_BYTES = 2 << 30
"""Results that one graph may hold, if three calls fit."""
GRAPH_US = 200_000.0
"""Length of one graph, if three calls fit: it runs at least three times while nobody else may use the GPU."""
JUDGED, JUDGED_BYTES = 3, 64 << 20
"""Captured calls that are judged, and results up to which all are."""
AUDITS = 3
"""Attempts at the audit; one that fits is enough."""
AUDIT_US, AGAIN_US = 15_000.0, 100_000.0
"""Length of the back-to-back run, and when it is repeated: long beside the milliseconds that one command to a runner takes."""
ROOM = 1 << 20
"""Bytes beside those of the tensors, for where they begin."""
SLACK, GAP_US = 1.3, 10.0
"""A replayed graph may take this factor of the claimed device time plus this per call under the grader's clock."""
SLOW_ON_GPU_US, SLOW_LEAST_BYTES = 2000.0, 1 << 17
"""Microseconds of eager for each MiB of arguments and results from which a result is judged on the host. Solvers of small matrices
launch one kernel for each step of each matrix, and keep a GPU longer than a core. Fewer bytes count as so many."""
HOST_SLACK, HOST_US = 2.0, 1000.0
"""The same where a call reads back to the host and no graph can be captured: Python's launches count as well."""


class Side(Protocol):
    """Something that can be timed."""

    def shuffle(self, seed: int, calls: bool = True) -> None:
        """Move the buffers; without ``calls`` the next block has to warm its one slot itself."""

    def measure(self, order: Sequence[int], turns: Sequence[Window] | None = None, flush: bool = True) -> list[float]:
        """Device microseconds of each call: ``turns`` are the values of an untimed call and then of each in ``order``."""


class EagerSide:
    """Torch eager, in the grader's own process, with TF32 off as the contracts demand."""

    def __init__(
        self, task: Task, case: Case, device: str = "cuda", watch: Stopwatch | None = None,
        function: Callable[..., Any] | None = None,
    ) -> None:  # fmt: skip
        self.task, self.case = task, case
        self.watch = watch or Stopwatch(device)
        self.device = device
        self._function = function or task.eager or task.reference

    def prepare(self, draws: Sequence[dict[str, Any]] | InputWindows) -> float:
        """Take inputs and warm up; gives the microseconds of one call, the host's part included."""
        given = draws.draws if isinstance(draws, InputWindows) else draws
        turning = draws.turning if isinstance(draws, InputWindows) else None
        mine = [reference.resolve(d, self.device, generator_seed=i) for i, d in enumerate(given)]
        with reference.exact_matmul():
            warm = self.watch.prepare(lambda s: self._function(**assembled(s)), mine, slots=SLOTS, turning=turning)
        return 1e6 * float(warm["call_seconds"])

    def shuffle(self, seed: int, calls: bool = True) -> None:
        """See ``Side``."""
        with reference.exact_matmul():
            self.watch.shuffle(seed, calls)

    def measure(self, order: Sequence[int], turns: Sequence[Window] | None = None, flush: bool = True) -> list[float]:
        """See ``Side``."""
        with reference.exact_matmul():
            got = self.watch.measure({"order": list(order), "turns": turns, "flush": flush})
        return [float(u) for u in got["us"]]


class RunnerSide:
    """A submission in its runner. Every time it tells is held against the grader's own clock."""

    def __init__(self, talk: RunnerSession, case: Case) -> None:
        self.talk, self.case = talk, case
        self.most = TIMED_BYTES
        """Bytes that a result and what was written in place may have."""

    def _ask(
        self, header: dict[str, Any], blobs: list[bytes] | None = None, seconds: float = COMMAND_SECONDS, idle: bool = False
    ) -> Any:  # fmt: skip
        self.talk.left = seconds
        return self.talk.ask({"op": "time"} | header, blobs, idle=idle)

    def prepare(self, draws: Sequence[dict[str, Any]] | InputWindows) -> None:
        """Take inputs, compile and warm up."""
        self.lay(draws)
        self.dry()
        self.warm()

    def lay(
        self, draws: Sequence[dict[str, Any]] | InputWindows, result_bytes: int | None = None, slots: int = SLOTS
    ) -> None:  # fmt: skip
        """Take inputs.

        Args:
            draws: the values.
            result_bytes: of a right result.
            slots: sets of buffers.
        """
        blobs: list[bytes] = []
        ring = draws if isinstance(draws, InputWindows) else None
        given = list(draws.draws if isinstance(draws, InputWindows) else draws)
        if result_bytes is not None:
            tensors = [v for d in given for v in d.values() if isinstance(v, torch.Tensor)]
            self.most = ROOM + 4 * (result_bytes + sum(v.untyped_storage().nbytes() for v in tensors))
        box = self._box()
        given = box.send(given, self._ask) if box is not None else [_hosted(d) for d in given]
        messages = [self.talk.header(d, 1000 + i, blobs) for i, d in enumerate(given)]
        header = {"do": "prepare", "slots": [m["args"] for m in messages], "count": slots}
        header |= {"entry": messages[0]["entry"], "positional": messages[0]["positional"]}
        header |= {"turning": ring.turning if ring else None, "written": list(self.talk.task.written(self.case.args))}
        self._ask(header, blobs)

    def dry(self) -> None:
        """Have compiled what these inputs need, without a launch."""
        self._ask({"do": "dry"}, seconds=PREPARE_SECONDS, idle=True)

    def release(self) -> None:
        """Have the inputs forgotten and all memory given back."""
        self._ask({"do": "release"})

    def warm(self) -> None:
        """The first calls; autotuners measure here, and need the GPU alone for that."""
        self._ask({"do": "warm"}, seconds=PREPARE_SECONDS)

    def _box(self) -> IpcReceiver | None:
        return self.talk.mailbox if self.talk.runner.mail else None

    def shuffle(self, seed: int, calls: bool = True) -> None:
        """See ``Side``."""
        self._ask({"do": "shuffle", "seed": seed, "calls": calls})

    def measure(self, order: Sequence[int], turns: Sequence[Window] | None = None, flush: bool = True) -> list[float]:
        """See ``Side``.

        Raises:
            GradingAborted: times that the wall clock contradicts, or an autotuner at work.
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

    def capture(self, result_bytes: int = 0, about_us: float = 0.0) -> int:
        """Have a graph of calls captured, on slots and in a number that nobody knows before; how many, or 0 where that is
        not possible.

        Args:
            result_bytes: of a right result: large ones make a short graph.
            about_us: of a call: slow ones do, too.
        """
        rng = random.Random(secrets.randbits(64))
        most = max(SLOTS, min(GRAPH_CALLS[1], GRAPH_BYTES // max(1, result_bytes), int(GRAPH_US / max(1.0, about_us))))
        count = rng.randint(min(GRAPH_CALLS[0], max(SLOTS, most // 2)), most)
        order = [rng.randrange(SLOTS) for _ in range(count)]
        self._order = order
        return count if bool(self._ask({"do": "capture", "order": order})[0].get("captured")) else 0

    def audit(self, claimed_us: float, captured: int) -> None:
        """Run back to back under the grader's own clock: device work cannot hide from it."""
        slack, more = (SLACK, GAP_US) if captured else (HOST_SLACK, HOST_US)
        walls = []
        # Work that hides from the clock is there every time; a hiccup of the host is not.
        for attempt in range(AUDITS):
            length = AGAIN_US if attempt else AUDIT_US
            reps = max(5, min(10_000 if captured else 200, int(length / max(claimed_us, 1.0))))
            graphs = max(1, reps // captured) if captured else 0
            reps = graphs * captured or reps
            start = time.perf_counter()
            if captured:
                self._ask({"do": "replay", "times": graphs})
            else:
                self.measure([i % SLOTS for i in range(reps)], flush=False)
            walls.append((time.perf_counter() - start) * 1e6 / reps)
            if walls[-1] <= slack * claimed_us + more:
                return
        raise _refused(f"claims {claimed_us:.0f} us a call, {reps} calls in a row took {min(walls):.0f} us each")

    def replayed(self, ring: InputWindows, result_bytes: int) -> list[tuple[Window, Fetched]]:
        """Replay the captured calls once on new values; what secret ones of them left behind, to be judged."""
        rng = random.Random(secrets.randbits(64))
        turns = [ring.pick(rng) for _ in range(SLOTS)]
        self._ask({"do": "replay", "times": 1, "turns": {str(i): t for i, t in enumerate(turns)}})
        count = len(self._order)
        few = JUDGED if count * result_bytes > JUDGED_BYTES else count
        chosen = rng.sample(range(count), min(count, few))
        found: list[tuple[Window, Fetched]] = []
        left: dict[int, Mapping[str, torch.Tensor]] = {}
        for k in chosen:
            slot = self._order[k]
            fetched = self.fetch(k, captured=True, inputs=slot not in left)
            # What all calls on a slot were given lies in one place, and is as the last of them left it.
            after = left.setdefault(slot, fetched.answer.after)
            found.append((turns[slot], replace(fetched, answer=replace(fetched.answer, after=after))))
        return found

    def fetch(self, call: int, captured: bool = False, inputs: bool = True) -> Fetched:
        """What a call of the block just measured returned, or of the graph just replayed.

        Args:
            call: its number.
            captured: in the graph.
            inputs: bring its inputs as they are now, too: only the last call on a slot has left them so.

        Raises:
            GradingAborted: it cannot be right.
        """
        box = self._box()
        asked = {"do": "result", "call": call, "captured": captured, "mailed": box is not None, "inputs": inputs}
        reply, data = self._ask(asked, seconds=2 * COMMAND_SECONDS)
        whole = None
        if box is not None:
            with readable():
                total = count(reply["total"])
            if total > self.most:
                raise _wrong(self.case, captured, f"it returned {total} bytes, far more than a right answer has")
            whole = box.fetch(total, self.talk.backend, self._ask)
        decode = wire.decode_tensor if whole is None else partial(claimed, whole)
        with readable():
            answer, broken = self.talk._answer(reply, data, decode)
        if broken:
            raise _wrong(self.case, captured, broken)
        return Fetched(answer, captured)

    def rule(self, task: Task, args: Mapping[str, Any], fetched: Fetched, hosted: bool = False) -> None:
        """Judge what a timed call returned.

        Args:
            task: the task.
            args: the arguments of the call.
            fetched: what it returned.
            hosted: on the host, see ``faster_on_host``, instead of on the GPU.

        Raises:
            GradingAborted: it is wrong.
        """
        if any(isinstance(v, GeneratorArg) for v in args.values()):
            return
        answer = fetched.answer
        # Of calls that others on the same slot followed, what was given is not there any more.
        given = {k: v for k, v in args.items() if isinstance(v, torch.Tensor)}
        answer = replace(answer, after={**given, **answer.after})
        native = None
        if hosted:
            # How far torch itself is off depends on the device's solver: that answer comes from there.
            with self.talk.gpu.using():
                native = reference.expect(task, self.case, args, self.talk.backend, exact=False)
            args = _hosted(args)
            answer = replace(answer, outputs=tuple(o.cpu() for o in answer.outputs), after=_hosted(answer.after))
        with contextlib.nullcontext() if hosted else self.talk.gpu.using():
            ruling = judges.judge(
                task, self.case, args, [answer] * judges.calls_needed(task, self.case), timed=True, native=native,
                device="cpu" if hosted else self.talk.backend, generator_seeds=[0, 0, 1],
            )  # fmt: skip
        if not ruling.passed:
            raise _wrong(self.case, fetched.captured, ruling.reason)


@dataclass(frozen=True)
class Fetched:
    """What a timed call returned, in the grader's own memory."""

    answer: Answer
    captured: bool
    """Whether it is one of the captured calls."""


def faster_on_host(task: Task, tensor_bytes: int, eager_us: float) -> bool:
    """Whether the reference is so slow on the GPU, for so few bytes, that a core judges a result faster.

    Args:
        task: the task.
        tensor_bytes: of a call's arguments and results. Not its compulsory traffic: a judge looks at all of them.
        eager_us: microseconds of eager's call on the GPU.
    """
    slow = eager_us > SLOW_ON_GPU_US * max(tensor_bytes, SLOW_LEAST_BYTES) / (1 << 20)
    return slow and isinstance(task.truth, Close | Invariant)


def _wrong(case: Case, captured: bool, why: str) -> GradingAborted:
    how = "captured call" if captured else "timed call"
    return GradingAborted(Verdict.INCORRECT, f"{how} wrong ({case.label()}): {why}")


def _hosted(args: Mapping[str, Any]) -> dict[str, Any]:
    """The same on the host, in the same layouts."""
    return {
        k: flat(v).cpu().as_strided(v.shape, v.stride()) if isinstance(v, torch.Tensor) and v.numel() else v
        for k, v in args.items()
    }  # fmt: skip


def _refused(detail: str) -> GradingAborted:
    return GradingAborted(Verdict.REJECTED, detail, [Violation("clock", detail)])
