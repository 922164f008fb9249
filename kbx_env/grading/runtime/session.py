"""Talking to one runner: draws secret inputs, sends calls, turns what comes back into claims to be judged."""

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

from kbx_env.deadlines import COMPILE_SECONDS
from kbx_env.errors import SandboxError
from kbx_env.grading import compulsory_work, inputs, reference
from kbx_env.grading.ablations import DefenceLayer
from kbx_env.grading.judge import Answer
from kbx_env.grading.judge.samples import TURNS
from kbx_env.grading.runtime.engine_client import HOST_READS, Engine, EngineError, Facts, Origin, blank
from kbx_env.grading.runtime.runner_pool import RunnerPool, RunnerSlot
from kbx_env.grading.runtime.untrusted import GradingAborted, build, count, pairs, readable, survived
from kbx_env.grading.runtime.zygote_client import OUTSIDE, Zygote
from kbx_env.grading.timing.gpu_lock import GpuHold, gpu_lock_of
from kbx_env.outcome import Build, Finding, Verdict, Violation
from kbx_env.protocol import wire
from kbx_env.spec.task import Case, DeviceArg, DtypeArg, GeneratorArg, Task

MAX_BUILDS = 1000
DEVICE_BYTES = 1 << 30
"""A GPU with less free memory than this is full."""
TURN_SECONDS = 1.0
"""Seconds of calls after which those are let in who wait for the GPU alone."""
DISK_BYTES = 256 << 20
"""With less space than this a runner's word that the disk is full is believed."""


@dataclass
class CallResult:
    """One call: what was sent, and what the runner says came out."""

    args: dict[str, Any]
    answer: Answer
    generator_seed: int
    """Of the generator's state before the call: equal numbers stand for equal states."""
    broken: str | None = None
    facts: Facts | None = None
    origins: tuple[Origin, ...] = ()
    effect: str | None = None
    """What the call did to memory that was not its to change."""


def _free_memory() -> int:
    """Bytes of the GPU's memory that nobody holds."""
    return int(torch.cuda.mem_get_info()[0])


def settings_of(backend: str, without: Collection[DefenceLayer], torch_ops: bool) -> dict[str, Any]:
    """What a runner is started with."""
    return {"device": backend, "without": sorted(without), "torch_ops": torch_ops}


class RunnerSession:
    """The conversation with one single-use runner. A context manager: the runner dies with it."""

    def __init__(
        self, zygote: Zygote, task: Task, backend: str, secret: bytes, split: str, wall: float,
        without: Collection[DefenceLayer] = (), torch_ops: bool = False, places: RunnerPool | None = None,
    ) -> None:  # fmt: skip
        self.torch_ops = torch_ops
        self.zygote, self.task, self.backend = zygote, task, backend
        self.secret, self.split, self.wall, self.without = secret, split, wall, without
        self.gpu = GpuHold(gpu_lock_of(backend))
        settings = settings_of(backend, without, torch_ops)
        self._place = places.take(zygote, settings) if places is not None else RunnerSlot(zygote, settings)
        self.runner, self.mailbox = self._place.runner, self._place.mailbox
        reads = HOST_READS if DefenceLayer.HOST not in without else math.inf
        try:
            self.engine = Engine(zygote, reads) if backend == "cpu" else None
        except SandboxError:
            self._place.close()
            raise
        self.findings: dict[tuple[Any, ...], Finding] = {}
        # Only the runner's time counts: a busy grader must not make a submission late.
        self.left, self._spare = wall, COMPILE_SECONDS
        self._over: GradingAborted | None = None
        self.denied: list[tuple[str, str]] = []
        self.dots: set[str] = set()
        self.launches = 0
        self.standing = True
        self._started = False
        self._served = self._heard = 0

    def __enter__(self) -> RunnerSession:
        return self

    def __exit__(self, *exc: object) -> None:
        self._place.close()
        if self.engine is not None:
            self.engine.close()

    def ask(
        self, header: dict[str, Any], blobs: list[bytes] | None = None, *, extra: float = 0.0, idle: bool = False
    ) -> Any:  # fmt: skip
        """One command; deaths, hangs and errors of the submission become ``GradingAborted``.

        ``idle``: it launches nothing on the GPU. To compile takes seconds, and who wants the GPU alone must not wait for that.
        """
        with contextlib.nullcontext() if idle else self.gpu.using():
            return self._ask(header, blobs, extra)

    def _ask(self, header: dict[str, Any], blobs: list[bytes] | None, extra: float) -> Any:
        if self._over is not None:
            raise self._over  # who was late may still answer, but to another question
        if not self._started:
            self._started = True
            # The first use of a GPU loads its context and the driver's stubs.
            self.left += 20 if self.backend == "cuda" else 0
        start = time.monotonic()
        try:
            reply, data = self.runner.ask(header, blobs, deadline=start + self.left + extra)
        except wire.Late:
            self._hear()
            given = COMPILE_SECONDS - self._spare + extra
            more = f" beside {given:.0f} s for compilers" if given > 0 else ""
            raise self._lost(Verdict.TIMEOUT, f"no result within {self.wall:.0f} s of wall time{more}") from None
        except wire.Gone:
            fate = self.runner.fate()
            self._hear()
            if fate in OUTSIDE and not self.denied:
                raise SandboxError(f"the submission's process was killed from outside (signal {-fate})") from None
            how = "it hung up" if fate is None else f"signal {-fate}" if fate < 0 else f"exit status {fate}"
            raise self._lost(Verdict.RUNTIME_ERROR, f"the submission's process died ({how})") from None
        except wire.WireError as e:
            self._hear()
            raise self._lost(Verdict.RUNTIME_ERROR, f"the submission's process sent nonsense ({e})") from None
        self.left -= time.monotonic() - start
        reply = wire.clean(reply)
        if "want" in reply:  # in the middle of a call; what was denied comes with its end
            return reply, data
        self._served += 1
        self._hear(pairs(reply.get("denied")))
        if self._heard != self._served:
            self.denied.append(("tampering", "the log of denied operations fell silent"))
        self.standing = self.standing and bool(reply.get("standing"))
        if not reply.get("ok"):
            self._stop(reply)
        return reply, data

    def _hear(self, claimed: Sequence[tuple[str, str]] = ()) -> None:
        """Denials from the log, which nobody in the process can take back, and from its own words."""
        rows = self.runner.log()
        for row in rows:
            if type(row) is int:
                self._heard = row if row == self._heard + 1 else -1  # whoever makes up numbers hides what is missing
        logged = pairs([r for r in rows if type(r) is not int])
        self.denied = list(dict.fromkeys([*self.denied, *logged, *claimed]))

    def _lost(self, verdict: Verdict, message: str) -> GradingAborted:
        """The end of a process that does not answer any more: what it was denied before is told."""
        self._over = GradingAborted(verdict, message)
        if self.denied:
            found = [Violation(*d) for d in self.denied[:5]]
            self._over = GradingAborted(Verdict.REJECTED, f"{self.denied[0][1]}; {message}", found)
        return self._over

    def _stop(self, reply: dict[str, Any]) -> None:
        line = f"line {str(reply['line'])[:20]}: " if reply.get("line") else ""
        message = f"{line}{str(reply.get('name'))[:200]}: {str(reply.get('message'))[:1500]}"
        kind = reply.get("kind")
        # Triton writes on behalf of the submission, whose own error it then is; the disk itself is asked in any case.
        full = kind == "infra" or f"[Errno {errno.ENOSPC}]" in message
        if full and shutil.disk_usage(self.runner.folder).free < DISK_BYTES:
            raise SandboxError(f"the disk is full: {message}")
        # A submission's own share of a GPU is bounded; a device that is full all the same is full of others.
        if self.backend == "cuda" and "out of memory" in message.lower() and _free_memory() < DEVICE_BYTES:
            raise SandboxError(f"the GPU's memory is full: {message}")
        if kind == "policy" or (self.denied and kind in ("runtime", "compile")):
            found = [Violation(r, f"{line}{d}") for r, d in self.denied[:5]]
            raise GradingAborted(Verdict.REJECTED, f"{line}{self.denied[0][1] if self.denied else message}", found)
        verdicts = {"compile": Verdict.COMPILE_ERROR, "syntax": Verdict.MALFORMED, "timeout": Verdict.TIMEOUT}
        raise GradingAborted(verdicts.get(str(kind), Verdict.RUNTIME_ERROR), message)

    def load(self, data: bytes) -> None:
        """Execute the module."""
        reply, _ = self.ask({"op": "load", "entry": self.task.entry}, [data], idle=True)
        if not reply.get("entry"):
            raise GradingAborted(Verdict.MALFORMED, f"{self.task.entry!r} is not a function after the module ran")

    def header(
        self, args: dict[str, Any], generator_seed: int = 1, blobs: list[bytes] | None = None, turn: str = "new"
    ) -> dict[str, Any]:  # fmt: skip
        """What a runner is told of a call. A tensor on the CPU tier is told without its values, a dict as it is."""
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

    def compiles(self, case: Case, index: int) -> None:
        """Have compiled what a call will launch (CUDA), with every launch left out: nobody has to wait for the GPU."""
        with survived():
            self._call(case, index, "run", 0, quiet=False, compiling=True)

    def call(self, case: Case, index: int, mode: str, repeat: int = 0, *, quiet: bool = False) -> CallResult:
        """Draw fresh secret inputs, call once."""
        found = self._call(case, index, mode, repeat, quiet=quiet, compiling=False)
        assert found is not None
        return found

    def _call(
        self, case: Case, index: int, mode: str, repeat: int, *, quiet: bool, compiling: bool
    ) -> CallResult | None:  # fmt: skip
        # Statistical truths compare calls on equal inputs; ablated calls get inputs of their own.
        family = {"run": 0, "ablate": 1}[mode] + (2 if quiet else 0)
        seed = inputs.case_seed(self.secret, self.task.id, self.split, index, family)
        args = inputs.draw(self.task, case, seed)
        turn = TURNS[repeat] if any(isinstance(v, GeneratorArg) for v in args.values()) else "new"
        generator_seed = inputs.generator_seed(seed, "another" if turn == "other" else "generator") % (1 << 48)
        sent = dict(args)
        if case.out:
            expected = reference.expect(self.task, case, args, "cpu")
            sent["out"] = inputs.poisoned(expected.native[0])
        blobs: list[bytes] = []
        header = self.header(sent, generator_seed, blobs, turn)
        generator_seed += turn in ("again", "copy")  # the state after the first call
        header |= {"op": "call", "mode": mode, "seconds": max(0.1, self.left)}
        if compiling:
            # Nobody looks at what comes out, which may be of any length: no kernel wrote the length either.
            self._ablated(header | {"mode": "ablate", "discard": True}, blobs)
            return None
        ablated = mode == "ablate" and self.engine is None
        reply, data = self._ablated(header, blobs) if ablated else self.ask(header, blobs)
        if self.engine is not None:
            return self._traced(self.engine, args, sent, generator_seed, reply, ablate=mode == "ablate")
        with readable():
            answer, broken = self._answer(reply, data)
            launches, dots = count(reply.get("launches", 0)), [str(d)[:60] for d in list(reply.get("dots", []))[:100]]
        if mode == "run":
            self.launches += launches
            self.dots.update(dots)
        return CallResult(args, answer, generator_seed, broken)

    def _ablated(self, header: dict[str, Any], blobs: list[bytes]) -> Any:
        """A call without launches: what it takes is compiling."""
        began = time.monotonic()
        try:
            return self.ask(header, blobs, extra=self._spare, idle=True)
        finally:
            given = min(time.monotonic() - began, self._spare)
            self._spare, self.left = self._spare - given, self.left + given

    def _traced(
        self, engine: Engine, args: dict[str, Any], sent: dict[str, Any], generator_seed: int, reply: dict[str, Any],
        *, ablate: bool = False,
    ) -> CallResult:  # fmt: skip
        """Execute what the runner asks for; nothing of the result is its own."""
        start, told = time.monotonic(), 0.0

        def ask(answer: dict[str, Any]) -> Any:
            nonlocal told
            began = time.monotonic()
            more, _ = self.ask(answer)
            told += time.monotonic() - began
            return more

        try:
            with readable():
                done = engine.call(
                    sent,
                    ask,
                    reply,
                    lambda: self.left - (time.monotonic() - start - told),
                    moves=self.task.moves and not self.torch_ops,
                    picks=self.task.picks and not self.torch_ops,
                    torch_ops=self.torch_ops,
                    ablate=ablate,
                )
        except EngineError as e:
            raise self.ended(e) from None
        except SandboxError as e:
            if self.denied:
                raise self._lost(Verdict.RUNTIME_ERROR, str(e)) from None
            raise
        finally:
            self.left -= time.monotonic() - start - told
            self.launches += engine.facts.launches
            for f in engine.facts.findings:
                hidden = {"index": None, "by": None} if f["indirect"] else {}
                place = {"program": tuple(f["program"]), "file": str(f["file"]).rsplit("/", 1)[-1]}
                found = Finding(**{**f, **place, **hidden})
                self.findings.setdefault((found.kind, found.kernel, found.line, found.tensor), found)
        self.dots.update(done.facts.dots)
        return CallResult(args, done.answer, generator_seed, done.broken, done.facts, done.origins, done.effect)

    def ended(self, e: EngineError) -> GradingAborted:
        """The verdict on what ended an execution."""
        text = str(e) if e.kind in ("policy", "memory") else f"{e.name}: {e}"
        if e.kind in ("policy", "forged"):
            rule = (
                "tampering" if e.kind == "forged" else "host_traffic" if e.name == "host_traffic" else "torch_compute"
            )
            return GradingAborted(Verdict.REJECTED, text, [Violation(rule, text)])
        if e.kind in ("unsupported", "broken"):
            return GradingAborted(Verdict.INFRA_FAULT, f"unsupported on the {self.backend} backend: {text}"[:600])
        return GradingAborted(Verdict.TIMEOUT if e.kind == "timeout" else Verdict.RUNTIME_ERROR, text)

    def at_once(self, cases: Sequence[Case], needed: Sequence[int]) -> list[list[CallResult] | Exception]:
        """The calls of every case, where they need a GPU: compiled before, judged after, so that it is asked for seldom.

        What a call raises, or compiling for it, stands in its place, and is the last.

        Args:
            cases: the cases.
            needed: calls of each.
        """
        ready, ended = 0, list[Exception]()
        try:
            for index, case in enumerate(cases):
                self.compiles(case, index)
                ready += 1
        except Exception as e:
            ended.append(e)
        made: list[list[CallResult] | Exception] = []
        while len(made) < ready:
            with self.gpu.using():
                # Whoever wants the GPU alone waits for all who share it: autotuners in every case would take seconds.
                began = time.monotonic()
                for index in range(len(made), ready):
                    try:
                        made.append(self.calls(cases[index], index, needed[index], "run"))
                    except Exception as e:
                        return [*made, e]
                    if time.monotonic() - began > TURN_SECONDS:
                        break
        return [*made, *ended]

    def calls(self, case: Case, index: int, count: int, mode: str) -> list[CallResult]:
        """Several calls on the same inputs (statistical truths need more than one)."""
        return [self.call(case, index, mode, repeat) for repeat in range(count)]

    def _answer(
        self, reply: dict[str, Any], data: Sequence[bytearray], decode: Callable[..., torch.Tensor] = wire.decode_tensor
    ) -> tuple[Answer, str | None]:  # fmt: skip
        broken = None
        outputs = []
        for d in reply["outputs"]:
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
            # The clock sends copies of what was timed: there are no strides to be told.
            strides=tuple(tuple(int(s) for s in d["strides"]) for d in claims) if all("strides" in d for d in claims) else None,
            grads=tuple(d.get("requires_grad") is True for d in claims),
        ), broken  # fmt: skip

    def build(self, targets: list[str]) -> list[Build]:
        """Ahead-of-time builds of the kernels seen since the last call."""
        left = self.left
        reply, _ = self.ask({"op": "build", "targets": targets}, extra=60, idle=True)
        self.left = left  # the compiler's time is not the submission's; what the runner says of it is not believed
        with readable():
            return [build(row) for row in reply["builds"][:MAX_BUILDS]]

    def ideal_bytes(self, case: Case, claimed: CallResult) -> int:
        """Bytes that the call had to move at least."""
        expected = reference.expect(self.task, case, claimed.args, "cpu", exact=False)
        return compulsory_work.ideal_bytes(self.task, case, claimed.args, expected, single_call=True)
