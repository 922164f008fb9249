"""Runs one submission in one process: loads it, calls it with the grader's inputs, returns raw outputs.

The process is a fork of the zygote and never serves a second submission. The grader trusts none of its replies.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from threading import get_ident
from typing import Any

import torch
import triton

from kbx_env.confinement import confine, unhidden
from kbx_env.device.driver import process_driver
from kbx_env.device.ipc_runner import IpcSender
from kbx_env.device.stopwatch import Stopwatch
from kbx_env.protocol import wire
from kbx_env.sandbox import compile_cache, driver_cache, firewall, launcher, limits, noop_stubs, specialised
from kbx_env.sandbox.clock_guard import ClockGuard
from kbx_env.sandbox.compile_ahead import SWITCH_SECONDS
from kbx_env.sandbox.compile_errors import locate
from kbx_env.sandbox.fake_cuda import driver
from kbx_env.sandbox.launches import Interceptor, NotRebuilt, quick_launchers
from kbx_env.sandbox.recorder import Ask, Recorder, install, recording

LARGE = 64 << 20
"""From this size in bytes memory comes from the operating system as zeros, page by page on first use."""


def left_out(settings: Mapping[str, Any]) -> set[str]:
    """Return the layers that the firewall of a runner leaves out, as ``firewall.install`` takes them.

    Args:
        settings: from the grader, for ``Runner``.
    """
    allowed = {"firewall"} if settings.get("torch_ops") is True else set()
    return {*settings.get("without", ()), *allowed, *({"values"} if settings.get("values") is True else ())}


class Runner:
    """Serves the grader's commands for one submission.

    Args:
        settings: from the grader: device, folder, layers to leave out.
        ask: asks the grader: for values from the engine, or to compile a kernel.
        channel: file descriptor of the pipe for denied operations.

    Attributes:
        trusted: 0 while the submission's code runs, else at least 1; the audit hook is armed at 0, and always in other threads.
        module: the names of the submission's module.
    """

    def __init__(self, settings: Mapping[str, Any], ask: Ask, channel: int | None = None) -> None:
        self.device = str(settings.get("device", "cpu"))
        without = left_out(settings)
        unbounded = "host" in without or "values" in without
        self.log = firewall.log_of_runner(math.inf if unbounded else firewall.HOST_READS, channel)
        self.trusted = 1
        self.folder = os.path.realpath(settings["folder"])
        os.environ["TRITON_CACHE_DIR"] = os.path.join(self.folder, "triton")
        triton.knobs.cache.dir = os.environ["TRITON_CACHE_DIR"]
        # Compilers and CUDA write their files in the only writable folder.
        os.environ["TMPDIR"] = tempfile.tempdir = self.folder
        os.environ["CUDA_CACHE_PATH"] = os.path.join(self.folder, "cuda")
        os.chdir(self.folder)
        if self.device == "cuda":
            self._start_gpu(ask, settings.get("torch_ops") is True)
        if "kernel" not in without:
            # The folder of this runner lies in a folder of its zygote, which lies in the one of the grader.
            confine(self.folder, unhidden(os.path.dirname(os.path.dirname(self.folder))))
        limits.limit(self.device)
        allow = settings.get("torch_ops") is True
        values = "values" in without
        self.recorder = None if self.device == "cuda" else Recorder(self.log, ask, allow, values)
        self.interceptor = Interceptor("cuda" if self.device == "cuda" else "cpu", self.recorder)
        if settings.get("elsewhere") is True:
            self.interceptor.elsewhere = lambda row: ask({"compile": row})
        self.interceptor.install()
        self.walls = firewall.install("cuda" if self.device == "cuda" else "cpu", self.log, without)
        if "lockdown" not in without:
            # Only this thread works for the runner. Others compile, or are the submission's own.
            own, current = get_ident(), get_ident
            limits.watch(self.log, self.folder, lambda: not self.trusted or current() != own)
        noop_stubs.install()
        if self.recorder is not None:
            install(self.recorder)
            driver.install()
        # The stopwatch takes its torch functions now, before the submission can replace them.
        self.stopwatch = Stopwatch("cuda", guards=True) if self.device == "cuda" else None
        self.clocks = ClockGuard(self.log)
        self.module: dict[str, Any] = {}
        self.generator: torch.Generator | None = None
        self.generator_state: torch.Tensor | None = None
        self._submission_error: BaseException | None = None
        self._text = ""
        self._kept: dict[str, torch.Tensor] = {}

    def _start_gpu(self, ask: Ask, torch_ops: bool) -> None:
        """Make the CUDA context and what needs one, before the process is confined.

        Args:
            ask: asks the grader when the context may be made.
            torch_ops: the submission may call torch's solvers, as the baseline does, whose process keeps blocks for them.
        """
        sys.setswitchinterval(SWITCH_SECONDS)
        limits.start_driver()
        ask({"context": True})  # the grader answers when no grading measures
        limits.make_context()
        handle = ask({"context": False})
        limits.use_context()
        # Also before confinement: CUDA IPC connects through sockets that a confined process cannot reach.
        self.mail = _mail(handle)
        if torch_ops:
            process_driver().keep_suballocation_blocks()
        quick_launchers()
        compile_cache.install()
        specialised.keep_contexts()
        # On first use; do it now, while the runner waits for its submission.
        with contextlib.suppress(Exception):  # the first launch reports an error
            shared = os.path.join(os.path.dirname(self.folder), "driver")
            driver_cache.kept(triton.knobs.cache.dir, shared, _load_driver)

    @contextlib.contextmanager
    def submission(self) -> Iterator[None]:
        """Run the submission's code within the block: the audit hook is armed, and memory operations are recorded."""
        self.trusted -= 1
        try:
            with recording(self.recorder):
                yield
        except BaseException as e:
            self._submission_error = e
            raise
        finally:
            self.trusted += 1

    def load(self, header: Mapping[str, Any], blobs: list[bytearray]) -> dict[str, Any]:
        """Execute the source as a module. It is written to a file because Triton reads the source text of kernels.

        Args:
            header: ``entry``, the name of the entry function.
            blobs: the source.

        Returns:
            ``entry``: whether the module has such a function.
        """
        path = os.path.join(self.folder, "submission.py")
        source = bytes(blobs[0])
        with open(path, "wb") as f:
            f.write(source)
        self._text = source.decode("utf-8", "replace")
        self.module = {"__name__": "submission", "__file__": path, "__builtins__": __builtins__}
        module = type(sys)("submission")
        module.__dict__.update(self.module)
        self.module = module.__dict__
        sys.modules["submission"] = module
        code = compile(source, path, "exec", dont_inherit=True)
        with self.submission():
            exec(code, self.module)
        return {"entry": callable(self.module.get(header["entry"]))}

    def _argument(self, d: Mapping[str, Any], blobs: list[bytearray]) -> Any:
        if d["k"] == "generator":
            return self._generator(int(d["seed"]), d.get("turn", "new"))
        if d["k"] == "device":
            return torch.device("cuda")
        if d["k"] == "blank":
            span = 1 + sum((n - 1) * s for n, s in zip(d["shape"], d["stride"], strict=True)) if all(d["shape"]) else 0
            dtype, count = wire.DTYPES[d["dtype"]], d["shift"] + span if span else 0
            # On the CPU tier the engine answers host reads of it; on CUDA it serves to compile for its shape. Timed
            # sizes have gigabytes, which nothing touches.
            small = self.device == "cpu" and count * dtype.itemsize < LARGE
            base = (torch.zeros if small else torch.empty)(count, dtype=dtype, device=self.device)
            return base.as_strided(d["shape"], d["stride"], d["shift"] if span else 0)
        if "mail" in d:
            return self.mail.tensor(d, self.device)
        value = wire.decode(d, blobs)
        if isinstance(value, torch.Tensor) and self.device == "cuda":
            # as_strided on a moved buffer keeps the layout that .to() would make dense
            base = value.as_strided((value.untyped_storage().nbytes() // value.element_size(),), (1,), 0)
            value = base.to("cuda").as_strided(value.shape, value.stride(), value.storage_offset())
        return value

    def _generator(self, seed: int, turn: str) -> torch.Generator:
        """Choose the generator of a call.

        Args:
            seed: for a new generator.
            turn: ``again`` for the generator of the last call; ``copy`` for a new one in the state in which the last
                ``again`` found it; ``aside`` for a new one that is no later call's last; else a new one.

        Returns:
            A generator on this device.
        """
        if turn == "again" and self.generator is not None:
            self.generator_state = self.generator.get_state()
            return self.generator
        fresh = torch.Generator(device=self.device).manual_seed(seed)
        if turn == "aside":
            return fresh
        self.generator = fresh
        if turn == "copy" and self.generator_state is not None:
            self.generator.set_state(self.generator_state)
        return self.generator

    def call(self, header: Mapping[str, Any], blobs: list[bytearray]) -> tuple[dict[str, Any], list[bytes]]:
        """Call the entry once.

        Args:
            header: arguments, and ``mode``: ``run`` or ``ablate``.
            blobs: the bytes of tensor arguments.

        Returns:
            The reply and the bytes of its tensors. On the CPU tier the reply has the recorded steps and no bytes.
        """
        # The same tensor objects once more: whoever remembers results by address, or on the tensor, finds them again.
        kept = self._kept if header.get("reuse") is True else {}
        kept = {k: t for k, t in kept.items() if list(t.shape) == header["args"].get(k, {}).get("shape")}  # out= may differ
        named = {name: kept[name] if name in kept else self._argument(d, blobs) for name, d in header["args"].items()}
        tensors = {k: v for k, v in named.items() if isinstance(v, torch.Tensor)}
        self._kept = tensors if header.get("keep") is True else {}
        kwargs = wire.assembled(named)
        positional = [kwargs.pop(name) for name in header["positional"]]
        if header.get("spread"):
            positional = [*kwargs.pop(header["spread"])]
        if "torch_seed" in header:
            torch.manual_seed(int(header["torch_seed"]))
        self.interceptor.reset(header["mode"])
        self.log.host_reads = 0
        if self.recorder is not None:
            return self._record(header, positional, kwargs, tensors), []
        with self.submission(), _fresh_memory_filled() if header["mode"] == "ablate" else contextlib.nullcontext():
            result = self._attribute(header, self.module[header["entry"]](*positional, **kwargs))
        torch.cuda.synchronize()
        if header.get("discard") is True:
            return {}, []
        reads = self.log.host_reads
        out: list[bytes] = []
        is_tuple, results = _results(result)
        outputs = [_claim(v, tensors, out) for v in results]
        after = {k: _claim(v, {}, out) for k, v in tensors.items()}
        reply = {
            "outputs": outputs, "is_tuple": is_tuple, "after": after, "host_reads": reads,
            "launches": len(self.interceptor.launches), "dots": self.interceptor.dots(),
        }  # fmt: skip
        return reply, out

    def _record(
        self, header: Mapping[str, Any], positional: list[Any], kwargs: dict[str, Any], tensors: dict[str, torch.Tensor]
    ) -> dict[str, Any]:
        """Call the entry on stand-in tensors; the reply has the recorded steps and the views that are the results."""
        assert self.recorder is not None
        self.recorder.begin(header["mode"] == "run" or self.recorder.allow, tensors)
        with self.submission():
            result = self._attribute(header, self.module[header["entry"]](*positional, **kwargs))
        is_tuple, results = _results(result)
        outputs = [self._output(v, tensors) for v in results]
        after = {k: self.recorder.view(t) for k, t in tensors.items()}
        return {"outputs": outputs, "is_tuple": is_tuple, "after": after} | self.recorder.take()

    @staticmethod
    def _attribute(header: Mapping[str, Any], result: Any) -> Any:
        """Return the attribute of a result that the published test reads; without one, the result."""
        return getattr(result, header["attribute"]) if header.get("attribute") else result

    def _output(self, value: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        assert self.recorder is not None
        if type(value) in _NUMBERS:
            return {"k": "number", "v": repr(value), "type": type(value).__name__}
        if type(value) not in _TENSORS:
            return {"k": "other", "type": type(value).__name__}
        if driver.real_device(value).type != "cpu" or value.layout != torch.strided or value.dtype not in wire.NAMES:
            return {"k": "other", "type": f"{value.layout} {value.dtype} tensor"}
        same = next((name for name, t in tensors.items() if value is t), None)
        return {"k": "view", "view": self.recorder.view(value.detach()), "requires_grad": value.requires_grad, "same": same}

    def build(self, header: Mapping[str, Any], blobs: list[bytearray]) -> dict[str, Any]:
        """Compile the kernels seen so far.

        Args:
            header: ``targets``.
            blobs: none.

        Returns:
            ``builds``: one row for each kernel and target.
        """
        return {"builds": self.interceptor.build(list(header["targets"]))}

    @staticmethod
    def finish(header: Mapping[str, Any], blobs: list[bytearray]) -> dict[str, Any]:
        """Wait for the kernels that commands with ``ahead`` have begun to compile, as every other command does (``answer``)."""
        return {}

    def time(self, header: Mapping[str, Any], blobs: list[bytearray]) -> tuple[dict[str, Any], list[bytes]]:
        """Serve a timing command (CUDA only), as ``device/stopwatch.py`` describes them.

        Args:
            header: the command in ``do``, and its parameters.
            blobs: the bytes of tensor arguments.

        Returns:
            The reply and the bytes of its tensors.

        Raises:
            ValueError: the device is not CUDA.
        """
        watch = self.stopwatch
        if watch is None:
            raise ValueError("there is no stopwatch on this device")
        self.interceptor.mode = "dry" if header["do"] == "dry" else "time"
        if "preallocate" in header:  # before the first values of a case are taken
            self.mail.empty()
            slot_bytes, slots, others, ample = header["preallocate"]
            watch.preallocate(int(slot_bytes), int(slots), int(others), ample is True)
        match header["do"]:
            case "prepare":
                return self._prepare(watch, header, blobs), []
            case "dry" | "warm" | "empty":
                return {"dry": watch.dry, "warm": watch.warm, "empty": watch.time_empty}[header["do"]](), []
            case "release":
                self.mail.empty()
                return watch.release(), []
            case "take":
                return self.mail.take(int(header["offset"]), int(header["size"]), int(header["total"])), []
            case "give":
                return self.mail.give(int(header["offset"]), int(header["size"])), []
            case "shuffle":
                return watch.shuffle(int(header["seed"]), header.get("calls", True) is True), []
            case "capture":
                return watch.capture([int(i) for i in header["order"]]), []
            case "replay":
                return watch.replay(int(header["times"]), header.get("turns")), []
            case "measure":
                return watch.measure(header), []
        return self._results(watch, header)

    def _results(self, watch: Stopwatch, header: Mapping[str, Any]) -> tuple[dict[str, Any], list[bytes]]:
        captured, mailed = bool(header.get("captured")), header.get("mailed") is True
        found = [(watch.result(int(call), captured), bool(inputs)) for call, inputs in header["calls"]]
        claims, total, data = self.mail.claims(found, self.device, mailed)
        if mailed and total:
            self.mail.give(0, min(int(header["window"]), total))
        return {"results": claims, "total": total}, data

    def _prepare(self, watch: Stopwatch, header: Mapping[str, Any], blobs: list[bytearray]) -> dict[str, Any]:
        slots = [{name: self._argument(d, blobs) for name, d in slot.items()} for slot in header["slots"]]
        entry, names, assembled = self.module[header["entry"]], header["positional"], wire.assembled

        def call(slot: dict[str, Any]) -> Any:
            kwargs = assembled(slot)
            positional = [kwargs.pop(n) for n in names]
            self.log.host_reads = 0
            with self.submission():
                return entry(*positional, **kwargs)

        self.mail.empty()  # the slots have copies, and the largest cases fill the GPU
        several = {"slots": int(header.get("count", 0)), "written": header.get("written", ())}
        return watch.prepare(call, slots, turning=header.get("turning"), warm=False, **several)

    def answer(self, header: Mapping[str, Any], blobs: list[bytearray]) -> tuple[dict[str, Any], list[bytes]]:
        """Serve one command; an exception becomes a classified error, never a traceback of the runner.

        Args:
            header: the command in ``op``, and its parameters.
            blobs: bytes that go with it.

        Returns:
            The reply, with ``ok``, denied operations and seconds, and the bytes that go with it.
        """
        start = time.perf_counter()
        data: list[bytes] = []
        try:
            if header.get("ahead") is not True and self.interceptor.ahead.busy:  # no thread compiles while the GPU is used
                with self.submission():  # hooks of the submission may run
                    self.interceptor.ahead.finish()
            handler = {
                "load": self.load, "call": self.call, "build": self.build, "time": self.time, "finish": self.finish,
            }[header["op"]]  # fmt: skip
            got = handler(header, blobs)
            reply, data = got if isinstance(got, tuple) else (got, [])
            reply["ok"] = True
        except BaseException as e:  # the submission may raise anything, SystemExit included
            self.trusted = max(self.trusted, 1)
            reply = {"ok": False, **_classify(e, self.folder, self._text, self.interceptor)}
            if e is not self._submission_error and isinstance(e, OSError) and e.errno in (errno.ENOSPC, errno.EDQUOT):
                reply["kind"] = "infra"
        self._submission_error = None  # its traceback keeps the arguments of the call, gigabytes at timed sizes
        self.clocks.check()
        reply["denied"] = [list(d) for d in self.log.denied[:20]]
        # The probe takes 20 ms: between the commands of one measurement it would disturb the timing. While threads compile it
        # waits for the command after them.
        measures = header["op"] == "time" and header["do"] != "results"
        reply["standing"] = measures or header.get("ahead") is True or firewall.probe(self.log)
        reply["seconds"] = time.perf_counter() - start
        self.log.served()
        return reply, data


_NUMBERS = (bool, int, float)
_TENSORS = (torch.Tensor, torch.nn.Parameter)
"""Subclasses are refused: they would run their own code when the runner inspects them."""


def _load_driver() -> None:
    """Load Triton's driver and the launcher of kernels, and build them if Triton's cache has none."""
    triton.runtime.driver.active.utils  # noqa: B018  # loads it
    with contextlib.suppress(Exception):  # Triton builds launchers of its own then
        launcher.install()


def _mail(handle: str | None) -> IpcSender:
    """Return the transport for large tensors, closed where the driver cannot share memory with another process."""
    tools = process_driver()
    with contextlib.suppress(RuntimeError):
        return IpcSender(tools, bytes.fromhex(handle) if handle else None)
    return IpcSender(tools, None)


@contextlib.contextmanager
def _fresh_memory_filled() -> Iterator[None]:
    """Fill memory that torch allocates within the block: floats with NaN, integers with their largest value.

    A call whose launches are left out returns what its memory held before: often the results of an earlier call, which are
    right within the tolerance where results hardly depend on the inputs.
    """
    # torch.use_deterministic_algorithms() also imports the compiler's settings, which no submission may do.
    earlier = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(earlier[0], warn_only=earlier[1])


def _results(result: Any) -> tuple[bool, list[Any]]:
    """Return whether a result is a sequence, and its items, without running code of the submission's tuple subclasses."""
    for kind in (tuple, list):
        if issubclass(type(result), kind):
            return True, list(kind.__iter__(result))
    return False, [result]


def _claim(value: Any, tensors: Mapping[str, torch.Tensor], out: list[bytes]) -> dict[str, Any]:
    if type(value) in _NUMBERS:
        return {"k": "number", "v": repr(value), "type": type(value).__name__}
    if type(value) not in _TENSORS:
        return {"k": "other", "type": type(value).__name__}
    alias = shares = None
    for name, t in tensors.items():
        same_storage = (
            t.numel() > 0 and value.numel() > 0 and t.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
        )
        if same_storage:
            shares = shares or name
        if value is t or (
            same_storage
            and value.data_ptr() == t.data_ptr()
            and value.shape == t.shape
            and value.stride() == t.stride()
        ):
            alias = alias or name
    host = value.detach()
    if host.device.type not in ("cpu", "cuda") or host.layout != torch.strided or host.dtype not in wire.NAMES:
        return {"k": "other", "type": f"{host.layout} {host.dtype} tensor on {host.device}"}
    host = host.contiguous().to("cpu")
    claim = wire.encode(host, out)
    return claim | {
        "alias": alias, "shares": shares, "strides": list(value.stride()), "device": value.device.type,
        "requires_grad": value.requires_grad,
    }  # fmt: skip


def _classify(e: BaseException, folder: str, source: str, interceptor: Interceptor) -> dict[str, Any]:
    """Name the kind of an exception and the submission's line that raised it.

    Args:
        e: the exception.
        folder: of the submission; its name is left out of messages.
        source: the submission.
        interceptor: knows which specialisation the compiler has failed at.

    Returns:
        ``kind``, ``name``, ``message`` and ``line``.
    """
    from triton.compiler.errors import CompilationError

    line = None
    for frame in traceback.extract_tb(e.__traceback__):
        if frame.filename.startswith(folder):
            line = frame.lineno
    kind = "runtime"
    text = str(e)
    name = type(e).__name__
    if isinstance(e, firewall.PolicyViolation):
        kind = "policy"
    elif isinstance(e, CompilationError) or (type(e).__module__ or "").startswith("triton.compiler"):
        kind = "compile"
    elif isinstance(e, TimeoutError):
        kind = "timeout"
    elif isinstance(e, SyntaxError):
        kind = "syntax"
    elif name in ("OutOfResources", "PTXASError") or isinstance(e, NotRebuilt):
        kind = "compile"
    if isinstance(e, CompilationError):
        with contextlib.suppress(Exception):  # the submission can raise such an error too, made of anything
            located = locate(e, source, line)
            line, text = located.line or line, located.text
    if kind == "compile" and interceptor.compiling_now[0]:
        kernel, what = interceptor.compiling_now
        others = interceptor.specialisations(kernel)
        text = f"{text[:1200]}\nThe specialisation of {kernel} that failed: {what[:300]}"
        text += f"; {others} other{'s' * (others != 1)} of this kernel compiled" if others else ""
    return {"kind": kind, "name": name, "message": text.replace(folder + os.sep, "")[:2000], "line": line}


def serve(sock: socket.socket, settings: Mapping[str, Any], channel: int | None = None) -> None:
    """Serve commands until the grader closes the connection, then end the process.

    Args:
        sock: the connection to the grader.
        settings: from the grader, for ``Runner``.
        channel: file descriptor of the pipe for denied operations.
    """
    code = 0
    try:
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)

        turn = threading.Lock()  # host code may compile in threads

        def ask(request: dict[str, Any]) -> Any:
            with turn:
                wire.send(sock, {"ok": True} | request)
                answer, blobs = wire.receive(sock)  # from the grader, which is trusted
            return blobs[0] if request.get("raw") else answer["values"]

        runner = Runner(settings, ask, channel)
        wire.send(sock, {"ok": True, "ready": True, "mail": runner.device == "cuda" and runner.mail.open})
        while True:
            header, blobs = wire.receive(sock, max_bytes=16 << 30)  # from the grader, which is trusted
            reply, data = runner.answer(header, blobs)
            wire.send(sock, reply, data)
    except wire.WireError:
        pass
    except BaseException as e:
        code = 1
        with contextlib.suppress(Exception):
            wire.send(
                sock,
                {"ok": False, "kind": "infra", "name": type(e).__name__, "message": traceback.format_exc()[-2000:]},
            )
    finally:
        os._exit(code)
