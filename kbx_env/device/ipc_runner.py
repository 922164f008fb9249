"""How tensors of a timed case travel between grader and runner without leaving the device.

The grader lends a piece of device memory (CUDA IPC): it puts inputs there, the runner takes copies; the runner puts what a
timed call returned there, the grader takes copies. What lies in it is a claim like every other message. Nothing else of the
grader's memory is reachable from it. Where the driver offers no IPC the bytes go through the socket.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kbx_env.device.driver import Driver, Seen, laid_out
from kbx_env.protocol import wire

ALIGN = 256
"""Bytes at whose multiples tensors begin."""


def places(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where tensors of these bytes begin when they are laid end to end, and the total."""
    at, total = [], 0
    for size in sizes:
        at.append(total)
        total += -(-size // ALIGN) * ALIGN
    return at, total


def move(tools: Driver, to: int, pieces: Sequence[tuple[int, int, int]], offset: int, size: int, *, back: bool) -> None:
    """Copy what of the laid out ``pieces`` (offset, address, bytes) lies within a window into the window, or ``back``."""
    for start, address, length in pieces:
        first, last = max(start, offset), min(start + length, offset + size)
        if first < last:
            there, here = to + first - offset, address + first - start
            tools.copy(*((here, there) if back else (there, here)), last - first)
    tools.sync()


@dataclass
class Result:
    """What a timed call returned: kinds of things that are no tensors, or metadata and the address of a copy."""

    outputs: list[str | tuple[Seen, int]]
    after: dict[str, tuple[Seen, int]]
    args: Mapping[str, Seen]
    is_tuple: bool


class IpcSender:
    """The runner's end.

    Args:
        tools: the device's.
        handle: names the grader's memory; ``None`` where there is none to share.
    """

    def __init__(self, tools: Driver, handle: bytes | None) -> None:
        self._tools = tools
        self._box = None if handle is None else tools.open(handle)
        self._inbox = 0
        self._outbox: list[tuple[int, int, int]] = []

    @property
    def open(self) -> bool:
        """Whether there is memory to share."""
        return self._box is not None

    def take(self, offset: int, size: int, total: int) -> dict[str, Any]:
        """Copy a window of what the grader sends."""
        assert self._box is not None
        if offset == 0:
            self.empty()
            self._inbox = self._tools.alloc(total)
        move(self._tools, self._box, [(0, self._inbox, total)], offset, size, back=True)
        return {}

    def tensor(self, d: Mapping[str, Any], device: str) -> torch.Tensor:
        """A tensor that was sent, in memory of its own."""
        dtype, shape, stride, shift, _ = wire.layout(d)
        new = laid_out(dtype, shape, stride, shift, wire.span(shape, stride), device)
        seen = Seen(new)
        self._tools.copy(seen.pointer, self._inbox + int(d["mail"]), seen.size)
        return new

    def empty(self) -> None:
        """Forget what was sent."""
        if self._inbox:
            self._tools.sync()
            self._tools.free(self._inbox)
        self._inbox = 0

    def claims(self, found: Result, device: str, mailed: bool, inputs: bool = True) -> tuple[dict[str, Any], list[bytes]]:
        """A result in the words of the wire.

        Args:
            found: the result.
            device: where it lies.
            mailed: its bytes wait until they are asked for by ``give``.
            inputs: with what was given and not written, as it is now.
        """
        names = [*found.after, *(n for n in found.args if inputs and n not in found.after)]
        rows = [v for v in found.outputs if not isinstance(v, str)]
        rows += [found.after.get(n) or (found.args[n], found.args[n].pointer) for n in names]
        plain = [(s, a) for s, a in rows if _plain(s)]
        at, total = places([s.size for s, _ in plain])
        data = [] if mailed else [s.resolved(self._tools.read(a, s.size)) for s, a in plain]
        self._outbox = [(o, a, s.size) for o, (s, a) in zip(at, plain, strict=True)]
        where = {id(s): {"mail": o, "conj": s.conj, "neg": s.neg} if mailed else {"blob": k}
                 for k, (o, (s, _)) in enumerate(zip(at, plain, strict=True))}  # fmt: skip

        def claim(seen: Seen, args: Mapping[str, Seen]) -> dict[str, Any]:
            if not _plain(seen):
                return {"k": "other", "type": f"{seen.dtype} tensor that is not a plain one"}
            same = {n: a for n, a in args.items() if a.span and seen.span and a.home == seen.home}
            alias = [n for n, a in same.items()
                     if (a.pointer, a.shape, a.strides) == (seen.pointer, seen.shape, seen.strides)]  # fmt: skip
            return {
                "k": "tensor", "dtype": wire.NAMES[seen.dtype], "shape": list(seen.shape), "stride": list(seen.strides),
                "shift": 0, "alias": alias[0] if alias else None, "shares": next(iter(same), None), "device": device,
                "requires_grad": seen.grad,
            } | where[id(seen)]  # fmt: skip

        outputs = [{"k": "other", "type": v} if isinstance(v, str) else claim(v[0], found.args) for v in found.outputs]
        after = {n: claim(s, {}) for n, (s, _) in zip(names, rows[len(rows) - len(names) :], strict=True)}
        reply = {"outputs": outputs, "is_tuple": found.is_tuple, "after": after}
        return reply | ({"total": total} if mailed else {}), data

    def give(self, offset: int, size: int) -> dict[str, Any]:
        """Put a window of the last result where the grader finds it."""
        assert self._box is not None
        move(self._tools, self._box, self._outbox, offset, size, back=False)
        return {}


def _plain(seen: Seen) -> bool:
    return seen.plain and seen.dtype in wire.NAMES and min((*seen.strides, 0)) >= 0
