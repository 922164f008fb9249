"""Client of the engine process of a grading: sends traces of calls, gets values, results and facts back."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from kbx_env.deadlines import LOAD
from kbx_env.errors import SandboxError
from kbx_env.grading.judge import Answer
from kbx_env.grading.runtime.zygote_client import OUTSIDE, Zygote
from kbx_env.protocol import wire

_NUMBERS = {"bool": torch.bool, "int": torch.int64, "float": torch.float64}
"""Dtype of a number that a call returned, by its type."""
RACES = ("write_conflict", "lane_conflict", "order_dependent")
"""Findings that leave open which value an element has: it depends on the order of programs, or of lanes."""
ORDERS = ("backwards", "forwards")
"""Orders in which a call with such a finding is executed again, one program after the other: at first many run together."""
REORDERED_SECONDS = 10.0
"""CPU time for that, for all calls of a submission."""
HOST_READS = 64
"""Values that the host code may read back in one call."""


class EngineError(Exception):
    """The engine ended the call.

    Attributes:
        kind: ``policy``, ``runtime``, ``compile``, ``forged``, ``memory``, ``unsupported``, ``timeout``, ``broken`` or ``died``.
        name: type of the error.
        line: source line of the submission; ``None`` if unknown.
    """

    def __init__(self, kind: str, name: str, message: str, line: int | None = None) -> None:
        """Make an error.

        Args:
            kind: one of the kinds above.
            name: type of the error.
            message: what happened.
            line: source line of the submission.
        """
        super().__init__(message)
        self.kind, self.name, self.line = kind, name, line


@dataclass
class Origin:
    """Where the values of one result came from.

    Attributes:
        elements: number of elements.
        stored: elements that a Triton store wrote.
        moved: elements that torch or the host wrote, not a kernel.
        unwritten: elements that nothing wrote.
        inputs: names of the inputs that may reach the result.
        dots: kinds of matrix products that may reach the result.
        assembled: whether torch's copies alone had made all these values before a kernel stored them.
    """

    elements: int
    stored: int
    moved: int
    unwritten: int
    inputs: frozenset[str]
    dots: frozenset[str]
    assembled: bool = False


@dataclass
class Facts:
    """What the launches of one call did, as the engine counted it. Sizes are bytes.

    Attributes:
        launches: number of launches.
        loaded: bytes loaded.
        stored: bytes stored.
        atomic: bytes updated atomically.
        sectors: bytes of the 32-byte sectors that were touched.
        reread: bytes loaded again by the same launch.
        dots: kinds of matrix products.
        flops: operations by unit.
        findings: fields of ``kbx_env.outcome.Finding`` for each.
        kernels: traffic by kernel.
        between: bytes through memory that is neither an argument nor a result.
        buffers: number of storages of such memory.
        operands: kinds of products and of roundings to int8, and whether every operand depends on an input.
    """

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
    buffers: int = 0
    operands: tuple[tuple[str, bool], ...] = ()

    @property
    def moved(self) -> int:
        """Bytes loaded, stored and updated atomically."""
        return self.loaded + self.stored + self.atomic


@dataclass
class Traced:
    """One executed call.

    Attributes:
        answer: results and changed arguments.
        broken: why the results cannot be judged: one is no tensor; else ``None``.
        origins: of the results, then of the arguments that the call wrote.
        facts: of its launches.
        effect: how the call changed memory that it must not change; else ``None``.
        reordered: results and changed arguments of the same call with its programs in other orders, where they race and
            that makes a difference.
    """

    answer: Answer
    broken: str | None
    origins: tuple[Origin, ...]
    facts: Facts
    effect: str | None
    reordered: tuple[Answer, ...] = ()


class Engine:
    """The process that executes the traces of one submission.

    Attributes:
        facts: of the last call, as far as it came.
        keep: whether the engine keeps calls: for ``again``, ``census``, and to execute them in another order.
        compiled: kernels that were compiled from the source, by key: the only ones that are executed. ``None`` where the runner's
            own are.
        cpu_seconds: CPU time of the engine so far, for the submission's budget: a loaded machine must not make it late.
        totals: value of ``_schemes.TOTALS`` that matched the last metamorphic check; it is tried first in the next one.
    """

    def __init__(self, zygote: Zygote, reads: float = HOST_READS) -> None:
        """Start the process.

        Args:
            zygote: forks it.
            reads: values that the host code may read back in one call.

        Raises:
            SandboxError: the process did not start.
        """
        self._process, self._max_reads = zygote.spawn(role="engine"), reads
        self.facts = Facts()
        self.keep = False
        self.totals = False
        self.cpu_seconds = 0.0
        self._reordered_seconds = REORDERED_SECONDS
        self._silent = False  # whether a reply is still to come, so that nothing else can be asked
        self._views: list[Any] = []
        self.compiled: Mapping[str, Mapping[str, Any]] | None = None

    def close(self) -> None:
        """End the process."""
        self._process.close()

    def call(
        self, sent: Mapping[str, Any], ask: Callable[..., dict[str, Any]], first: dict[str, Any],
        seconds: Callable[[], float], **flags: bool,
    ) -> Traced:  # fmt: skip
        """Execute one call. Answers the host code's reads meanwhile.

        Args:
            sent: the arguments by name; tensors hold the secret values.
            ask: sends a reply, and bytes that go with it, to the runner and returns its next message.
            first: the first message of the runner.
            seconds: returns the seconds that are left of the submission's limit.
            **flags: ``moves``, ``picks``, ``torch_ops``, ``values``, ``ablate`` and ``detail``, as for ``begin`` of the engine.

        Returns:
            Results, changed arguments, and facts.

        Raises:
            EngineError: the trace or a launch failed, or the host code read back too many values.
            wire.WireError: a message of the runner is malformed.
            SandboxError: the engine was killed from outside.
        """
        message, begun, reads = first, False, 0.0
        tensors = {k: v for k, v in sent.items() if isinstance(v, torch.Tensor)}
        self.facts = Facts()
        while True:
            header: dict[str, Any] = {
                "steps": message.get("steps"), "kernels": self._kernels(message.get("kernels")),
                "free": _list(message.get("free")),
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
            reply, data = self._ask(header, blobs, seconds())
            if flags.get("values") and message.get("raw") is True:
                message = ask({}, [bytes(data[0])])
                continue
            values = _values(message["want"], data[0])
            # By the numbers that were written: an int64 can carry eight booleans, a complex number two numbers.
            reads += len(data[0]) / reply["read"][0]["unit"]
            if reads > self._max_reads:
                raise EngineError("policy", "host_traffic", f"more than {self._max_reads} values read back in one call")
            message = ask({"values": values})
        claims = _list(message.get("outputs"))[: wire.MAX_BLOBS // 2]
        views = self._views = [c["view"] for c in claims if c["k"] == "view"]
        # The grader computes the views of the arguments: the runner could name an unchanged copy instead.
        argument_views = {k: _argument_view(bases, k, t) for k, t in tensors.items() if t.numel()}
        span_views = {k: _span_view(v, tensors[k]) for k, v in argument_views.items() if k != "out"}
        header |= {"read": [*views, *span_views.values()], "results": len(views), "facts": True}
        reply, data = self._ask(header, blobs, seconds())
        outputs = [_tensor(v, d) for v, d in zip(views, data, strict=False)]
        spans = {k: _tensor(v, d) for (k, v), d in zip(span_views.items(), data[len(views) :], strict=True)}
        changed = {k: t.clone() for k, t in tensors.items() if not t.numel() and k != "out"}
        changed |= {k: _laid_out(s, tensors[k]) for k, s in spans.items()}
        effect = next((f"what lies between the elements of {k!r} was changed" for k, s in spans.items()
                       if not _gaps_unchanged(s, tensors[k])), None)  # fmt: skip
        if any(r["again"] for r in reply["read"][: len(views)]):
            effect = effect or "the result lies in the memory of an earlier call's result, which it overwrites"
        alias = tuple(_argument_of(c, argument_views, tensors) for c in claims if c["k"] == "view")
        shares = tuple(
            next((k for k, p in argument_views.items() if p[0] == v[0] and _numel(p) and _numel(v)), None) for v in views
        )
        numbers = {i: number(c) for i, c in enumerate(claims) if c["k"] == "number" and flags.get("values")}
        for i, value in numbers.items():  # in their places among the results
            outputs.insert(i, value)
        other_types = [str(c.get("type")) for i, c in enumerate(claims) if c["k"] != "view" and i not in numbers]
        answer = Answer(
            outputs=tuple(outputs), is_tuple=bool(message["is_tuple"]), after=changed, aliases=alias, shares=shares,
            strides=tuple(tuple(v[4]) for v in views),
            grads=tuple(c.get("requires_grad") is True for c in claims if c["k"] == "view"),
        )  # fmt: skip
        origins = tuple(_origin(r) for r in reply["read"][: len(views)])
        written = tuple(
            _origin(r)
            for k, r in zip(span_views, reply["read"][len(views) :], strict=True) if r["stored"] or r["moved"]
        )  # fmt: skip
        broken = f"returned a {other_types[0]} where a tensor was expected" if other_types else None
        found = self.facts
        reordered = self._reordered(answer, views, span_views, data, tensors, seconds)
        return Traced(answer, broken, origins + written, found, effect, reordered)

    def _reordered(
        self, answer: Answer, views: list[Any], spans: Mapping[str, Any], data: Sequence[bytearray],
        tensors: Mapping[str, torch.Tensor], seconds: Callable[[], float],
    ) -> tuple[Answer, ...]:  # fmt: skip
        """Execute the last call in other orders if its programs race.

        Args:
            answer: the call's own results.
            views: of the results.
            spans: views of the arguments, with the gaps between their elements.
            data: bytes of the views and of the spans after the call.
            tensors: the arguments.
            seconds: returns the seconds that are left of the submission's limit.

        Returns:
            The results in those orders in which they differ.

        Raises:
            EngineError: a launch fails in another order.
        """
        found: list[Answer] = []
        for order in ORDERS if self.keep and any(f["kind"] in RACES for f in self.facts.findings) else ():
            again = self._in_order(order, [*views, *spans.values()], seconds())
            if again is not None and any(bytes(a) != bytes(b) for a, b in zip(again, data, strict=True)):
                outputs = tuple(_tensor(v, d) for v, d in zip(views, again, strict=False))
                after = {k: _tensor(v, d) for (k, v), d in zip(spans.items(), again[len(views) :], strict=True)}
                changed = {k: _laid_out(s, tensors[k]) for k, s in after.items()}
                found.append(replace(answer, outputs=outputs, after={**answer.after, **changed}))
        return tuple(found)

    def _in_order(self, order: str, views: Sequence[Any], left: float) -> list[bytearray] | None:
        """Execute the last call once more, the programs of each launch one after the other.

        Args:
            order: one of ``ORDERS``.
            views: to read afterwards.
            left: seconds that are left of the submission's limit.

        Returns:
            The bytes of the views; ``None`` if it is not known: one program at a time takes long, and a device may not
            be able to start waiting programs in that order.

        Raises:
            EngineError: a launch fails in that order.
        """
        before, limit = self.cpu_seconds, min(left, self._reordered_seconds)
        if limit <= 0:
            return None
        try:
            return self._ask({"again": {"order": order, "seconds": limit}, "read": list(views)}, [], limit)[1]
        except EngineError as e:
            if not self._silent and (e.name == "Deadlock" or e.kind not in ("memory", "runtime", "died")):
                return None
            raise EngineError(e.kind, e.name, f"in another order of the programs: {e}", e.line) from None
        finally:
            self._reordered_seconds -= self.cpu_seconds - before

    def _kernels(self, claimed: Any) -> Any:
        """Return the kernels to execute for those that the runner names; the engine refuses malformed ones."""
        if self.compiled is None or not isinstance(claimed, dict):
            return claimed
        unknown = next((k for k in claimed if k not in self.compiled), None)
        if unknown is not None:
            raise EngineError("forged", "TraceError", "a kernel was launched that was not compiled from the source")
        return {k: self.compiled[k] for k in claimed}

    def again(self, place: str, table: Sequence[int], seconds: float) -> tuple[tuple[torch.Tensor, ...], int]:
        """Execute the last call once more with other integers, as ``backends.engine.replay`` does it.

        Args:
            place: operations whose integers are replaced, as ``Disturbance`` names them.
            table: 256 bytes, by the byte that they replace.
            seconds: limit of CPU time.

        Returns:
            The results, and how much of the work met other integers.

        Raises:
            EngineError: a launch failed that had not failed before.
        """
        change = {"place": place, "table": list(table), "seconds": seconds}
        reply, data = self._ask({"again": change, "read": self._views}, [], seconds)
        return tuple(_tensor(v, d) for v, d in zip(self._views, data, strict=True)), int(reply["touched"])

    def census(self, seconds: float) -> list[list[int]]:
        """Execute the last call once more unchanged, and count bytes.

        Args:
            seconds: limit of CPU time.

        Returns:
            How often each byte occurred, 256 numbers for each operand of an int8 product, each result of a rounding to int8,
            and each load of packed bytes.

        Raises:
            EngineError: a launch failed that had not failed before.
        """
        change = {"place": "products", "table": list(range(256)), "seconds": seconds, "count": True}
        reply, _ = self._ask({"again": change, "read": []}, [], seconds)
        return [[int(n) for n in row] for row in reply["seen"]]

    def estimate(
        self, device: str, tiles: Mapping[str, torch.Tensor], sizes: Mapping[str, dict[str, Any]], message: dict[str, Any],
        ask: Callable[[dict[str, Any]], dict[str, Any]], seconds: float,
    ) -> tuple[dict[str, Any], dict[str, Any]]:  # fmt: skip
        """Estimate the device time of a call that is recorded but not executed.

        Args:
            device: a name that ``kbx_env.backends.cost`` knows.
            tiles: values by argument, of any size; they are repeated to fill it.
            sizes: the arguments as ``blank`` describes them.
            message: the first message of the runner.
            ask: sends a reply to the runner and returns its next message.
            seconds: limit of CPU time.

        Returns:
            The estimate, and the last message of the runner.

        Raises:
            EngineError: the call reads a result back, or cannot be counted.
            wire.WireError: a message of the runner is malformed.
        """
        rows, blobs = [], []
        for name, d in sizes.items():
            if all(d["shape"]):
                itemsize = wire.DTYPES[d["dtype"]].itemsize
                span = 1 + sum((n - 1) * s for n, s in zip(d["shape"], d["stride"], strict=True))
                tile = tiles.get(name)
                usable = tile is not None and tile.numel() and wire.NAMES[tile.dtype] == d["dtype"]
                if usable and tile is not None:
                    blobs.append(wire.raw_bytes(tile.contiguous()))
                base, shift = dict(message["inputs"])[name], d["shift"] * itemsize
                rows.append([base, shift + span * itemsize, shift, len(blobs) - 1 if usable else None])
        begin: dict[str, Any] = {"inputs": rows, "seconds": seconds}
        while True:
            header = {
                "estimate": device,
                "kernels": self._kernels(message.get("kernels")),
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
            deadline = time.monotonic() + LOAD * max(0.1, left) + 1.0
            reply, data = self._process.ask(header, blobs, deadline=deadline)
        except wire.Late:
            self.cpu_seconds += left
            self._silent = True
            raise EngineError("timeout", "TimeoutError", "the launches took too long") from None
        except wire.Gone:
            fate = self._process.fate()
            if fate in OUTSIDE:
                raise SandboxError(f"the engine was killed from outside (signal {-fate})") from None
            # Memory and stack of the engine are limited: any other end was caused by the launches.
            how = "it hung up" if fate is None else f"signal {-fate}" if fate < 0 else f"exit status {fate}"
            raise EngineError("died", "EngineError", f"executing the launches ended the process ({how})") from None
        except wire.WireError as e:
            raise EngineError("died", "EngineError", f"the launches made more than can be told ({e})") from None
        self.cpu_seconds += reply["cpu_seconds"]
        if "facts" in reply:
            fields: dict[str, Any] = {
                k: tuple(v) if k in ("dots", "findings", "kernels", "operands") else v for k, v in reply["facts"].items()
            }
            self.facts = Facts(**fields)
        if not reply.get("ok"):
            raise EngineError(reply["kind"], reply["name"], reply["message"], reply.get("line"))
        return reply, data


def _origin(row: Mapping[str, Any]) -> Origin:
    return Origin(
        row["elements"], row["stored"], row["moved"], row["unwritten"], frozenset(row["inputs"]), frozenset(row["dots"]),
        row["assembled"],
    )  # fmt: skip


def blank(t: torch.Tensor) -> dict[str, Any]:
    """Describe a tensor for the runner, without its values."""
    return {
        "k": "blank", "dtype": wire.NAMES[t.dtype], "shape": list(t.shape), "stride": list(t.stride()),
        "shift": t.storage_offset() % 64,
    }  # fmt: skip


def _argument_view(bases: Mapping[str, Any], name: str, t: torch.Tensor) -> list[Any]:
    """Return the view of an argument: laid out as ``blank`` says, at the address that the runner chose for it."""
    offset = t.storage_offset() % 64 * t.element_size()
    return [bases[name], str(t.dtype).removeprefix("torch."), offset, list(t.shape), list(t.stride())]


def _argument_of(
    claim: Mapping[str, Any], argument_views: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> str | None:  # fmt: skip
    """Return the name of the argument that a result is.

    Args:
        claim: the result, as the runner describes it. An empty one has no memory by which the grader could tell it:
            there the runner is believed, and nothing else depends on it.
        argument_views: views of the arguments that are not empty, as the grader laid them out.
        tensors: the arguments.

    Returns:
        The name; ``None`` for a tensor of its own.
    """
    view = claim["view"]
    if _numel(view):
        return next((k for k, p in argument_views.items() if p == view), None)
    same = str(claim.get("same"))
    return same if same in tensors and list(tensors[same].shape) == view[3] else None


def _span_view(view: list[Any], t: torch.Tensor) -> list[Any]:
    """Return a one-dimensional view from the first element to the last, with the gaps between them."""
    return [*view[:3], [1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))], [1]]


def _gaps_unchanged(after: torch.Tensor, argument: torch.Tensor) -> bool:
    """Return whether nothing changed between the elements of a strided argument, of which ``after`` is the span."""
    if argument.is_contiguous():
        return True
    before = argument.as_strided(after.shape, (1,), argument.storage_offset())
    if torch.equal(after.view(torch.uint8), before.view(torch.uint8)):
        return True
    gap = torch.ones(after.shape, dtype=torch.bool)
    gap.as_strided(argument.shape, argument.stride()).fill_(False)
    return torch.equal(after[gap].view(torch.uint8), before[gap].view(torch.uint8))


def _inputs(tensors: Mapping[str, torch.Tensor], bases: Mapping[str, Any], blobs: list[bytes]) -> list[list[Any]]:
    rows = []
    for name, t in tensors.items():
        span = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0
        if span:
            size, shift = t.element_size(), t.storage_offset() % 64
            blobs.append(wire.raw_bytes(t, span * size))
            # The values in ``out`` are no input, so it has no name: no result may depend on them.
            rows.append([
                name if name != "out" else "", bases[name], (shift + span) * size, shift * size, len(blobs) - 1,
                _argument_view(bases, name, t),
            ])  # fmt: skip
    return rows


def number(claim: Mapping[str, Any]) -> torch.Tensor:
    """Return a number that a call returned as a tensor without axes.

    Args:
        claim: ``v``, the number as Python writes it, and ``type``.

    Returns:
        fp64, int64 or bool.

    Raises:
        wire.WireError: no such number.
    """
    try:
        dtype, text = _NUMBERS[str(claim.get("type"))], str(claim["v"])[:400]
        value = text == "True" if dtype is torch.bool else float(text) if dtype.is_floating_point else int(text)
        return torch.tensor(value, dtype=dtype)
    except (KeyError, ValueError, RuntimeError, OverflowError) as e:
        raise wire.WireError(f"malformed number ({type(e).__name__})") from None


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


def _laid_out(span: torch.Tensor, argument: torch.Tensor) -> torch.Tensor:
    """Return an argument's elements after a call, of which ``span`` holds everything from the first to the last."""
    return span.as_strided(argument.shape, argument.stride())


def _tensor(view: Sequence[Any], data: bytearray) -> torch.Tensor:
    dtype = _dtype(view[1])
    # The engine has checked the shape against its memory.
    return torch.frombuffer(data, dtype=dtype).view(view[3]) if data else torch.empty(view[3], dtype=dtype)


def _values(view: Sequence[Any], data: bytearray) -> list[Any]:
    return torch.frombuffer(data, dtype=_dtype(view[1])).tolist() if data else []
