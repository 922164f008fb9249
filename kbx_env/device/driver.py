"""What the stopwatch does on the device, out of the submission's reach.

Memory is filled, copied and read and events are read through CUDA's driver itself: no name of torch, no mode and no kernel of
the dispatcher that a submission can replace lies on the way, and no version counter moves. What remains of torch is bound when
the tools are made, before the submission is loaded. Calls that record or enqueue keep the interpreter's lock, so that no
thread gets in between the end of a call and the copy of its result.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

_BASE: Any = torch._C.TensorBase  # its methods cannot be replaced, unlike those of torch.Tensor
_pointer, _strided, _strides = _BASE.data_ptr, _BASE.as_strided, _BASE.stride
_offset, _storage = _BASE.storage_offset, _BASE.untyped_storage
_shape, _dtype, _layout = _BASE.shape.__get__, _BASE.dtype.__get__, _BASE.layout.__get__
_cuda, _grad = _BASE.is_cuda.__get__, _BASE.requires_grad.__get__
_conj, _neg = _BASE.is_conj, _BASE.is_neg
_STORAGE: Any = torch._C.StorageBase
_address = _STORAGE.data_ptr
_empty = torch._C._VariableFunctions.empty
_Plain, _Quiet, _STRIDED = torch.Tensor, torch._C.DisableTorchFunction, torch.strided


class Seen:
    """A tensor's metadata, read past everything that a submission can replace."""

    __slots__ = (
        "conj",
        "dtype",
        "grad",
        "home",
        "item",
        "neg",
        "offset",
        "plain",
        "pointer",
        "shape",
        "span",
        "strides",
    )

    def __init__(self, value: Any) -> None:
        with _Quiet():
            self.shape, self.strides = tuple(_shape(value)), tuple(_strides(value))
            self.dtype, self.offset, self.pointer = _dtype(value), _offset(value), _pointer(value)
            self.home, self.grad = _address(_storage(value)), bool(_grad(value))
            self.conj, self.neg = bool(_conj(value)), bool(_neg(value))
            self.plain = _layout(value) is _STRIDED
        self.item = self.dtype.itemsize
        self.span = (
            0 if 0 in self.shape else 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        )

    @property
    def size(self) -> int:
        """Bytes from the first element to the last."""
        return self.span * self.item

    def resolved(self, data: bytes) -> bytes:
        """Its bytes, with a pending conjugation or sign carried out."""
        if not (self.conj or self.neg) or not data:
            return data
        parts: Any = np.frombuffer(
            data, np.float32 if self.item == (8 if self.dtype.is_complex else 4) else np.float64
        ).copy()
        if self.conj:
            parts[1::2] *= -1
        return (-parts if self.neg else parts).tobytes()

    @property
    def dense(self) -> bool:
        """Whether every element of the span belongs to the tensor."""
        total = 1
        for n in self.shape:
            total *= n
        return total == self.span


class Kept:
    """A result as it was at the end of its call: metadata, and bytes where nobody else finds them."""

    def __init__(self, values: list[Any], is_tuple: bool) -> None:
        self.values, self.is_tuple = values, is_tuple
        self.at: list[tuple[int, int]] = []
        """Address and capacity of the copy of each value."""


def is_plain(value: Any, device: str) -> bool:
    """A tensor on the device, and of no subclass: those may compute when they are looked at."""
    if type(value) is not _Plain:
        return False
    with _Quiet():
        return _layout(value) is _STRIDED and bool(_cuda(value)) == (device == "cuda")


def again(value: torch.Tensor) -> Any:
    """Another hold on a tensor's memory."""
    with _Quiet():
        return _storage(value)


def blank(size: int, device: str) -> torch.Tensor:
    """Bytes of torch's, with anything in them."""
    with _Quiet():
        return _empty((size,), dtype=torch.uint8, device=device)


def like(value: torch.Tensor, device: str) -> torch.Tensor:
    """New memory with the shape, strides and offset of a tensor."""
    seen = Seen(value)
    return laid_out(seen.dtype, seen.shape, seen.strides, seen.offset, seen.span, device)


def laid_out(
    dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int], offset: int, span: int, device: str
) -> torch.Tensor:
    """New memory for a tensor of ``span`` elements from its first to its last."""
    with _Quiet():
        base = _empty((offset + span,), dtype=dtype, device=device)
        return _strided(base, shape, strides, offset if span else 0)


class _Box(ctypes.Structure):
    """CUDA_MEMCPY3D."""

    _ends = ("XInBytes", "Y", "Z", "LOD")

    _fields_ = [
        *[(f"src{n}", ctypes.c_size_t) for n in _ends], ("srcMemoryType", ctypes.c_int), ("srcHost", ctypes.c_void_p),
        ("srcDevice", ctypes.c_uint64), ("srcArray", ctypes.c_void_p), ("reserved0", ctypes.c_void_p),
        ("srcPitch", ctypes.c_size_t), ("srcHeight", ctypes.c_size_t),
        *[(f"dst{n}", ctypes.c_size_t) for n in _ends], ("dstMemoryType", ctypes.c_int), ("dstHost", ctypes.c_void_p),
        ("dstDevice", ctypes.c_uint64), ("dstArray", ctypes.c_void_p), ("reserved1", ctypes.c_void_p),
        ("dstPitch", ctypes.c_size_t), ("dstHeight", ctypes.c_size_t),
        ("WidthInBytes", ctypes.c_size_t), ("Height", ctypes.c_size_t), ("Depth", ctypes.c_size_t),
    ]  # fmt: skip


_DEVICE_MEMORY = 2
_NO_MEMORY = 2


class _Shared(ctypes.Structure):
    """CUipcMemHandle: names memory of one process to others."""

    _fields_ = [("bytes", ctypes.c_ubyte * 64)]


class _Event:
    """A CUDA event that is destroyed with its object."""

    def __init__(self, destroy: Callable[[Any], Any]) -> None:
        self.handle, self._destroy = ctypes.c_void_p(), destroy

    def __del__(self) -> None:
        if self.handle:
            self._destroy(self.handle)


def bind(library: Any, name: str, *types: Any) -> Callable[..., None]:
    """A function of a C library that returns 0, or the number of its error, which becomes a RuntimeError."""
    function = getattr(library, name)
    function.argtypes, function.restype = types, ctypes.c_int

    def call(*args: Any) -> None:
        code = function(*args)
        if code:
            why = " (out of memory)" if code == _NO_MEMORY else ""
            raise RuntimeError(f"CUDA driver: {name} failed with error {code}{why}")

    return call


class Driver:
    """The device, as the stopwatch uses it: addresses are integers, sizes bytes. CUDA must be initialised in this process."""

    def __init__(self) -> None:
        # PyDLL keeps the interpreter's lock during a call, CDLL gives it away while it waits.
        held, free = ctypes.PyDLL("libcuda.so.1"), ctypes.CDLL("libcuda.so.1")
        pointer, size, handle = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p

        self._alloc = bind(free, "cuMemAlloc_v2", ctypes.POINTER(pointer), size)
        self._free = bind(free, "cuMemFree_v2", pointer)
        self._copy = bind(held, "cuMemcpyDtoDAsync_v2", pointer, pointer, size, handle)
        self._copy3 = bind(held, "cuMemcpy3DAsync_v2", ctypes.POINTER(_Box), handle)
        self._fill8 = bind(held, "cuMemsetD8Async", pointer, ctypes.c_ubyte, size, handle)
        self._fill32 = bind(held, "cuMemsetD32Async", pointer, ctypes.c_uint, size, handle)
        self._read = bind(free, "cuMemcpyDtoH_v2", handle, pointer, size)
        self._name = bind(free, "cuIpcGetMemHandle", ctypes.POINTER(_Shared), pointer)
        self._open = bind(free, "cuIpcOpenMemHandle_v2", ctypes.POINTER(pointer), _Shared, ctypes.c_uint)
        self._create = bind(held, "cuEventCreate", ctypes.POINTER(handle), ctypes.c_uint)
        self._record = bind(held, "cuEventRecord", handle, handle)
        self._elapsed = bind(held, "cuEventElapsedTime", ctypes.POINTER(ctypes.c_float), handle, handle)
        self._destroy = held.cuEventDestroy_v2
        self._destroy.argtypes = [handle]
        self._sync = bind(free, "cuCtxSynchronize")
        self._forget = held.cuCtxResetPersistingL2Cache
        cuda = torch._C
        self._sleep, self._empty_cache = cuda._cuda_sleep, cuda._cuda_emptyCache
        self._set_stream, self._default = cuda._cuda_setStream, cuda._cuda_getDefaultStream
        self._graph = cuda._CUDAGraph
        self._begin, self._end, self._play = self._graph.capture_begin, self._graph.capture_end, self._graph.replay
        self._side = torch.cuda.Stream()

    def alloc(self, size: int) -> int:
        """Memory of the driver's, which no torch tensor ever shows."""
        got = ctypes.c_uint64()
        try:
            self._alloc(ctypes.byref(got), max(1, size))
        except RuntimeError:
            self._empty_cache()  # what torch keeps for later is ours for now
            self._alloc(ctypes.byref(got), max(1, size))
        return int(got.value)

    def free(self, address: int) -> None:
        """Give memory back."""
        self._free(address)

    def share(self, address: int) -> bytes:
        """What another process needs to ``open`` memory of ``alloc``.

        Raises:
            RuntimeError: the driver offers no such thing here.
        """
        name = _Shared()
        self._name(ctypes.byref(name), address)
        return bytes(name.bytes)

    def open(self, handle: bytes) -> int:
        """The address in this process of memory that another one shares."""
        got, name = ctypes.c_uint64(), _Shared.from_buffer_copy(handle)
        self._open(ctypes.byref(got), name, 1)
        return int(got.value)

    def copy(self, to: int, source: int, size: int) -> None:
        """Copy bytes in stream order."""
        if size:
            self._copy(to, source, size, None)

    def copy_boxes(
        self, to: int, source: int, at: tuple[int, int], out: tuple[int, int], size: tuple[int, int, int],
        matrix: tuple[int, int],
    ) -> None:  # fmt: skip
        """Copy a rectangle of every matrix of a batch: ``matrix`` is (rows, bytes a row), ``size`` (count, rows, bytes),
        ``at`` and ``out`` are (row, byte) where it is read and written."""
        box = _Box()
        box.srcMemoryType = box.dstMemoryType = _DEVICE_MEMORY
        box.srcDevice, box.dstDevice = source, to
        box.srcY, box.srcXInBytes = at
        box.dstY, box.dstXInBytes = out
        box.srcHeight, box.srcPitch = matrix
        box.dstHeight, box.dstPitch = matrix
        box.Depth, box.Height, box.WidthInBytes = size
        self._copy3(ctypes.byref(box), None)

    def fill(self, to: int, byte: int, size: int) -> None:
        """Set every byte in stream order."""
        whole = size // 4 if to % 4 == 0 else 0
        if whole:
            self._fill32(to, byte * 0x01010101, whole, None)
        if size - 4 * whole:
            self._fill8(to + 4 * whole, byte, size - 4 * whole, None)

    def read(self, source: int, size: int) -> bytes:
        """Bytes to the host, after everything before them."""
        buffer = ctypes.create_string_buffer(max(1, size))
        if size:
            self._read(buffer, source, size)
        return ctypes.string_at(buffer, size)

    def event(self) -> _Event:
        """A new event that can be timed."""
        event = _Event(self._destroy)
        self._create(ctypes.byref(event.handle), 0)
        return event

    def record(self, event: _Event) -> None:
        """Record in the default stream, whatever stream is current."""
        self._record(event.handle, None)

    def elapsed_us(self, start: _Event, end: _Event) -> float:
        """Microseconds between two events that have happened."""
        got = ctypes.c_float()
        self._elapsed(ctypes.byref(got), start.handle, end.handle)
        return float(got.value) * 1e3

    def wait(self, cycles: int) -> None:
        """Keep the default stream busy."""
        self._sleep(cycles)

    def sync(self) -> None:
        """Wait for all streams of the device."""
        self._sync()

    def main_stream(self) -> None:
        """Make the default stream the current one again, whatever a call has left behind."""
        stream, index, kind = self._default(0)
        self._set_stream(stream_id=stream, device_index=index, device_type=kind)

    def forget_lines(self) -> None:
        """Lines that a kernel asked to persist in L2 would survive the flush. Older cards have none."""
        self._forget()

    def empty_cache(self) -> None:
        """Give torch's unused memory back."""
        self._empty_cache()

    def capture(self, body: Callable[[], None]) -> Callable[[], None]:
        """Capture ``body`` into a graph; returns what replays it.

        Raises:
            Exception: whatever ``body`` or the end of the capture raises.
        """
        self.sync()
        self._empty_cache()
        side, graph = self._side, self._graph()
        self._set_stream(stream_id=side.stream_id, device_index=side.device_index, device_type=side.device_type)
        try:
            self._begin(graph, pool=None, capture_error_mode="global")
            try:
                body()
            finally:
                # An error inside leaves the stream capturing: it must end, and its own error says less.
                self._end(graph)
        finally:
            self.main_stream()
        play = self._play
        return lambda: play(graph)
