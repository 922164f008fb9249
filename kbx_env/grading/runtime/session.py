"""A session with one runner: draws secret inputs, sends calls, and returns the untrusted results for the judge."""

from __future__ import annotations

import contextlib
import errno
import inspect
import math
import shutil
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kbx_env.errors import SandboxError
from kbx_env.grading import compulsory_work, inputs, reference
from kbx_env.grading.ablations import DefenceLayer
from kbx_env.grading.judge import Answer
from kbx_env.grading.judge.samples import TURNS
from kbx_env.grading.runtime.compiler_client import CompilerMaker, KernelCompiler
from kbx_env.grading.runtime.engine_client import HOST_READS, Engine, EngineError, Facts, Origin, blank, number
from kbx_env.grading.runtime.runner_pool import RunnerSlot
from kbx_env.grading.runtime.time_budget import TimeBudget
from kbx_env.grading.runtime.untrusted import GradingAborted, build, count, pairs, readable, survived
from kbx_env.grading.runtime.zygote_client import OUTSIDE, Zygote
from kbx_env.grading.timing.gpu_lock import GpuHold, gpu_lock_of
from kbx_env.outcome import Build, FaultKind, Finding, Verdict, Violation
from kbx_env.protocol import wire
from kbx_env.spec.task import Case, DeviceArg, DtypeArg, GeneratorArg, Task

MAX_BUILDS = 1000
"""Builds that are read of a runner's reply."""
FIRST_USE_SECONDS = 8.0
"""For the first use of a GPU, which compiles Triton's stubs and loads kernels of torch; not charged to the submission. The context
exists: a runner makes it before it counts as ready."""
BUILD_SECONDS = 60.0
"""For ahead-of-time builds of all targets, beside what the submission has left."""
DEVICE_BYTES = 1 << 30
"""With less free memory than this, in bytes, or than the inputs of a timed case, a GPU counts as full."""
ABANDONED = "the grading was given up"
"""Message where the proof of a kernel fails while it is being compiled for the GPU. The outcome is that of the proof."""
AGAIN_FAMILY = 16
"""First number of the families of inputs for ``RunnerSession.redrawn``; ``_call`` uses 0 to 3."""
REPEAT_FAMILY = 4
"""Number of the family of generator seeds for ``RunnerSession.call_again``."""
TURN_SECONDS = 1.0
"""Seconds of calls after which the shared GPU lock is released, so that a grading that waits for exclusive use gets it."""
DISK_BYTES = 256 << 20
"""With less free space than this, in bytes, a runner's error that the disk is full counts as the machine's."""


@dataclass
class CallResult:
    """One call: its arguments, and the untrusted result.

    Attributes:
        args: the arguments, tensors with their values.
        answer: the results as the judge takes them.
        broken: why the results cannot be judged; ``None`` if they can.
        facts: what the engine counted (CPU tier).
        origins: where each result's elements come from (CPU tier).
    """

    args: dict[str, Any]
    answer: Answer
    generator_seed: int
    """Stands for the generator's state before the call: equal numbers, equal states."""
    broken: str | None = None
    facts: Facts | None = None
    origins: tuple[Origin, ...] = ()
    effect: str | None = None
    """Forbidden change that the call made to memory: an input, or memory that belongs to no result."""
    reordered: tuple[Answer, ...] = ()
    """The results with its programs in other orders, where they race and that makes a difference."""


@dataclass
class DrawnCall:
    """A call that is not made yet: its inputs are drawn and encoded.

    Attributes:
        args: the arguments, tensors with their values.
        sent: the same, with ``out`` where the case has it.
        header: the command, without the seconds that are left.
        blobs: the bytes that go with it.
        generator_seed: see ``CallResult``.
    """

    args: dict[str, Any]
    sent: dict[str, Any]
    header: dict[str, Any]
    blobs: list[bytes]
    generator_seed: int


def _free_memory() -> int:
    """Return the free bytes of the GPU's memory."""
    return int(torch.cuda.mem_get_info()[0])


def settings_of(
    backend: str, without: Collection[DefenceLayer], torch_ops: bool, values: bool = False
) -> dict[str, Any]:  # fmt: skip
    """Return the settings with which a runner is started.

    Args:
        backend: ``cpu`` or ``cuda``.
        without: layers of defence to leave out.
        torch_ops: whether the wrapper may compute in torch.
        values: whether the wrapper works on the values of tensors, and reads as many as it likes (the paper's grading).

    Returns:
        The keyword arguments of ``Zygote.spawn``.
    """
    settings = {"device": backend, "without": sorted(without), "torch_ops": torch_ops}
    if backend == "cpu" and DefenceLayer.SOURCE not in without and not values:
        settings["elsewhere"] = True
    return settings | ({"values": True} if values else {})


class RunnerSession:
    """A session with one single-use runner. A context manager: the runner ends with it.

    Args:
        zygote: forks the runner.
        task: the task.
        backend: ``cpu`` or ``cuda``.
        secret: seeds the inputs.
        split: ``eval`` or ``train``.
        wall: seconds of wall time for the submission.
        without: layers of defence to leave out.
        torch_ops: whether the wrapper may compute in torch.
        slot: a runner that has started, with its mailbox, which the session closes; by default it starts one.
        values: whether the wrapper works on the values of tensors, and reads as many as it likes (the paper's grading).
        compilers: makes the compiler of a submission's kernels (CPU tier).

    Attributes:
        gpu: this grading's use of the GPU lock.
        engine: executes what the runner records (CPU tier); ``None`` on CUDA.
        compiler: compiles what the runner launches (CPU tier, once a submission is loaded); ``None`` where the runner compiles.
        budget: the submission's wall time.
        findings: the sanitizer's findings.
        denied: denied operations as (rule, detail).
        dots: kinds of products that launches have used.
        launches: launches so far.
        standing: whether the firewall stood at the end of every command.
        sent: arguments of the last call, with ``out``.
        drawn: by number of the case, arguments of its first call that were drawn before.
        case_bytes: bytes of all inputs that the runner gets of the case that is timed; it allocates them in one piece.
        compiled: whether the runner has compiled what checked and timed calls launch (CUDA).

    Raises:
        SandboxError: no process can be started.
    """

    def __init__(
        self, zygote: Zygote, task: Task, backend: str, secret: bytes, split: str, wall: float,
        without: Collection[DefenceLayer] = (), torch_ops: bool = False, slot: RunnerSlot | None = None,
        values: bool = False, compilers: CompilerMaker = KernelCompiler,
    ) -> None:  # fmt: skip
        self.torch_ops, self.values = torch_ops, values
        self.zygote, self.task, self.backend = zygote, task, backend
        self.secret, self.split, self.without = secret, split, without
        self.gpu = GpuHold(gpu_lock_of(backend))
        settings = settings_of(backend, without, torch_ops, values)
        self._elsewhere, self._compilers = "elsewhere" in settings, compilers
        self.compiler: KernelCompiler | None = None
        self._slot = RunnerSlot(zygote, settings) if slot is None else slot
        self.runner, self.mailbox = self._slot.runner, self._slot.mailbox
        reads = HOST_READS if DefenceLayer.HOST not in without and not values else math.inf
        try:
            self.engine = Engine(zygote, reads) if backend == "cpu" else None
        except SandboxError:
            self._slot.close()
            raise
        self.findings: dict[tuple[Any, ...], Finding] = {}
        self.budget = TimeBudget(wall)
        self._ended: GradingAborted | None = None
        self.denied: list[tuple[str, str]] = []
        self.dots: set[str] = set()
        self.launches = 0
        self.standing = True
        self.sent: dict[str, Any] = {}
        self.drawn: dict[int, dict[str, Any]] = {}
        self.case_bytes = 0
        self._started = self._abandoned = self.compiled = False
        self._begun: tuple[list[list[DrawnCall]], list[Exception]] | None = None
        self._bases: dict[str, Any] = {}
        self._served = self._log_number = self._repeats = 0

    def __enter__(self) -> RunnerSession:
        return self

    def __exit__(self, *exc: object) -> None:
        self._slot.close()
        if self.engine is not None:
            self.engine.close()
        if self.compiler is not None:
            self.compiler.close()

    def abandon(self) -> None:
        """Kill the runner: a command that another thread waits for fails, and so does every later one."""
        self._abandoned = True
        self.runner.kill()

    def end_runner(self) -> None:
        """End the runner before the session, once all is known that was asked of it."""
        self._slot.end_runner()
        self._read_log()

    def ask(
        self, header: dict[str, Any], blobs: list[bytes] | None = None, *, extra: float = 0.0, idle: bool = False
    ) -> Any:  # fmt: skip
        """Send one command.

        Args:
            header: the command in ``op``, and its parameters.
            blobs: bytes that go with it.
            extra: seconds that it may take beside the submission's budget.
            idle: it launches nothing on the GPU, so it does not take the shared GPU lock. Compiling takes seconds, and a grading
                that waits for exclusive use must not wait for it.

        Returns:
            The reply and the bytes that go with it.

        Raises:
            GradingAborted: the submission raised, died, hung or sent nonsense.
            SandboxError: the machine is to blame.
        """
        with contextlib.nullcontext() if idle else self.gpu.using():
            return self._ask(header, blobs, extra)

    def _ask(self, header: dict[str, Any], blobs: list[bytes] | None, extra: float) -> Any:
        if self._ended is not None:
            raise self._ended  # a late runner may still reply, but to an earlier command
        if not self._started:
            self._started = True
            self.budget.grant(FIRST_USE_SECONDS if self.backend == "cuda" else 0.0)
        start = time.monotonic()
        try:
            reply, data = self._exchange(header, blobs, start + self.budget.left + extra)
        except wire.Late:
            self._read_log()
            given = self.budget.compile_spent + extra
            more = f" beside {given:.0f} s for compilers" if given > 0 else ""
            raise self._lost(Verdict.TIMEOUT, f"no result within {self.budget.wall:.0f} s of wall time{more}") from None
        except wire.Gone:
            if self._abandoned:
                raise self._lost(Verdict.RUNTIME_ERROR, ABANDONED) from None
            fate = self.runner.fate()
            self._read_log()
            if fate in OUTSIDE and not self.denied:
                raise SandboxError(f"the submission's process was killed from outside (signal {-fate})") from None
            how = "it hung up" if fate is None else f"signal {-fate}" if fate < 0 else f"exit status {fate}"
            raise self._lost(Verdict.RUNTIME_ERROR, f"the submission's process died ({how})") from None
        except wire.WireError as e:
            self._read_log()
            raise self._lost(Verdict.RUNTIME_ERROR, f"the submission's process sent nonsense ({e})") from None
        self.budget.spend(time.monotonic() - start)
        reply = wire.clean(reply)
        if "want" in reply:  # in the middle of a call; the denied operations come with its end
            return reply, data
        self._served += 1
        self._read_log(pairs(reply.get("denied")))
        if self._log_number != self._served:
            self.denied.append(("tampering", "the log of denied operations fell silent"))
        self.standing = self.standing and bool(reply.get("standing"))
        if not reply.get("ok"):
            self._stop(reply)
        return reply, data

    def _exchange(self, header: dict[str, Any], blobs: list[bytes] | None, deadline: float) -> Any:
        """Send a command and read the reply. Compiles the kernels that the runner asks for meanwhile."""
        reply, data = self.runner.ask(header, blobs, deadline=deadline)
        while self.compiler is not None and isinstance(reply.get("compile"), dict):
            answer = self.compiler.compile(reply["compile"], deadline)
            if self.compiler.changed:
                self.denied.append(("tampering", f"a kernel was launched that the source does not define: {self.compiler.changed}"))
            reply, data = self.runner.ask({"values": answer}, deadline=deadline)
        return reply, data

    def _read_log(self, claimed: Sequence[tuple[str, str]] = ()) -> None:
        """Add denied operations: those of the log, which the submission cannot take back, and those that the runner reports."""
        rows = self.runner.log()
        for row in rows:
            if type(row) is int:
                # Sequence numbers must increase by one; a gap counts as tampering.
                self._log_number = row if row == self._log_number + 1 else -1
        logged = pairs([r for r in rows if type(r) is not int])
        self.denied = list(dict.fromkeys([*self.denied, *logged, *claimed]))

    def _lost(self, verdict: Verdict, message: str) -> GradingAborted:
        """End the session with a process that does not reply any more; denied operations make the verdict ``rejected``."""
        self._ended = GradingAborted(verdict, message)
        if self.denied:
            found = [Violation(*d) for d in self.denied[:5]]
            self._ended = GradingAborted(Verdict.REJECTED, f"{self.denied[0][1]}; {message}", found)
        return self._ended

    def _stop(self, reply: dict[str, Any]) -> None:
        line = f"line {str(reply['line'])[:20]}: " if reply.get("line") else ""
        message = f"{line}{str(reply.get('name'))[:200]}: {str(reply.get('message'))[:1500]}"
        kind = reply.get("kind")
        # Triton writes files for the submission, so a full disk may show as the submission's error: look at the disk.
        full = kind == "infra" or f"[Errno {errno.ENOSPC}]" in message
        if full and shutil.disk_usage(self.runner.folder).free < DISK_BYTES:
            raise SandboxError(f"the disk is full: {message}")
        # A submission's share of a GPU is bounded: a full device is full of other gradings' memory.
        if self.backend == "cuda" and "out of memory" in message.lower() and _free_memory() < max(DEVICE_BYTES, self.case_bytes):
            raise SandboxError(f"the GPU's memory is full: {message}")
        if kind == "policy" or (self.denied and kind in ("runtime", "compile")):
            found = [Violation(r, f"{line}{d}") for r, d in self.denied[:5]]
            raise GradingAborted(Verdict.REJECTED, f"{line}{self.denied[0][1] if self.denied else message}", found)
        verdicts = {"compile": Verdict.COMPILE_ERROR, "syntax": Verdict.MALFORMED, "timeout": Verdict.TIMEOUT}
        aborted = GradingAborted(verdicts.get(str(kind), Verdict.RUNTIME_ERROR), message)
        aborted.error = (str(reply.get("name")), str(reply.get("message")))
        raise aborted

    def load(self, data: bytes) -> None:
        """Execute the submission's module.

        Args:
            data: the source.

        Raises:
            GradingAborted: it raises, or has no entry function.
        """
        if self._elsewhere and self.engine is not None:
            self.compiler = self._compilers(self.zygote, data)
            self.engine.compiled = self.compiler.rows
        reply, _ = self.ask({"op": "load", "entry": self.task.entry}, [data], idle=True)
        if not reply.get("entry"):
            raise GradingAborted(Verdict.MALFORMED, f"{self.task.entry!r} is not a function after the module ran")

    def header(
        self, args: dict[str, Any], generator_seed: int = 1, blobs: list[bytes] | None = None, turn: str = "new"
    ) -> dict[str, Any]:  # fmt: skip
        """Encode the arguments of a call.

        Args:
            args: by name. A dict is sent as it is.
            generator_seed: of a generator argument.
            blobs: receives the bytes of tensors; on the CPU tier tensors are sent without their values.
            turn: which generator the runner passes (``Runner._generator``).

        Returns:
            The header of the command, without ``op``.
        """
        encoded: dict[str, Any] = {}
        blobs = [] if blobs is None else blobs
        for name, value in args.items():
            if isinstance(value, GeneratorArg):
                encoded[name] = {"k": "generator", "seed": generator_seed, "turn": turn}
            elif isinstance(value, DeviceArg):
                encoded[name] = {"k": "device"}
            elif isinstance(value, DtypeArg):
                encoded[name] = {"k": "dtype", "v": value.name}
            elif isinstance(value, torch.Tensor) and self.engine is not None:
                encoded[name] = blank(value)
            elif isinstance(value, dict):
                encoded[name] = value
            else:
                encoded[name] = wire.encode(value, blobs)
        kinds = inspect.Parameter.KEYWORD_ONLY
        # Required parameters go by position, as a caller would; the rest by name.
        whole = wire.assembled(encoded)
        positional = [
            n for n, p in self.task.signature.parameters.items()
            if n in whole and p.kind is not kinds and p.default is inspect.Parameter.empty
        ]  # fmt: skip
        return {"entry": self.task.entry, "args": encoded, "positional": positional}

    def call(
        self, case: Case, index: int, mode: str, repeat: int = 0, *, quiet: bool = False, keep: bool = False
    ) -> CallResult:  # fmt: skip
        """Draw fresh secret inputs and call once.

        Args:
            case: the case.
            index: its number among the graded cases.
            mode: ``run``, or ``ablate`` to leave every launch out.
            repeat: number of the call on the same inputs.
            quiet: draw from another family of inputs, so that this call reveals nothing of later ones.
            keep: the runner keeps the argument tensors for ``call_again``.

        Returns:
            The arguments and the untrusted result.
        """
        # Traffic is counted in the first call of a case.
        return self.make_call(self.draw_call(case, index, mode, repeat, quiet=quiet), keep=keep, detail=repeat == 0)

    def redrawn(self, case: Case, index: int, first: CallResult, turn: int, few: int = 0) -> dict[str, Any]:
        """Draw arguments for ``call_again``, most of whose values are those of the last call.

        Args:
            case: the case.
            index: its number among the graded cases.
            first: the last call.
            turn: number of this draw.
            few: as ``inputs.redraw`` takes it.

        Returns:
            The arguments.
        """
        seed = inputs.case_seed(self.secret, self.task.id, self.split, index, AGAIN_FAMILY + turn)
        return inputs.redraw(self.task, case, first.args, seed, few)

    def call_again(self, case: Case, args: dict[str, Any]) -> CallResult:
        """Call once more with the same tensor objects, most of whose values are the old ones (CPU tier).

        A submission that remembers results by address, shape, or samples of the values cannot tell this call from the last, which
        was made with ``keep`` or by this function.

        Args:
            case: the case.
            args: from ``redrawn``.

        Returns:
            The arguments and the untrusted result.

        Raises:
            GradingAborted: the submission failed, or its process names other addresses than before.
        """
        assert self.engine is not None
        before, self._repeats = self._bases, self._repeats + 1
        sent, blobs = self._with_out(case, args), list[bytes]()
        seed = inputs.case_seed(self.secret, self.task.id, self.split, self._repeats, REPEAT_FAMILY)
        generator_seed = inputs.generator_seed(seed, "generator") % (1 << 48)
        header = self.header(sent, generator_seed, blobs, "aside")
        header |= {"op": "call", "mode": "run", "seconds": max(0.1, self.budget.left), "reuse": True, "keep": True}
        reply, _ = self.ask(header, blobs)
        found = self._traced(self.engine, args, sent, generator_seed, reply, detail=False)
        if self._bases != before:
            text = "the arguments of a repeated call are not in the memory of the call before"
            raise GradingAborted(Verdict.REJECTED, text, [Violation("tampering", text)])
        return found

    def _with_out(self, case: Case, args: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments with a poisoned ``out`` if the case passes one."""
        if not case.out:
            return dict(args)
        expected = reference.expect(self.task, case, args, "cpu", exact=False)
        return args | {"out": inputs.poisoned(expected.native[0], case.layouts.get("out"))}

    def draw_call(self, case: Case, index: int, mode: str, repeat: int = 0, *, quiet: bool = False) -> DrawnCall:
        """Draw the inputs of a call and encode them; arguments as for ``call``."""
        # Statistical criteria compare calls on equal inputs; ablated calls get inputs of their own.
        family = {"run": 0, "ablate": 1}[mode] + (2 if quiet else 0)
        seed = inputs.case_seed(self.secret, self.task.id, self.split, index, family)
        # Grading by contract has drawn the first call of a derived case before, to see whether it tells anything.
        args = self.drawn.pop(index, None) if family == repeat == 0 else None
        args = inputs.draw(self.task, case, seed) if args is None else args
        turn = TURNS[repeat] if any(isinstance(v, GeneratorArg) for v in args.values()) else "new"
        generator_seed = inputs.generator_seed(seed, "another" if turn == "other" else "generator") % (1 << 48)
        sent, blobs = self._with_out(case, args), list[bytes]()
        header = self.header(sent, generator_seed, blobs, turn)
        if self.values:
            header |= {"torch_seed": reference.torch_seed(generator_seed), "spread": case.spread, "attribute": case.attribute}
            header["positional"] = [n for n in header["positional"] if n != case.spread]
        generator_seed += turn in ("again", "copy")  # the state after the first call
        return DrawnCall(args, sent, header | {"op": "call", "mode": mode}, blobs, generator_seed)

    def make_call(self, drawn: DrawnCall, *, keep: bool = False, detail: bool = True) -> CallResult:
        """Make a call that was drawn.

        Args:
            drawn: from ``draw_call``.
            keep: keep the tensors of the arguments for ``call_again``.
            detail: count sectors and repeated reads (CPU tier).

        Returns:
            The arguments and the untrusted result.

        Raises:
            GradingAborted: the submission ended it.
            SandboxError: the machine is to blame.
        """
        mode, args, generator_seed = drawn.header["mode"], drawn.args, drawn.generator_seed
        self.sent = drawn.sent
        header, blobs = drawn.header | {"seconds": max(0.1, self.budget.left), "keep": keep}, drawn.blobs
        ablated = mode == "ablate" and self.engine is None
        reply, data = self._ablated(header, blobs) if ablated else self.ask(header, blobs)
        if self.engine is not None:
            return self._traced(self.engine, args, drawn.sent, generator_seed, reply, ablate=mode == "ablate", detail=detail)
        with readable():
            answer, broken = self._answer(reply, data)
            launches, dots = count(reply.get("launches", 0)), [str(d)[:60] for d in list(reply.get("dots", []))[:100]]
        if mode == "run":
            self.launches += launches
            self.dots.update(dots)
        return CallResult(args, answer, generator_seed, broken)

    def compile_call(self, drawn: DrawnCall) -> None:
        """Have the runner begin to compile the launches of a call (CUDA), with every launch left out, until ``finish_compiling``.

        It does not take the GPU lock. An error of the call itself is ignored here; the real call reports it.
        """
        with survived():
            # The results are discarded: without launches even their lengths are undefined.
            header = drawn.header | {"mode": "ablate", "discard": True, "seconds": max(0.1, self.budget.left), "ahead": True}
            self._ablated(header, drawn.blobs)

    def finish_compiling(self) -> None:
        """Wait until the runner has compiled what it has begun to compile (CUDA). It does not take the GPU lock."""
        with survived():
            self._ablated({"op": "finish"}, [])

    def _ablated(self, header: dict[str, Any], blobs: list[bytes]) -> Any:
        """Make a call without launches: most of its time is compiling."""
        with self.budget.compiling():
            return self.ask(header, blobs, extra=self.budget.compile_left, idle=True)

    def _traced(
        self, engine: Engine, args: dict[str, Any], sent: dict[str, Any], generator_seed: int, reply: dict[str, Any],
        *, ablate: bool = False, detail: bool = True,
    ) -> CallResult:  # fmt: skip
        """Execute the steps that the runner recorded; the result comes from the engine alone."""
        before = engine.cpu_seconds
        bases = reply.get("inputs")
        # ``out`` may have another shape in the next call.
        self._bases = {k: b for k, b in bases.items() if k != "out"} if isinstance(bases, dict) else {}

        def ask(answer: dict[str, Any], blobs: list[bytes] | None = None) -> Any:
            return self.ask(answer, blobs)[0]

        def executing() -> float:
            return engine.cpu_seconds - before

        try:
            with readable():
                done = engine.call(
                    sent,
                    ask,
                    reply,
                    lambda: self.budget.left - executing(),
                    moves=self.task.moves and not self.torch_ops,
                    picks=self.task.picks and not self.torch_ops,
                    torch_ops=self.torch_ops,
                    values=self.values,
                    ablate=ablate,
                    detail=detail,
                )
        except EngineError as e:
            raise self.ended(e) from None
        except SandboxError as e:
            if self.denied:
                raise self._lost(Verdict.RUNTIME_ERROR, str(e)) from None
            raise
        finally:
            self.budget.spend(executing())
            self.launches += engine.facts.launches
            for f in engine.facts.findings:
                hidden = {"index": None, "by": None} if f["indirect"] else {}
                place = {"program": tuple(f["program"]), "file": str(f["file"]).rsplit("/", 1)[-1]}
                found = Finding(**{**f, **place, **hidden})
                self.findings.setdefault((found.kind, found.kernel, found.line, found.tensor), found)
        self.dots.update(done.facts.dots)
        known = done.broken, done.facts, done.origins, done.effect, done.reordered
        return CallResult(args, done.answer, generator_seed, *known)

    def ended(self, e: EngineError) -> GradingAborted:
        """Return the verdict on an error of the engine."""
        text = str(e) if e.kind in ("policy", "memory") else f"{e.name}: {e}"
        if e.kind in ("policy", "forged"):
            rule = (
                "tampering" if e.kind == "forged" else "host_traffic" if e.name == "host_traffic" else "torch_compute"
            )
            return GradingAborted(Verdict.REJECTED, text, [Violation(rule, text)])
        if e.kind in ("unsupported", "broken"):
            message = f"unsupported on the {self.backend} backend: {text}"[:600]
            return GradingAborted(Verdict.INFRA_FAULT, message, fault_kind=FaultKind.UNSUPPORTED)
        verdicts = {"timeout": Verdict.TIMEOUT, "compile": Verdict.COMPILE_ERROR}
        return GradingAborted(verdicts.get(e.kind, Verdict.RUNTIME_ERROR), text)

    def begin_calls(self, cases: Sequence[Case], needed: Sequence[int]) -> None:
        """Draw the calls of every case, and begin to compile what they launch; ``at_once`` makes them. Arguments as there."""
        ready, ended = list[list[DrawnCall]](), list[Exception]()
        self._begun = ready, ended
        try:
            for index, case in enumerate(cases):
                if self._abandoned:
                    return
                drawn = [self.draw_call(case, index, "run", repeat) for repeat in range(needed[index])]
                self.compile_call(drawn[0])
                ready.append(drawn)
        except Exception as e:
            ended.append(e)

    def compile_all(self, begin: Callable[[], None], seconds: float) -> bool:
        """Compile what checked and timed calls launch, before any of them is made (CUDA).

        Args:
            begin: begins to compile it.
            seconds: in which the submission and its compilers must be done.

        Returns:
            Whether they are. Otherwise use another session, which has not seen the timed calls: what went wrong in these must not
            decide what becomes of the checked ones. Where an operation was denied or the firewall has fallen this session goes on:
            that must not be forgotten.

        Raises:
            GradingAborted: it cannot go on although it must, or it was abandoned.
        """
        error: Exception | None = None
        try:
            with self.budget.apart(seconds):
                begin()
                self.budget.restart(seconds)
                self.ask({"op": "finish"}, idle=True)
        except Exception as e:  # whatever it is, it comes again where it belongs
            error = e
        tampered = bool(self.denied) or not self.standing
        if error is None and self._ended is None:
            failed = self._begun is not None and bool(self._begun[1])
            self.compiled = tampered or not failed
            return self.compiled
        if tampered or self._abandoned:
            raise self._ended or self._lost(Verdict.RUNTIME_ERROR, str(error))
        return False

    def at_once(self, cases: Sequence[Case], needed: Sequence[int]) -> list[list[CallResult] | Exception]:
        """Make the calls of every case on a GPU. Drawing and compiling come before and judging after, so that the GPU lock is taken
        seldom and held shortly.

        Args:
            cases: the cases.
            needed: number of calls of each.

        Returns:
            The results of each case. An exception of a call, or of compiling for it, takes its place and is the last.
        """
        if self._begun is None:
            self.begin_calls(cases, needed)
        assert self._begun is not None
        (ready, ended), self._begun = self._begun, None
        try:
            if not self.compiled:
                self.finish_compiling()  # a call would wait for it with the GPU lock
        except Exception as e:
            return [ended[0] if ended and not ready else e]
        made: list[list[CallResult] | Exception] = []
        while len(made) < len(ready):
            with self.gpu.using():
                # A grading that waits for exclusive use waits for all shared ones; autotuning in every case takes seconds.
                began = time.monotonic()
                for index in range(len(made), len(ready)):
                    try:
                        made.append([self.make_call(drawn) for drawn in ready[index]])
                    except Exception as e:
                        if not (isinstance(e, GradingAborted) and e.error is not None and cases[index].raises):
                            return [*made, e]
                        made.append(e)  # the published test goes on after an exception that it catches
                    if time.monotonic() - began > TURN_SECONDS:
                        break
        return [*made, *ended]

    def arguments(self, case: Case, index: int) -> dict[str, Any]:
        """Return the arguments of the ``run`` calls of a case, as ``call`` draws them."""
        return inputs.draw(self.task, case, inputs.case_seed(self.secret, self.task.id, self.split, index, 0))

    def calls(self, case: Case, index: int, count: int, mode: str) -> list[CallResult]:
        """Make several calls on the same inputs, which statistical criteria need.

        Args:
            case: the case.
            index: its number among the graded cases.
            count: number of calls.
            mode: ``run`` or ``ablate``.

        Returns:
            One result for each call.
        """
        return [self.call(case, index, mode, repeat) for repeat in range(count)]

    def _answer(
        self, reply: dict[str, Any], data: Sequence[bytearray], decode: Callable[..., torch.Tensor] = wire.decode_tensor
    ) -> tuple[Answer, str | None]:  # fmt: skip
        broken = None
        outputs = []
        for d in reply["outputs"]:
            if d["k"] == "number" and self.values:
                outputs.append(number(d))
                continue
            if d["k"] != "tensor":
                broken = f"returned a {d.get('type')} where a tensor was expected"
                continue
            if d.get("device") != self.backend:
                broken = f"returned a tensor on {d.get('device')}, expected {self.backend}"
            outputs.append(decode(d, data))
        after = {k: decode(d, data) for k, d in reply["after"].items() if k != "out"}
        claims = [d for d in reply["outputs"] if d["k"] == "tensor"]
        return Answer(
            outputs=tuple(outputs), is_tuple=bool(reply["is_tuple"]), after=after,
            aliases=tuple(d.get("alias") for d in claims), shares=tuple(d.get("shares") for d in claims),
            # Results of timed calls are copies, so their strides are not known.
            strides=tuple(tuple(int(s) for s in d["strides"]) for d in claims) if all("strides" in d for d in claims) else None,
            grads=tuple(d.get("requires_grad") is True for d in claims),
        ), broken  # fmt: skip

    def build(self, targets: list[str]) -> list[Build]:
        """Compile the kernels seen since the last build ahead of time. The submission is charged nothing for it.

        Args:
            targets: for which.

        Returns:
            One build for each kernel and target, as the runner reports them.
        """
        with self.budget.free():
            reply, _ = self.ask({"op": "build", "targets": targets}, extra=BUILD_SECONDS, idle=True)
        with readable():
            return [build(row) for row in reply["builds"][:MAX_BUILDS]]

    def ideal_bytes(self, case: Case, claimed: CallResult) -> int:
        """Return the bytes that a call must move at least.

        Args:
            case: the case.
            claimed: the call.

        Returns:
            Bytes of compulsory memory traffic (``grading.compulsory_work``).
        """
        expected = reference.expect(self.task, case, claimed.args, "cpu", exact=False)
        return compulsory_work.ideal_bytes(self.task, case, claimed.args, expected, single_call=True)
