"""The runner's end of the transport of a timed case's tensors, which do not leave the device.

The grader shares a piece of device memory with the runner (CUDA IPC). The grader writes inputs there and the runner
copies them; the runner writes results there and the grader copies them. The contents are untrusted claims like every
other message. No other memory of the grader is reachable through it. Where the driver has no IPC, the bytes go through
the socket.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kbx_env.device.driver import Driver, TensorMetadata, empty_strided
from kbx_env.protocol import wire

ALIGN = 256
"""Alignment of tensors in the transported memory, in bytes."""


def packed_offsets(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Lay tensors end to end.

    Args:
        sizes: Bytes of each tensor.

    Returns:
        Offset of each tensor in bytes, a multiple of ``ALIGN``, and the total size.
    """
    at, total = [], 0
    for size in sizes:
        at.append(total)
        total += -(-size // ALIGN) * ALIGN
    return at, total


def copy_window(
    driver: Driver, to: int, pieces: Sequence[tuple[int, int, int]], offset: int, size: int, *, back: bool
) -> None:  # fmt: skip
    """Copy one window of a large message between tensors and the shared memory.

    Args:
        driver: The device's driver.
        to: Address of the shared memory, which holds the window.
        pieces: Offset in the message, address and bytes of each tensor.
        offset: Where the window begins in the message.
        size: Bytes of the window.
        back: Copy from the shared memory to the tensors, instead of the reverse.
    """
    for start, address, length in pieces:
        first, last = max(start, offset), min(start + length, offset + size)
        if first < last:
            shared, local = to + first - offset, address + first - start
            driver.copy(*((local, shared) if back else (shared, local)), last - first)
    driver.sync()


@dataclass
class Result:
    """The result of a timed call.

    Attributes:
        outputs: Metadata of each tensor and address of its copy; for anything else the name of its type.
        after: The same of arguments that the call changes in place, by name.
        args: Metadata of all tensor arguments by name.
        is_tuple: Whether the call returned a tuple or a list.
    """

    outputs: list[str | tuple[TensorMetadata, int]]
    after: dict[str, tuple[TensorMetadata, int]]
    args: Mapping[str, TensorMetadata]
    is_tuple: bool


class IpcSender:
    """The runner's end.

    Args:
        driver: The device's driver.
        handle: Identifies the grader's memory; ``None`` where none is shared.
    """

    def __init__(self, driver: Driver, handle: bytes | None) -> None:
        self._driver = driver
        self._shared = None if handle is None else driver.open(handle)
        self._inbox = 0
        self._outbox: list[tuple[int, int, int]] = []

    @property
    def open(self) -> bool:
        """Whether the grader shares memory."""
        return self._shared is not None

    def take(self, offset: int, size: int, total: int) -> dict[str, Any]:
        """Copy one window of the grader's message.

        Args:
            offset: Where the window begins in the message, in bytes; 0 begins a new message.
            size: Bytes of the window.
            total: Bytes of the message.

        Returns:
            Nothing.
        """
        assert self._shared is not None
        if offset == 0:
            self.empty()
            self._inbox = self._driver.alloc(total)
        copy_window(self._driver, self._shared, [(0, self._inbox, total)], offset, size, back=True)
        return {}

    def tensor(self, d: Mapping[str, Any], device: str) -> torch.Tensor:
        """Return a tensor of the last message in memory of its own.

        Args:
            d: Its description: layout, and the offset in the message as ``mail``.
            device: "cuda" or "cpu".

        Returns:
            The tensor; its values are copied in stream order.
        """
        dtype, shape, stride, shift, _ = wire.layout(d)
        new = empty_strided(dtype, shape, stride, shift, wire.span(shape, stride), device)
        tensor = TensorMetadata(new)
        self._driver.copy(tensor.pointer, self._inbox + int(d["mail"]), tensor.size)
        return new

    def empty(self) -> None:
        """Free the last message."""
        if self._inbox:
            self._driver.sync()
            self._driver.free(self._inbox)
        self._inbox = 0

    def claims(
        self, results: Sequence[tuple[Result, bool]], device: str, mailed: bool
    ) -> tuple[list[dict[str, Any]], int, list[bytes]]:
        """Encode results as claims.

        Args:
            results: The results, each with whether to include the tensor arguments that are not written, as they are now.
            device: The device of their tensors.
            mailed: The grader gets the bytes by ``give``; otherwise they are returned.

        Returns:
            The claims of each result (``outputs``, ``is_tuple``, ``after``), the bytes of all results together as ``give``
            copies them, and the bytes themselves, none with ``mailed``.
        """
        found = [_Encoding(result, inputs, device) for result, inputs in results]
        tensors = [(t, address) for one in found for t, address in one.tensors]
        offsets, total = packed_offsets([t.size for t, _ in tensors])
        data = [] if mailed else [t.resolved(self._driver.read(address, t.size)) for t, address in tensors]
        self._outbox = [(o, address, t.size) for o, (t, address) in zip(offsets, tensors, strict=True)]
        places = iter([{"mail": o, "conj": t.conj, "neg": t.neg} if mailed else {"blob": k}
                       for k, (o, (t, _)) in enumerate(zip(offsets, tensors, strict=True))])  # fmt: skip
        return [one.claims([next(places) for _ in one.tensors]) for one in found], total, data

    def give(self, offset: int, size: int) -> dict[str, Any]:
        """Copy one window of the last result into the shared memory.

        Args:
            offset: Where the window begins in the result, in bytes.
            size: Bytes of the window.

        Returns:
            Nothing.
        """
        assert self._shared is not None
        copy_window(self._driver, self._shared, self._outbox, offset, size, back=False)
        return {}


class _Encoding:
    """What is sent of a result, and the claims about it.

    Args:
        found: The result.
        inputs: Include the tensor arguments that are not written.
        device: The device of its tensors.

    Attributes:
        tensors: Metadata and address of each tensor whose bytes are sent.
    """

    def __init__(self, found: Result, inputs: bool, device: str) -> None:
        self._found, self._device = found, device
        self._names = [*found.after, *(n for n in found.args if inputs and n not in found.after)]
        self._rows = [v for v in found.outputs if not isinstance(v, str)]
        self._rows += [found.after.get(n) or (found.args[n], found.args[n].pointer) for n in self._names]
        self.tensors = [(t, address) for t, address in self._rows if _is_encodable(t)]

    def claims(self, places: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the claims.

        Args:
            places: Where the bytes of each of ``tensors`` are.

        Returns:
            ``outputs``, ``is_tuple`` and ``after``.
        """
        found, where = self._found, {id(t): place for (t, _), place in zip(self.tensors, places, strict=True)}
        outputs = [{"k": "other", "type": v} if isinstance(v, str) else self._claim(v[0], found.args, where)
                   for v in found.outputs]  # fmt: skip
        later = self._rows[len(self._rows) - len(self._names) :]
        after = {n: self._claim(t, {}, where) for n, (t, _) in zip(self._names, later, strict=True)}
        return {"outputs": outputs, "is_tuple": found.is_tuple, "after": after}

    def _claim(
        self, t: TensorMetadata, args: Mapping[str, TensorMetadata], where: Mapping[int, dict[str, Any]]
    ) -> dict[str, Any]:
        if not _is_encodable(t):
            return {"k": "other", "type": f"{t.dtype} tensor that is not a plain one"}
        same_storage = {n: a for n, a in args.items() if a.span and t.span and a.storage == t.storage}
        aliases = [n for n, a in same_storage.items()
                   if (a.pointer, a.shape, a.strides) == (t.pointer, t.shape, t.strides)]  # fmt: skip
        return {
            "k": "tensor", "dtype": wire.NAMES[t.dtype], "shape": list(t.shape), "stride": list(t.strides),
            "shift": 0, "alias": aliases[0] if aliases else None, "shares": next(iter(same_storage), None),
            "device": self._device, "requires_grad": t.requires_grad,
        } | where[id(t)]  # fmt: skip


def _is_encodable(t: TensorMetadata) -> bool:
    return t.is_strided and t.dtype in wire.NAMES and min((*t.strides, 0)) >= 0
