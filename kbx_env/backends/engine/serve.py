"""Runs the engine in a process of its own: a hostile kernel text may exhaust or crash it, but never the grader."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import socket
import time
import traceback
from collections.abc import Mapping
from typing import Any

from kbx_env.backends import ttir
from kbx_env.backends.engine.engine import ComputedByHost, Engine, LaunchRefused
from kbx_env.backends.engine.estimate import Estimator
from kbx_env.backends.engine.replay import Replay
from kbx_env.backends.engine.storage import TraceError
from kbx_env.backends.engine.symbols import UnknownSymbol
from kbx_env.errors import UsageError
from kbx_env.protocol import wire

_DUMPABLE = 4
"""PR_SET_DUMPABLE of prctl."""
MEMORY = 12 << 30
"""Bytes by which the address space may grow: for the storages, their flags, and the executor's own arrays."""


class EngineServer:
    """Answers the grader's messages for one submission.

    Attributes:
        engine: Executes calls.
        rows: Text and options of each kernel, by key.
        compiled: Resources of compiled kernels, see ``Estimator``.
        estimator: The estimate that is under way.
        replay: The last call, if the grader wants to execute it again.
    """

    def __init__(self) -> None:
        self.engine = Engine()
        self.rows: dict[str, Mapping[str, Any]] = {}
        self.compiled: dict[str, Any] = {}
        self.estimator: Estimator | None = None
        self.replay: Replay | None = None

    def answer(self, header: Mapping[str, Any], blobs: list[bytearray]) -> tuple[dict[str, Any], list[bytes]]:
        """Answer one message.

        Args:
            header: With ``estimate``, a part of an estimate; with ``again``, a replay of the last call; otherwise a
                part of a
                call: ``inputs``, ``kernels``, ``steps`` and the views to ``read`` afterwards.
            blobs: Bytes of the inputs.

        Returns:
            The reply, and the bytes of the views. An error becomes a reply with its kind and message. ``cpu_seconds`` is the
            CPU time that the answer took.
        """
        began = time.process_time()
        try:
            reply, out = self._answer(header, blobs)
        except Exception as e:
            reply, out = {"ok": False, **_classify(e)}, []
        if header.get("facts"):
            reply["facts"] = self.engine.facts()
        return reply | {"cpu_seconds": time.process_time() - began}, out

    def _answer(self, header: Mapping[str, Any], blobs: list[bytearray]) -> tuple[dict[str, Any], list[bytes]]:
        if "estimate" in header:
            return {"ok": True, "estimate": self._estimate(header, blobs)}, []
        if "again" in header:
            assert self.replay is not None
            reply, out = self.replay.run(header["again"], header["read"])
            return {"ok": True} | reply, out
        self._execute(header, blobs)
        return self._read(header)

    def _execute(self, header: Mapping[str, Any], blobs: list[bytearray]) -> None:
        """Execute a part of a call, or begin one."""
        # First: beginning a call looks at every byte that is left.
        for row in header.get("free", []):
            self.engine.heap.free(row)
        if header.get("begin") is not None:
            self.replay = Replay(self.engine) if header.get("keep") else None
            flags = {k: header.get(k) is True for k in ("moves", "picks", "torch_ops", "ablate", "values")}
            self.engine.begin(float(header["begin"]), **flags, detail=header.get("detail") is not False)
        if self.replay is not None:
            self.replay.record(header, blobs)
        for name, base, size, offset, blob, spec in header.get("inputs", []):
            self.engine.input(name, base, size, offset, blobs[blob], spec)
        kernels = header.get("kernels", {})
        if not isinstance(kernels, dict):
            raise TraceError("kernels")
        for key, row in kernels.items():
            if not isinstance(row, dict):
                raise TraceError("kernels")
            self.engine.kernel(key, row.get("text"), row.get("fused"))
            self.rows[key] = row
        self.engine.run(header.get("steps", []))

    def _read(self, header: Mapping[str, Any]) -> tuple[dict[str, Any], list[bytes]]:
        """Read the views of a message; the first ``results`` of them are the results of the call."""
        reply: dict[str, Any] = {"ok": True, "read": []}
        out: list[bytes] = []
        for spec in header.get("read", []):
            view, data = self.engine.read(spec, by_host="wanted" in header)
            out.append(data)
            reply["read"].append(self.engine.origin(view))
        for spec in header.get("read", [])[: header.get("results", 0)]:
            self.engine.mark_returned(spec)
        return reply, out

    def _estimate(self, header: Mapping[str, Any], blobs: list[bytearray]) -> dict[str, Any]:
        """Begin an estimate (with ``inputs``) or continue it.

        Args:
            header: The message.
            blobs: Bytes to repeat in the inputs.

        Returns:
            ``values`` that the host code reads back, if the message wants them, or else the estimate.
        """
        if "inputs" in header:
            self.estimator = Estimator(header["estimate"], float(header["seconds"]), self.compiled)
            for base, size, offset, blob in header["inputs"]:
                self.estimator.input(base, size, offset, blobs[blob] if blob is not None else b"")
        assert self.estimator is not None
        for key, row in dict(header.get("kernels") or {}).items():
            self.engine.kernel(key, row.get("text"), row.get("fused"))
            self.rows[key] = row
        steps = header.get("steps") or []
        launches = [str(s[1]) for s in steps if isinstance(s, list) and s[:1] == ["launch"] and len(s) > 1]
        for key in dict.fromkeys(k for k in launches if k in self.rows):
            self.estimator.kernel(key, self.rows[key], self.engine.kernels[key])
        self.estimator.run(steps)
        if "want" in header:
            return {"values": self.estimator.host_values(header["want"])}
        return self.estimator.result()


def _classify(e: Exception) -> dict[str, Any]:
    """Return the kind, name, message and source line of an error; unknown errors have the kind "broken"."""
    kinds: list[tuple[type[Exception], str]] = [
        (ComputedByHost, "policy"), (LaunchRefused, "runtime"),
        (UnknownSymbol, "compile"), (TraceError, "forged"), (ttir.OutOfBounds, "memory"),
        (ttir.DecidesOnUnwritten, "memory"),
        (ttir.DeviceAssert, "runtime"), (ttir.Deadlock, "runtime"), (ttir.Unsupported, "unsupported"), (TimeoutError, "timeout"),
        (MemoryError, "runtime"), (UsageError, "runtime"), (ttir.TtirError, "unsupported"),
    ]  # fmt: skip
    if isinstance(e, RuntimeError) and "allocate memory" in str(e):
        e = MemoryError()  # torch raises a RuntimeError
    kind = next((k for t, k in kinds if isinstance(e, t)), "broken")
    if kind == "broken":
        where = traceback.extract_tb(e.__traceback__)[-1]
        text = f"{e} ({os.path.basename(where.filename)}:{where.lineno})"
    else:
        text = str(e) or "out of memory on the CPU backend"
    line = getattr(e, "line", None)
    return {
        "kind": kind,
        "name": getattr(e, "name", type(e).__name__),
        "message": text[:1000],
        "line": line if line else None,
    }


def serve(sock: socket.socket) -> None:
    """Limit this process and answer messages until the grader closes the connection."""
    try:
        with open("/proc/self/statm") as f:
            now = int(f.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, now + MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        # On Linux kernels without Landlock, this keeps a runner of the same user from reading the inputs in this
        # process.
        ctypes.CDLL(None).prctl(_DUMPABLE, 0, 0, 0, 0)
        server = EngineServer()
        wire.send(sock, {"ok": True, "ready": True})
        while True:
            header, blobs = wire.receive(sock, max_bytes=16 << 30)
            wire.send(sock, *server.answer(header, blobs))
    except wire.WireError:
        pass
    except Exception as e:
        with contextlib.suppress(Exception):
            wire.send(sock, {"ok": False, **_classify(e)})
    finally:
        os._exit(0)
