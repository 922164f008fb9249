"""The grader's end of ``sandbox.mail``: device memory lent to one runner, through which the tensors of timed cases travel.

What is fetched is copied once into memory of the grader's own; only the copy is read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from kbx_env.device.driver import Driver, Seen
from kbx_env.device.ipc_runner import ALIGN, move, places
from kbx_env.device.layout import flat
from kbx_env.protocol import wire

BYTES = 256 << 20
"""Of a lent piece; larger messages go in several."""

Ask = Callable[[dict[str, Any]], Any]


@functools.cache
def _driver() -> Driver:
    torch.cuda.init()
    return Driver()


class IpcReceiver:
    """One piece of memory, lent to one runner.

    Raises:
        RuntimeError: there is no room, or the driver lends no memory.
    """

    def __init__(self, tools: Driver | None = None, size: int = BYTES) -> None:
        self._tools, self._size = tools or _driver(), size
        self._address = self._tools.alloc(size)
        try:
            self.handle = self._tools.share(self._address)
            # The grader's memory of before must not be read in it.
            self._tools.fill(self._address, 0, size)
            self._tools.sync()
        except BaseException:
            self._tools.free(self._address)
            raise

    def close(self) -> None:
        """Give the memory back; for the runner it stays until its end."""
        if self._address:
            self._tools.sync()
            self._tools.free(self._address)
        self._address = 0

    def send(self, calls: list[dict[str, Any]], ask: Ask) -> list[dict[str, Any]]:
        """Send every tensor of some calls' arguments; returns the arguments with tensors in the words of the wire."""
        tensors = {id(v): v for call in calls for v in call.values() if isinstance(v, torch.Tensor)}
        spans = {k: flat(v) if v.numel() else v.new_empty(0) for k, v in tensors.items()}
        seen = {k: Seen(v) for k, v in spans.items()}
        at, total = places([s.size for s in seen.values()])
        pieces = [(o, s.pointer, s.size) for o, s in zip(at, seen.values(), strict=True)]
        for offset in range(0, max(total, 1), self._size):
            size = min(self._size, total - offset)
            move(self._tools, self._address, pieces, offset, size, back=False)
            ask({"do": "take", "offset": offset, "size": size, "total": total})
        where = dict(zip(tensors, at, strict=True))
        return [
            {n: _described(v, where[id(v)]) if isinstance(v, torch.Tensor) else v for n, v in call.items()}
            for call in calls
        ]  # fmt: skip

    def fetch(self, total: int, device: str, ask: Ask) -> torch.Tensor:
        """The bytes that the runner lays out for us, in memory of our own."""
        whole = torch.empty(total, dtype=torch.uint8, device=device)
        address = Seen(whole).pointer
        for offset in range(0, total, self._size):
            size = min(self._size, total - offset)
            ask({"do": "give", "offset": offset, "size": size})
            self._tools.copy(address + offset, self._address, size)
            self._tools.sync()
        return whole


def _described(value: torch.Tensor, at: int) -> dict[str, Any]:
    return {
        "k": "tensor", "dtype": wire.NAMES[value.dtype], "shape": list(value.shape), "stride": list(value.stride()),
        "shift": value.storage_offset() % 64, "mail": at,
    }  # fmt: skip


def claimed(whole: torch.Tensor, d: Mapping[str, Any], _: object = None) -> torch.Tensor:
    """A tensor of fetched bytes.

    Raises:
        WireError: the claim does not fit the bytes.
    """
    dtype, shape, stride, _, numel = wire.layout(d)
    at, size = d.get("mail"), wire.span(shape, stride) * dtype.itemsize
    if type(at) is not int or at % ALIGN or not 0 <= at <= len(whole) - size:
        raise wire.WireError("malformed tensor claim: not within what was sent")
    if not numel:
        return torch.empty_strided(shape, stride, dtype=dtype, device=whole.device)
    value = whole[at : at + size].view(dtype).as_strided(shape, stride)
    if d.get("conj") is True and value.is_complex():
        value = value.conj().resolve_conj()
    return -value if d.get("neg") is True else value
