"""The two contestants of a comparison: torch eager in the grader's process, and a submission in its runner.

The submission's times are untrusted claims; ``audit`` checks them against the grader's own clock.
"""

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

from kbx_env.device.driver import TensorMetadata, keep_suballocation_blocks
from kbx_env.device.ipc_grader import IpcReceiver, claimed
from kbx_env.device.layout import flat
from kbx_env.device.stopwatch import Stopwatch
from kbx_env.grading import compulsory_work, inputs, reference
from kbx_env.grading import judge as judges
from kbx_env.grading.judge import Answer
from kbx_env.grading.judge.structure import same_bits
from kbx_env.grading.runtime.engine_client import blank
from kbx_env.grading.runtime.session import RunnerSession
from kbx_env.grading.runtime.untrusted import GradingAborted, count, readable
from kbx_env.grading.runtime.zygote_client import TIMED_BYTES
from kbx_env.grading.timing.input_windows import InputWindows, Window
from kbx_env.grading.timing.precision import REPORT
from kbx_env.outcome import Verdict, Violation
from kbx_env.protocol import wire
from kbx_env.protocol.wire import assembled
from kbx_env.spec.criteria import Close, Invariant
from kbx_env.spec.task import Case, GeneratorArg, Task

SLOTS = 3
"""Sets of buffers that rotate."""
BLOCK = 5
"""Calls in one block."""
PREPARE_SECONDS = 120.0
"""Seconds for compilation and autotuning, once for each timed case; nothing is tuned after that."""
COMMAND_SECONDS = 60.0
"""Seconds for any other command to the runner."""
GRAPH_CALLS = (12, 24)
"""Fewest and most calls in one CUDA graph; the number is drawn in secret."""
GRAPH_BYTES = 2 << 30
"""Bytes of results that one graph may hold, if three calls fit."""
JUDGED, JUDGED_BYTES = 3, 64 << 20
"""Captured calls that are judged if the results of all have more bytes than this; otherwise all are judged."""
RESULTS_BYTES = 512 << 20
"""Bytes of results for which a runner asks the driver at once, if those of a block are not more."""
AUDITS, SHORT_AUDITS = 4, 2
"""Attempts at the audit, of which one that fits is enough. Two are short, because the first replay of a graph also uploads it to
the GPU."""
REPEATED_AUDIT_US = 100_000.0
"""Microseconds of the audit's repetitions: long compared with milliseconds for which the host may be delayed."""
ALIGNMENT_BYTES = 1 << 20
"""Bytes allowed beside those of the tensors, for the alignment of their addresses."""
SLACK, GAP_US = 1.3, 10.0
"""By the grader's clock a replayed graph may take the claimed device time times ``SLACK``, plus ``GAP_US`` for each
call."""
HOST_SLACK, HOST_US = 2.0, 1000.0
"""The same where a call reads back to the host and no graph can be captured: Python's launches count as well."""
IN_TIME = 2
"""Calls of a block that must have been enqueued in time, so that the others are left out."""
SLOW_ON_GPU_US, SLOW_LEAST_BYTES = 2000.0, 1 << 17
"""Microseconds of eager for each MiB of arguments and results from which on a result is judged on the host. Solvers of
small matrices launch one kernel for each step of each matrix, and keep a GPU longer than a core. Fewer bytes than
``SLOW_LEAST_BYTES`` count as so many."""


class Contestant(Protocol):
    """A function on prepared inputs that can be timed."""

    def shuffle(self, seed: int, calls: bool = True) -> None:
        """Move the buffers.

        Args:
            seed: decides where to.
            calls: also call once on each slot; otherwise the next block has to warm its one slot itself.
        """

    def measure(
        self, order: Sequence[int], windows: Sequence[Window] | None = None, flush: bool = True, warm: bool = True
    ) -> list[float]:  # fmt: skip
        """Time calls.

        Args:
            order: the slot of each call.
            windows: the values of an untimed call and then of each call in ``order``; ``None`` to keep the values.
            flush: empty the L2 cache before each call. Without it all calls run back to back and give one time.
            warm: make the untimed call.

        Returns:
            Device microseconds of each call.
        """

    def launch_us(self) -> float | None:
        """Return the microseconds of an empty kernel in this process, timed as calls are; ``None`` if not known."""


class EagerContestant:
    """Torch eager in the grader's own process, with TF32 off as the tasks' contracts demand.

    Args:
        task: the task.
        case: the timed case.
        device: of torch.
        watch: the stopwatch; by default one for the device.
        function: the timed function; by default the task's eager call.
    """

    _calls = _late = 0
    """Timed calls so far, and those of them that the host enqueued too late."""

    def __init__(
        self, task: Task, case: Case, device: str = "cuda", watch: Stopwatch | None = None,
        function: Callable[..., Any] | None = None,
    ) -> None:  # fmt: skip
        self.task, self.case = task, case
        self.watch = watch or Stopwatch(device)
        self.device = device
        if device == "cuda":
            keep_suballocation_blocks()  # solvers allocate small memory in each call
        self._function = function or task.eager or task.reference

    @property
    def host_bound(self) -> bool:
        """Whether most timed calls kept the device waiting for the host, as solvers of small matrices do.

        Other work of the machine makes such calls slower.
        """
        return 2 * self._late > self._calls

    def prepare(
        self, draws: list[dict[str, Any]] | InputWindows, slots: int = SLOTS, turning: Mapping[str, Sequence[int]] | None = None
    ) -> float:  # fmt: skip
        """Take inputs and warm up.

        Args:
            draws: the values, one draw for each slot; of ``InputWindows`` windows can be chosen later.
            slots: sets of buffers.
            turning: of the ``InputWindows`` whose ``draws`` are given as a list: it is emptied as soon as the values are laid out,
                and their memory is free for the slots of the largest cases.

        Returns:
            Microseconds of one call, the host's part included.
        """
        if isinstance(draws, InputWindows):
            turning, draws = draws.turning, list(draws.draws)
        if turning is None:
            resolved = [reference.resolve(d, self.device, generator_seed=i) for i, d in enumerate(draws)]
        else:
            resolved = [self._without_copies(d, i) for i, d in enumerate(draws)]
            draws.clear()
        with reference.exact_matmul():
            warm = self.watch.prepare(lambda s: self._function(**assembled(s)), resolved, slots=slots, turning=turning)
        return 1e6 * float(warm["call_seconds"])

    def _without_copies(self, draw: Mapping[str, Any], seed: int) -> dict[str, Any]:
        """Return the arguments of a draw with markers replaced by values; its tensors, which the stopwatch copies, as they are."""
        others = {n: v for n, v in draw.items() if not isinstance(v, torch.Tensor)}
        return dict(draw) | reference.resolve(others, self.device, generator_seed=seed)

    def shuffle(self, seed: int, calls: bool = True) -> None:
        """See ``Contestant``."""
        with reference.exact_matmul():
            self.watch.shuffle(seed, calls)

    def measure(
        self, order: Sequence[int], windows: Sequence[Window] | None = None, flush: bool = True, warm: bool = True
    ) -> list[float]:  # fmt: skip
        """See ``Contestant``."""
        with reference.exact_matmul():
            reply = self.watch.measure({"order": list(order), "turns": windows, "flush": flush, "warm": warm})
        self._calls, self._late = self._calls + len(reply["us"]), self._late + len(reply["late"])
        return in_time([float(u) for u in reply["us"]], reply["late"])

    def launch_us(self) -> float | None:
        """See ``Contestant``."""
        return self.watch.time_empty()["us"]


class RunnerContestant:
    """A submission in its runner. Its claimed times are checked against the grader's own clock.

    Args:
        session: with the loaded submission.
        case: the timed case.

    Attributes:
        max_bytes: largest size of a result together with the tensors that a call leaves behind.
        slots: sets of buffers in the runner.
    """

    def __init__(self, session: RunnerSession, case: Case) -> None:
        self.session, self.case = session, case
        self.max_bytes, self.slots = TIMED_BYTES, SLOTS

    def _ask(
        self, header: dict[str, Any], blobs: list[bytes] | None = None, seconds: float = COMMAND_SECONDS,
        idle: bool = False,
    ) -> Any:  # fmt: skip
        """Send one ``time`` command.

        Args:
            header: ``do`` and its parameters.
            blobs: bytes that go with it.
            seconds: time limit.
            idle: the command launches nothing on the GPU.

        Returns:
            The reply and its blobs.
        """
        self.session.budget.restart(seconds)
        return self.session.ask({"op": "time"} | header, blobs, idle=idle)

    def prepare(self, draws: Sequence[dict[str, Any]] | InputWindows) -> None:
        """Take inputs, compile and warm up.

        Args:
            draws: the values, as for ``lay``.
        """
        self.lay(draws)
        self.dry()
        self.warm()

    def lay(
        self, draws: Sequence[dict[str, Any]] | InputWindows, result_bytes: int | None = None, slots: int = SLOTS,
        ample: bool = False,
    ) -> None:  # fmt: skip
        """Send inputs to the runner.

        Args:
            draws: the values, one draw for each slot; of ``InputWindows`` windows can be chosen later.
            result_bytes: bytes of a correct result, from which follows how large one may be; ``None`` for any size.
            slots: sets of buffers.
            ample: whether the GPU has ample memory left.
        """
        blobs: list[bytes] = []
        self.slots = slots
        windows = draws if isinstance(draws, InputWindows) else None
        values = list(draws.draws if isinstance(draws, InputWindows) else draws)
        tensors = [v for d in values for v in d.values() if isinstance(v, torch.Tensor)]
        self.session.case_bytes = sum(v.untyped_storage().nbytes() for v in tensors)
        if result_bytes is not None:
            self.max_bytes = ALIGNMENT_BYTES + 4 * (result_bytes + sum(v.untyped_storage().nbytes() for v in tensors))
        mailbox = self._mailbox()
        preallocate = {"preallocate": (*self._memory(values, result_bytes or 0, slots), ample)}
        values = mailbox.send(values, self._ask, preallocate) if mailbox is not None else [_hosted(d) for d in values]
        messages = [self.session.header(d, 1000 + i, blobs) for i, d in enumerate(values)]
        header = {"do": "prepare", "slots": [m["args"] for m in messages], "count": slots}
        header |= {"entry": messages[0]["entry"], "positional": messages[0]["positional"]}
        header["turning"] = windows.turning if windows else None
        header["written"] = list(self.session.task.written(self.case.args))
        self._ask(header if mailbox is not None else header | preallocate, blobs)

    def _memory(self, draws: Sequence[Mapping[str, Any]], result_bytes: int, slots: int) -> tuple[int, int, int]:
        """Return what memory a case takes in the runner, as ``Stopwatch.preallocate`` takes it.

        Args:
            draws: the values; the first draw is complete.
            result_bytes: bytes of a correct result.
            slots: sets of buffers.
        """
        sizes = [{n: TensorMetadata(v).size for n, v in d.items() if isinstance(v, torch.Tensor)} for d in draws]
        written = self.session.task.written(self.case.args)
        kept = result_bytes + sum(size for n, size in sizes[0].items() if n.partition(".")[0] in written)
        return sum(sizes[0].values()), slots, bytes_beside_slots(sum(size for d in sizes for size in d.values()), kept)

    def describe(self) -> None:
        """Have the runner allocate one set of inputs without values, for ``dry``; nothing is launched on the GPU."""
        args = {
            name: blank(value) if isinstance(value, torch.Tensor) else value
            for name, value in inputs.described(self.session.task, self.case).items()
        }
        self.session.case_bytes = int(compulsory_work.input_bytes(self.session.task, self.case))
        message = self.session.header(args, 1000)
        header = {"do": "prepare", "slots": [message["args"]], "entry": message["entry"]}
        self._ask(header | {"positional": message["positional"], "ahead": True}, idle=True)

    def dry(self) -> None:
        """Begin to compile the kernels that these inputs need, without a launch, until ``finish_compiling``."""
        self._ask({"do": "dry", "ahead": True}, seconds=PREPARE_SECONDS, idle=True)

    def finish_compiling(self, cases: int = 1) -> None:
        """Wait until all kernels are compiled that ``dry`` calls of this session have begun with.

        Args:
            cases: for how many cases.
        """
        self.session.budget.restart(PREPARE_SECONDS * cases)
        self.session.finish_compiling()

    def release(self, ahead: bool = False) -> None:
        """Free the inputs and all memory of the runner; no kernel runs.

        Args:
            ahead: do not wait for the kernels that are being compiled.
        """
        self._ask({"do": "release"} | ({"ahead": True} if ahead else {}), idle=True)

    def warm(self) -> None:
        """Make the first calls. Autotuners measure in them, so the GPU must be held alone."""
        self._ask({"do": "warm"}, seconds=PREPARE_SECONDS)

    def _mailbox(self) -> IpcReceiver | None:
        """Return the transport for large tensors; ``None`` where the runner cannot use it."""
        return self.session.mailbox if self.session.runner.mail else None

    def shuffle(self, seed: int, calls: bool = True) -> None:
        """See ``Contestant``."""
        self._ask({"do": "shuffle", "seed": seed, "calls": calls})

    def measure(
        self, order: Sequence[int], windows: Sequence[Window] | None = None, flush: bool = True, warm: bool = True
    ) -> list[float]:  # fmt: skip
        """Time calls, by the runner's claim.

        Args:
            order: the slot of each call.
            windows: the values of an untimed call and then of each call in ``order``; ``None`` to keep the values.
            flush: empty the L2 cache before each call. Without it all calls run back to back and give one time.
            warm: make the untimed call.

        Returns:
            Device microseconds of each call.

        Raises:
            GradingAborted: the wall clock contradicts the times, or an autotuner was at work.
        """
        start = time.perf_counter()
        header = {"do": "measure", "order": list(order), "turns": windows, "flush": flush, "warm": warm}
        reply, _ = self._ask(header)
        wall_us = (time.perf_counter() - start) * 1e6
        with readable():
            us = [float(u) for u in reply["us"]]
            tuned, late = int(reply.get("tuned", 0)), [int(k) for k in reply.get("late", [])]
        valid = len(us) == (len(order) if flush else 1) and min(us) > 0 and all(map(math.isfinite, us))
        if not valid or sum(us) > wall_us:
            raise _refused("times that do not fit the wall clock")
        if tuned:
            raise _refused("an autotuner measured its configurations again in a timed call")
        return in_time(us, late)

    def launch_us(self) -> float | None:
        """See ``Contestant``."""
        reply, _ = self._ask({"do": "empty"})
        with readable():
            us = reply["us"] if reply["us"] is None else float(reply["us"])
        if us is not None and not (math.isfinite(us) and us > 0):
            raise _refused("an empty kernel that takes no time")
        return us

    def capture(self, result_bytes: int = 0, about_us: float = 0.0, graph_us: float = REPORT.graph_us) -> int:
        """Capture a CUDA graph of calls; their number and slots are drawn in secret.

        Args:
            result_bytes: bytes of a correct result: large results make a short graph.
            about_us: microseconds of a call: slow calls make a short graph, too.
            graph_us: microseconds of the graph, if three calls fit.

        Returns:
            The number of calls in the graph; 0 where the calls cannot be captured.
        """
        rng = random.Random(secrets.randbits(64))
        most = max(self.slots, min(GRAPH_CALLS[1], GRAPH_BYTES // max(1, result_bytes), int(graph_us / max(1.0, about_us))))
        count = rng.randint(min(GRAPH_CALLS[0], max(self.slots, most // 2)), most)
        order = [rng.randrange(self.slots) for _ in range(count)]
        self._order = order
        return count if bool(self._ask({"do": "capture", "order": order})[0].get("captured")) else 0

    def audit(
        self, claimed_us: float, captured: int, audit_us: float = REPORT.audit_us, own_us: float | None = None
    ) -> str | None:  # fmt: skip
        """Run calls back to back and compare their time by the grader's own clock with the claim.

        Args:
            claimed_us: microseconds of a call.
            captured: calls in the captured graph; 0 without one.
            audit_us: microseconds of a short attempt.
            own_us: microseconds of a call by this contestant's calls alone, if the claim owes something to the other's; by default
                the claim.

        Returns:
            A text if every attempt takes longer than the claim and the slack allow, but not longer than ``own_us`` allows; else
            ``None``.

        Raises:
            GradingAborted: every attempt takes longer than ``own_us`` and the slack allow.
        """
        slack, more = (SLACK, GAP_US) if captured else (HOST_SLACK, HOST_US)
        walls = []
        # Hidden work takes time in every attempt; a delay of the host does not.
        for attempt in range(AUDITS):
            length = audit_us if attempt < SHORT_AUDITS else REPEATED_AUDIT_US
            reps = max(5, min(10_000 if captured else 200, int(length / max(claimed_us, 1.0))))
            graphs = max(1, reps // captured) if captured else 0
            reps = graphs * captured or reps
            start = time.perf_counter()
            if captured:
                self._ask({"do": "replay", "times": graphs})
            else:
                self.measure([i % self.slots for i in range(reps)], flush=False)
            walls.append((time.perf_counter() - start) * 1e6 / reps)
            if walls[-1] <= slack * claimed_us + more:
                return None
        why = f"claims {claimed_us:.0f} us a call, {reps} calls in a row took {min(walls):.0f} us each"
        if min(walls) > slack * max(claimed_us, own_us or 0.0) + more:
            raise _refused(why)
        return why

    def replayed(self, windows: InputWindows, result_bytes: int, few_inputs: bool = False) -> list[tuple[Window, Fetched]]:
        """Replay the captured calls once on new values, and fetch results of calls that are chosen in secret.

        Args:
            windows: source of the values.
            result_bytes: bytes of a correct result: of large ones only ``JUDGED`` are fetched.
            few_inputs: inputs are large, so those of one slot are fetched, and otherwise those of each.

        Returns:
            The window and the result of each chosen call.
        """
        rng = random.Random(secrets.randbits(64))
        drawn = [windows.pick(rng) for _ in range(self.slots)]
        self._ask({"do": "replay", "times": 1, "turns": {str(i): t for i, t in enumerate(drawn)}})
        count = len(self._order)
        wanted = JUDGED if count * result_bytes > JUDGED_BYTES else count
        chosen = rng.sample(range(count), min(count, wanted))
        # All calls on a slot share its input tensors, which are as the last of them left them.
        firsts = {slot: k for k, slot in reversed([(k, self._order[k]) for k in chosen])}
        firsts = dict(rng.sample(sorted(firsts.items()), 1)) if few_inputs else firsts
        calls = [(k, firsts.get(self._order[k]) == k) for k in chosen]
        fetched = dict(zip(chosen, self.fetch(calls, captured=True), strict=True))
        left = {slot: fetched[k].answer.after for slot, k in firsts.items()}
        return [
            (drawn[slot], replace(fetched[k], answer=replace(fetched[k].answer, after=left.get(slot, {}))))
            for k, slot in ((k, self._order[k]) for k in chosen)
        ]

    def fetch(self, calls: Sequence[tuple[int, bool]], captured: bool = False) -> list[Fetched]:
        """Fetch results of calls of the block just measured, or of the graph just replayed.

        Args:
            calls: the index of each call, and whether to fetch its inputs as they are now, too; the last call on a slot has
                left them so.
            captured: calls of the graph.

        Returns:
            The results, in the grader's own memory. Those of one fetch share memory.

        Raises:
            GradingAborted: one of them cannot be right.
        """
        mailbox = self._mailbox()
        header = {"do": "results", "calls": [list(c) for c in calls], "captured": captured, "mailed": mailbox is not None}
        if mailbox is not None:
            header["window"] = mailbox.size
        reply, data = self._ask(header, seconds=2 * COMMAND_SECONDS)
        received = None
        if mailbox is not None:
            with readable():
                total = count(reply["total"])
            if total > len(calls) * self.max_bytes:
                raise _wrong(self.case, captured, f"it returned {total} bytes, far more than a right answer has")
            received = mailbox.fetch(total, self.session.backend, self._ask)
        decode = wire.decode_tensor if received is None else partial(claimed, received)
        found = []
        with readable():
            claims = list(reply["results"])
            if len(claims) != len(calls):
                raise wire.WireError(f"{len(claims)} results of {len(calls)} calls")
        for claim, (_, with_inputs) in zip(claims, calls, strict=True):
            with readable():
                answer, broken = self.session._answer(claim, data, decode)
            if broken:
                raise _wrong(self.case, captured, broken)
            found.append(Fetched(answer, captured, with_inputs))
        return found

    def rule(self, task: Task, args: Mapping[str, Any], fetched: Fetched, hosted: bool = False) -> None:
        """Judge the result of a timed call.

        Args:
            task: the task.
            args: the arguments of the call.
            fetched: its result.
            hosted: judge on the host (see ``faster_on_host``) instead of on the GPU.

        Raises:
            GradingAborted: it is wrong.
        """
        if any(isinstance(v, GeneratorArg) for v in args.values()):
            return
        answer = fetched.answer
        # A later call on the same slot may have overwritten the inputs: those that were not fetched count as unchanged.
        sent = {k: v for k, v in args.items() if isinstance(v, torch.Tensor)}
        answer = replace(answer, after={**sent, **answer.after})
        native: Callable[[], Any] | None = None
        if hosted:
            native = partial(self._native, task, args)
            args = _hosted(args)
            answer = replace(answer, outputs=tuple(o.cpu() for o in answer.outputs), after=_hosted(answer.after))
        with contextlib.nullcontext() if hosted else self.session.gpu.using():
            ruling = judges.judge(
                task, self.case, args, [answer] * judges.calls_needed(task, self.case), timed=True, lazy=True, native=native,
                device="cpu" if hosted else self.session.backend, generator_seeds=[0, 0, 1],
            )  # fmt: skip
        if not ruling.passed:
            raise _wrong(self.case, fetched.captured, ruling.reason)

    def _native(self, task: Task, args: Mapping[str, Any]) -> reference.Expected:
        """Return torch's own answer by the device: its error depends on the device's solver."""
        with self.session.gpu.using():
            return reference.expect(task, self.case, args, self.session.backend, exact=False)


@dataclass(frozen=True)
class Fetched:
    """The result of a timed call, in the grader's own memory."""

    answer: Answer
    captured: bool
    """Whether it is one of the captured calls."""
    inputs: bool = False
    """Whether ``answer`` has the inputs as the call left them."""

    @property
    def storages(self) -> dict[int, int]:
        """Bytes of the memory in which its tensors are, by address."""
        tensors = [*self.answer.outputs, *self.answer.after.values()]
        return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}

    def equals(self, other: Fetched) -> bool:
        """Return whether a judge must rule alike on two results of calls with equal arguments: all bits are equal.

        Args:
            other: the other result.
        """
        mine, theirs = self.answer, other.answer
        if replace(mine, outputs=(), after={}) != replace(theirs, outputs=(), after={}):
            return False
        if len(mine.outputs) != len(theirs.outputs) or mine.after.keys() != theirs.after.keys():
            return False
        pairs = [*zip(mine.outputs, theirs.outputs, strict=True), *((v, theirs.after[n]) for n, v in mine.after.items())]
        return all(a is b or same_bits(a, b) for a, b in pairs)


def bytes_beside_slots(draw_bytes: int, kept_bytes: int) -> int:
    """Return the most bytes that a runner has of messages, windows and results at one time.

    Args:
        draw_bytes: of all draws.
        kept_bytes: of a correct result and of the tensors written in place.
    """
    # Received messages are dropped before the first result.
    return draw_bytes + max(draw_bytes, min(GRAPH_CALLS[1] * kept_bytes, max(BLOCK * kept_bytes, RESULTS_BYTES)))


def in_time(us: Sequence[float], late: Sequence[int]) -> list[float]:
    """Leave out the calls of a block that the host enqueued too late, because the machine had other work for its core.

    Their times contain the host's delay. A call that always keeps the device waiting, as one that reads back does, keeps
    its times: it is late in the whole block. A submission gains no more by naming late calls than by naming wrong times: the same
    calls are replayed from a graph, and all of those count for the audit.

    Args:
        us: microseconds of each call.
        late: numbers of the late calls; of a submission these are claims, like the times.

    Returns:
        The times of the others; all, if fewer than ``IN_TIME`` are left.
    """
    left_out = set(late)
    left = [u for k, u in enumerate(us) if k not in left_out]
    return left if len(left) >= IN_TIME else list(us)


def faster_on_host(task: Task, tensor_bytes: int, eager_us: float) -> bool:
    """Return whether a result is judged faster on the host: the reference is slow on the GPU for few bytes.

    Args:
        task: the task.
        tensor_bytes: bytes of a call's arguments and results. Not its compulsory traffic: a judge reads all of them.
        eager_us: microseconds of eager's call on the GPU.

    Returns:
        True only for criteria whose judges work on the host as well.
    """
    slow = eager_us > SLOW_ON_GPU_US * max(tensor_bytes, SLOW_LEAST_BYTES) / (1 << 20)
    return slow and isinstance(task.truth, Close | Invariant)


def _wrong(case: Case, captured: bool, why: str) -> GradingAborted:
    """Return the exception for a wrong result of a timed call."""
    how = "captured call" if captured else "timed call"
    return GradingAborted(Verdict.INCORRECT, f"{how} wrong ({case.label()}): {why}")


def _hosted(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments with their tensors copied to the host, in the same layouts."""
    return {
        k: flat(v).cpu().as_strided(v.shape, v.stride()) if isinstance(v, torch.Tensor) and v.numel() else v
        for k, v in args.items()
    }  # fmt: skip


def _refused(detail: str) -> GradingAborted:
    """Return the exception for times that cannot be true."""
    return GradingAborted(Verdict.REJECTED, detail, [Violation("clock", detail)])
