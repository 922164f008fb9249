"""One grading's engine, seen from the grader: sends it the trace, gets values, results and facts back."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kbx_env.errors import SandboxError
from kbx_env.grading.judge import Answer
from kbx_env.grading.runtime.zygote_client import OUTSIDE, Zygote
from kbx_env.protocol import wire

HOST_READS, READ_BYTES = 64, 8
"""Scalars of one call that the host code may see, and the bytes of one."""


class EngineError(Exception):
    """The engine ended the call.

    Attributes:
        kind: policy, runtime, forged, memory, unsupported, timeout, broken or died.
    """

    def __init__(self, kind: str, name: str, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.kind, self.name, self.line = kind, name, line


@dataclass
class Origin:
    """Where the values of one result came from; counts are elements, ``None`` on a device that executes for itself."""

    elements: int
    stored: int
    moved: int
    """Put there by torch or by the host, not by a kernel."""
    unwritten: int
    inputs: frozenset[str]
    dots: frozenset[str]


@dataclass
class Facts:
    """What the launches of one call did, as the engine saw it. Bytes, and operations by unit."""

    launches: int = 0
    loaded: int = 0
    stored: int = 0
    atomic: int = 0
    sectors: int = 0
    reread: int = 0
    dots: tuple[str, ...] = ()
    flops: Mapping[str, int] = field(default_factory=dict)
    findings: tuple[Mapping[str, Any], ...] = ()
    kernels: tuple[Mapping[str, Any], ...] = ()
    between: int = 0
    """Bytes through memory that is neither an argument nor a result, in ``buffers`` storages."""
    buffers: int = 0
    operands: tuple[tuple[str, bool], ...] = ()
    """Kinds of products and of roundings to int8, and whether every operand depends on an input."""

    @property
    def moved(self) -> int:
        """Bytes loaded, stored and updated."""
        return self.loaded + self.stored + self.atomic


@dataclass
class Traced:
    """One executed call."""

    answer: Answer
    broken: str | None
    origins: tuple[Origin, ...]
    facts: Facts
    effect: str | None
    """What the call did to memory that was not its to change."""


class Engine:
    """The process that executes one submission's trace."""

    def __init__(self, zygote: Zygote, reads: float = HOST_READS) -> None:
        self._process, self._reads = zygote.spawn(role="engine"), reads
        self.facts = Facts()
        self.keep = False
        """Whether calls are remembered for ``again``."""
        self.totals = False
        """Which of two sums of integers followed the exchange in the last call; see ``_schemes.TOTALS``."""
        self._views: list[Any] = []

    def close(self) -> None:
        """End the process."""
        self._process.close()

    def call(
        self, sent: Mapping[str, Any], ask: Callable[[dict[str, Any]], dict[str, Any]], first: dict[str, Any],
        seconds: Callable[[], float], **flags: bool,
    ) -> Traced:  # fmt: skip
        """Execute one call.

        Args:
            sent: the arguments; tensors hold the secret values.
            ask: answers the runner and returns its next message.
            first: the runner's first message.
            seconds: what is left of the wall time.
            flags: ``moves``, ``picks``, ``torch_ops`` and ``ablate``, see the engine's ``begin``.

        Raises:
            EngineError: the trace or a launch failed.
            wire.WireError: the runner's message makes no sense.
            SandboxError: the engine was killed from outside.
        """
        message, begun, reads = first, False, 0.0
        tensors = {k: v for k, v in sent.items() if isinstance(v, torch.Tensor)}
        self.facts = Facts()
        while True:
            header: dict[str, Any] = {
                "steps": message.get("steps"), "kernels": message.get("kernels"), "free": _list(message.get("free")),
            }  # fmt: skip
            blobs: list[bytes] = []
            if not begun:
                begun = True
                bases = dict(message["inputs"])
                header |= {"begin": max(0.1, seconds()), "keep": self.keep, **flags}
                header["inputs"] = _inputs(tensors, bases, blobs)
            if "want" not in message:
                break
            header |= {"read": [message["want"]], "wanted": True, "facts": True}
            _, data = self._ask(header, blobs, seconds())
            values = _values(message["want"], data[0])
            # A complex number may carry sixteen bytes of anything.
            reads += len(data[0]) / READ_BYTES
            if reads > self._reads:
                raise EngineError("policy", "host_traffic", f"more than {self._reads} values read back in one call")
            message = ask({"values": values})
        claims = _list(message.get("outputs"))[: wire.MAX_BLOBS // 2]
        views = self._views = [c["view"] for c in claims if c["k"] == "view"]
        # Where the arguments lie is known here; a runner could name a copy that it has left alone.
        places = {k: _place(bases, k, t) for k, t in tensors.items() if t.numel()}
        after = {k: _span(v, tensors[k]) for k, v in places.items() if k != "out"}
        header |= {"read": [*views, *after.values()], "results": len(views), "facts": True}
        reply, data = self._ask(header, blobs, seconds())
        outputs = [_tensor(v, d) for v, d in zip(views, data, strict=False)]
        spans = {k: _tensor(v, d) for (k, v), d in zip(after.items(), data[len(views) :], strict=True)}
        changed = {k: t.clone() for k, t in tensors.items() if not t.numel() and k != "out"}
        changed |= {k: s.as_strided(tensors[k].shape, tensors[k].stride()) for k, s in spans.items()}
        effect = next((f"what lies between the elements of {k!r} was changed" for k, s in spans.items()
                       if not _gaps_alike(s, tensors[k])), None)  # fmt: skip
        if any(r["again"] for r in reply["read"][: len(views)]):
            effect = effect or "the result lies in the memory of an earlier call's result, which it overwrites"
        alias = tuple(next((k for k, p in places.items() if p == v and tensors[k].numel()), None) for v in views)
        shares = tuple(
            next((k for k, p in places.items() if p[0] == v[0] and _numel(p) and _numel(v)), None) for v in views
        )
        kinds = [str(c.get("type")) for c in claims if c["k"] != "view"]
        answer = Answer(
            outputs=tuple(outputs), is_tuple=bool(message["is_tuple"]), after=changed, aliases=alias, shares=shares,
            strides=tuple(tuple(v[4]) for v in views),
            grads=tuple(c.get("requires_grad") is True for c in claims if c["k"] == "view"),
        )  # fmt: skip
        origins = tuple(
            Origin(r["elements"], r["stored"], r["moved"], r["unwritten"], frozenset(r["inputs"]), frozenset(r["dots"]))
            for r in reply["read"][: len(views)]
        )
        written = tuple(
            Origin(r["elements"], r["stored"], r["moved"], r["unwritten"], frozenset(r["inputs"]), frozenset(r["dots"]))
            for k, r in zip(after, reply["read"][len(views) :], strict=True) if r["stored"] or r["moved"]
        )  # fmt: skip
        broken = f"returned a {kinds[0]} where a tensor was expected" if kinds else None
        return Traced(answer, broken, origins + written, self.facts, effect)

    def again(self, place: str, table: Sequence[int], seconds: float) -> tuple[tuple[torch.Tensor, ...], int]:
        """Execute the last call once more with other integers; see ``backends.engine.again``.

        Returns:
            The results, and how much of the work met other integers.

        Raises:
            EngineError: a launch failed that had not failed before.
        """
        asked = {"place": place, "table": list(table), "seconds": seconds}
        reply, data = self._ask({"again": asked, "read": self._views}, [], seconds)
        return tuple(_tensor(v, d) for v, d in zip(self._views, data, strict=True)), int(reply["touched"])

    def census(self, seconds: float) -> list[list[int]]:
        """Execute the last call once more as it was; how often each byte occurred in each operand of an int8 product, each result
        of a rounding to int8 and each load of packed bytes.

        Raises:
            EngineError: a launch failed that had not failed before.
        """
        asked = {"place": "products", "table": list(range(256)), "seconds": seconds, "count": True}
        reply, _ = self._ask({"again": asked, "read": []}, [], seconds)
        return [[int(n) for n in row] for row in reply["seen"]]

    def estimate(
        self, device: str, tiles: Mapping[str, torch.Tensor], sizes: Mapping[str, dict[str, Any]], message: dict[str, Any],
        ask: Callable[[dict[str, Any]], dict[str, Any]], seconds: float,
    ) -> tuple[dict[str, Any], dict[str, Any]]:  # fmt: skip
        """Estimate a call that is recorded but not executed; returns the estimate and the runner's last message.

        Args:
            device: a name that ``kbx_env.backends.cost`` knows.
            tiles: values to repeat, by argument: of any size.
            sizes: the arguments as ``blank`` describes them.
            message: the runner's first message.
            ask: answers the runner and returns its next message.
            seconds: the limit.

        Raises:
            EngineError: the call reads a result back, or cannot be counted.
            wire.WireError: the runner's message makes no sense.
        """
        rows, blobs = [], []
        for name, d in sizes.items():
            if all(d["shape"]):
                item = wire.DTYPES[d["dtype"]].itemsize
                span = 1 + sum((n - 1) * s for n, s in zip(d["shape"], d["stride"], strict=True))
                tile = tiles.get(name)
                same = tile is not None and tile.numel() and wire.NAMES[tile.dtype] == d["dtype"]
                if same and tile is not None:
                    blobs.append(wire.raw_bytes(tile.contiguous()))
                place = dict(message["inputs"])[name]
                rows.append([place, (d["shift"] + span) * item, d["shift"] * item, len(blobs) - 1 if same else None])
        begin: dict[str, Any] = {"inputs": rows, "seconds": seconds}
        while True:
            header = {
                "estimate": device,
                "kernels": message.get("kernels"),
                "steps": _list(message.get("steps")),
                **begin,
            }
            if "want" not in message:
                reply, _ = self._ask(header, blobs, seconds + 60)
                return reply["estimate"], message
            reply, _ = self._ask(header | {"want": message["want"]}, blobs, seconds + 60)
            begin, blobs = {}, []
            message = ask({"values": reply["estimate"]["values"]})

    def _ask(self, header: dict[str, Any], blobs: list[bytes], left: float) -> tuple[dict[str, Any], list[bytearray]]:
        try:
            reply, data = self._process.ask(header, blobs, deadline=time.monotonic() + max(0.1, left) + 1.0)
        except wire.Late:
            raise EngineError("timeout", "TimeoutError", "the launches took too long") from None
        except wire.Gone:
            fate = self._process.fate()
            if fate in OUTSIDE:
                raise SandboxError(f"the engine was killed from outside (signal {-fate})") from None
            # Its memory and its stack have limits of their own: whatever else ends it, the launches did.
            how = "it hung up" if fate is None else f"signal {-fate}" if fate < 0 else f"exit status {fate}"
            raise EngineError("died", "EngineError", f"executing the launches ended the process ({how})") from None
        except wire.WireError as e:
            raise EngineError("died", "EngineError", f"the launches made more than can be told ({e})") from None
        if "facts" in reply:
            told = reply["facts"]
            fields: dict[str, Any] = {
                k: tuple(v) if k in ("dots", "findings", "kernels", "operands") else v for k, v in told.items()
            }
            self.facts = Facts(**fields)
        if not reply.get("ok"):
            raise EngineError(reply["kind"], reply["name"], reply["message"], reply.get("line"))
        return reply, data


def blank(t: torch.Tensor) -> dict[str, Any]:
    """What a runner is told of a tensor: everything but the values."""
    return {
        "k": "blank", "dtype": wire.NAMES[t.dtype], "shape": list(t.shape), "stride": list(t.stride()),
        "shift": t.storage_offset() % 64,
    }  # fmt: skip


def _place(bases: Mapping[str, Any], name: str, t: torch.Tensor) -> list[Any]:
    """Where an argument lies, as a view: given by ``blank``, at the address that the runner found for it."""
    offset = t.storage_offset() % 64 * t.element_size()
    return [bases[name], str(t.dtype).removeprefix("torch."), offset, list(t.shape), list(t.stride())]


def _span(place: list[Any], t: torch.Tensor) -> list[Any]:
    """The same from the first element to the last, with what lies between."""
    return [*place[:3], [1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))], [1]]


def _gaps_alike(now: torch.Tensor, given: torch.Tensor) -> bool:
    """Whether nothing changed between the elements of a strided argument."""
    before = given.as_strided(now.shape, (1,), given.storage_offset())
    gap = torch.ones(now.shape, dtype=torch.bool)
    gap.as_strided(given.shape, given.stride()).fill_(False)
    return torch.equal(now[gap].view(torch.uint8), before[gap].view(torch.uint8))


def _inputs(tensors: Mapping[str, torch.Tensor], bases: Mapping[str, Any], blobs: list[bytes]) -> list[list[Any]]:
    rows = []
    for name, t in tensors.items():
        span = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0
        if span:
            size, shift = t.element_size(), t.storage_offset() % 64
            blobs.append(wire.raw_bytes(t, span * size))
            # What lies in ``out`` is no input: nobody may depend on it.
            rows.append([
                name if name != "out" else "", bases[name], (shift + span) * size, shift * size, len(blobs) - 1,
                _place(bases, name, t),
            ])  # fmt: skip
    return rows


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise wire.WireError("not a list")
    return value


def _numel(view: Sequence[Any]) -> int:
    return math.prod(view[3])


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if dtype not in wire.NAMES:
        raise wire.WireError(f"dtype {name}")
    return dtype  # type: ignore[no-any-return]


def _tensor(view: Sequence[Any], data: bytearray) -> torch.Tensor:
    dtype = _dtype(view[1])
    # The engine has checked the shape against its memory.
    return torch.frombuffer(data, dtype=dtype).view(view[3]) if data else torch.empty(view[3], dtype=dtype)


def _values(view: Sequence[Any], data: bytearray) -> list[Any]:
    return torch.frombuffer(data, dtype=_dtype(view[1])).tolist() if data else []
