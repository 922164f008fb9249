"""The grader's end of the transport of a timed case's tensors, see ``ipc_runner``.

Results are copied once into memory that the runner cannot reach; only the copy is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from kbx_env.device.driver import Driver, TensorMetadata, empty_bytes, process_driver
from kbx_env.device.ipc_runner import ALIGN, copy_window, packed_offsets
from kbx_env.device.layout import flat
from kbx_env.protocol import wire

LEAST_BYTES, MOST_BYTES, SHARE = 128 << 20, 256 << 20, 1 / 512
"""Size of the shared memory: this share of the device's memory, between these bounds. Larger messages are sent in several windows,
each of which costs the holder of the GPU about a millisecond. Every runner has one, also a spare one."""


def mailbox_bytes(memory: int) -> int:
    """Return the size of the shared memory on a device with so many bytes."""
    return min(MOST_BYTES, max(LEAST_BYTES, int(SHARE * memory) // ALIGN * ALIGN))


Ask = Callable[[dict[str, Any]], Any]
"""Sends a command to the runner and returns its reply."""


class IpcReceiver:
    """Device memory that is shared with one runner. It may be made in one thread and used in another.

    Args:
        driver: The device's driver; by default the CUDA driver.
        size: Bytes of the shared memory; by default ``mailbox_bytes`` of the device's memory.

    Attributes:
        handle: Identifies the memory in the runner.

    Raises:
        RuntimeError: there is no device memory left, or the driver cannot share it.
    """

    def __init__(self, driver: Driver | None = None, size: int | None = None) -> None:
        size = mailbox_bytes(torch.cuda.get_device_properties(0).total_memory) if size is None else size
        self._driver, self._size = driver or process_driver(), size
        self._driver.use_in_thread()
        self._address = self._driver.alloc_dedicated(size)
        try:
            self.handle = self._driver.share(self._address)
            # The memory may contain earlier data of the grader, which the runner must not read.
            self._driver.fill(self._address, 0, size)
            self._driver.sync()
        except BaseException:
            self._driver.free_dedicated(self._address)
            raise

    def close(self) -> None:
        """Free the memory; the runner keeps its mapping until it ends."""
        if self._address:
            self._driver.use_in_thread()
            self._driver.sync()
            self._driver.free_dedicated(self._address)
        self._address = 0

    def send(self, calls: list[dict[str, Any]], ask: Ask, first: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        """Send every tensor in the arguments of some calls.

        Args:
            calls: The arguments of each call.
            ask: Sends a command to the runner.
            first: Goes with the first of the commands.

        Returns:
            The arguments with descriptions of the tensors, as ``IpcSender.tensor`` takes them.
        """
        self._driver.use_in_thread()
        tensors = {id(v): v for call in calls for v in call.values() if isinstance(v, torch.Tensor)}
        spans = {k: flat(v) if v.numel() else v.new_empty(0) for k, v in tensors.items()}
        sources = [TensorMetadata(v) for v in spans.values()]
        offsets, total = packed_offsets([t.size for t in sources])
        pieces = [(o, t.pointer, t.size) for o, t in zip(offsets, sources, strict=True)]
        for offset in range(0, max(total, 1), self._size):
            size = min(self._size, total - offset)
            copy_window(self._driver, self._address, pieces, offset, size, back=False)
            ask({"do": "take", "offset": offset, "size": size, "total": total} | ({} if offset else dict(first or {})))
        where = dict(zip(tensors, offsets, strict=True))
        return [
            {n: _description(v, where[id(v)]) if isinstance(v, torch.Tensor) else v for n, v in call.items()}
            for call in calls
        ]  # fmt: skip

    @property
    def size(self) -> int:
        """Bytes of the shared memory."""
        return self._size

    def fetch(self, total: int, device: str, ask: Ask) -> torch.Tensor:
        """Fetch the last result from the runner, which has copied the first window with its reply.

        Args:
            total: Its size in bytes.
            device: "cuda" or "cpu".
            ask: Sends a command to the runner.

        Returns:
            uint8, (total,), in memory that the runner cannot reach.
        """
        self._driver.use_in_thread()
        # Results wait for the judge while others use the GPU: they must not keep the pool of the slots with this process.
        fetched = self._driver.empty_outside_pool(total) if device == "cuda" else empty_bytes(total, device)
        address = TensorMetadata(fetched).pointer
        for offset in range(0, total, self._size):
            size = min(self._size, total - offset)
            if offset:
                ask({"do": "give", "offset": offset, "size": size})
            self._driver.copy(address + offset, self._address, size)
            self._driver.sync()
        return fetched


def _description(value: torch.Tensor, at: int) -> dict[str, Any]:
    return {
        "k": "tensor", "dtype": wire.NAMES[value.dtype], "shape": list(value.shape), "stride": list(value.stride()),
        "shift": value.storage_offset() % 64, "mail": at,
    }  # fmt: skip


def claimed(fetched: torch.Tensor, d: Mapping[str, Any], _: object = None) -> torch.Tensor:
    """Rebuild a tensor of a fetched result. The third argument is ignored: ``wire.decode_tensor`` has one.

    Args:
        fetched: The result of ``IpcReceiver.fetch``.
        d: The claim, with the tensor's offset as ``mail``.

    Returns:
        A tensor with the claimed dtype, shape and strides; a view of the bytes unless something is pending.

    Raises:
        WireError: the claim does not fit the bytes.
    """
    dtype, shape, stride, _, numel = wire.layout(d)
    at, size = d.get("mail"), wire.span(shape, stride) * dtype.itemsize
    if type(at) is not int or at % ALIGN or not 0 <= at <= len(fetched) - size:
        raise wire.WireError("malformed tensor claim: not within what was sent")
    if not numel:
        return torch.empty_strided(shape, stride, dtype=dtype, device=fetched.device)
    value = fetched[at : at + size].view(dtype).as_strided(shape, stride)
    if d.get("conj") is True and value.is_complex():
        value = value.conj().resolve_conj()
    return -value if d.get("neg") is True else value
