"""Access to the device for the stopwatch that a submission in the same process cannot tamper with.

Memory is filled, copied and read, and events are recorded and read, through the CUDA driver: no name of torch, no mode
and no kernel of the dispatcher that a submission can replace is involved, and no version counter changes. The few
functions of torch that are needed are bound when this module is imported or a ``Driver`` is made, before the submission
is loaded. Calls that record or enqueue keep the interpreter's lock, so that no other thread runs between the end of a
call and the copy of its result.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from kbx_env.device import suballocation
from kbx_env.device.arena import Arena

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


class TensorMetadata:
    """A tensor's metadata, read by functions that a submission cannot replace.

    Args:
        value: The tensor; ``TorchFunctionMode`` and ``__torch_function__`` are not called.

    Attributes:
        conj: Whether a conjugation is pending.
        dtype: Type of an element.
        is_strided: Whether the layout is strided, that is not sparse.
        itemsize: Bytes of an element.
        neg: Whether a negation is pending.
        offset: Elements before the first one in the storage.
        pointer: Address of the first element.
        requires_grad: As the tensor's attribute.
        shape: Sizes.
        span: Number of elements from the first to the last, with those between them that do not belong to the tensor.
        storage: Address of the storage.
        strides: Strides in elements.
    """

    __slots__ = (
        "conj",
        "dtype",
        "requires_grad",
        "storage",
        "itemsize",
        "neg",
        "offset",
        "is_strided",
        "pointer",
        "shape",
        "span",
        "strides",
    )

    def __init__(self, value: Any) -> None:
        with _Quiet():
            self.shape, self.strides = tuple(_shape(value)), tuple(_strides(value))
            self.dtype, self.offset, self.pointer = _dtype(value), _offset(value), _pointer(value)
            self.storage, self.requires_grad = _address(_storage(value)), bool(_grad(value))
            self.conj, self.neg = bool(_conj(value)), bool(_neg(value))
            self.is_strided = _layout(value) is _STRIDED
        self.itemsize = self.dtype.itemsize
        self.span = (
            0 if 0 in self.shape else 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        )

    @property
    def size(self) -> int:
        """Number of bytes from the first element to the last."""
        return self.span * self.itemsize

    def resolved(self, data: bytes) -> bytes:
        """Apply a pending conjugation or negation.

        Args:
            data: The tensor's bytes, of a float or complex type if something is pending.

        Returns:
            The bytes of the resolved tensor.
        """
        if not (self.conj or self.neg) or not data:
            return data
        parts: Any = np.frombuffer(
            data, np.float32 if self.itemsize == (8 if self.dtype.is_complex else 4) else np.float64
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


class ResultCopy:
    """A result as it was at the end of its call: metadata, and copies of the bytes in the driver's memory.

    Args:
        values: ``TensorMetadata`` of each tensor of the result, the name of the type of anything else, and pairs of
            name and ``TensorMetadata`` of written arguments.
        is_tuple: Whether the result is a tuple or a list.
    """

    def __init__(self, values: list[Any], is_tuple: bool) -> None:
        self.values, self.is_tuple = values, is_tuple
        self.buffers: list[int] = []
        """Address of the copy of each value, 0 for values that are no tensors."""


def is_plain_tensor(value: Any, device: str) -> bool:
    """Return whether a value is a strided tensor on the device and of no subclass, which could run code of its own."""
    if type(value) is not _Plain:
        return False
    with _Quiet():
        return _layout(value) is _STRIDED and bool(_cuda(value)) == (device == "cuda")


def storage_of(value: torch.Tensor) -> Any:
    """Return a tensor's storage; holding it keeps the memory alive."""
    with _Quiet():
        return _storage(value)


def empty_bytes(size: int, device: str) -> torch.Tensor:
    """Return an uninitialised tensor of torch's memory: uint8, (size,)."""
    with _Quiet():
        return _empty((size,), dtype=torch.uint8, device=device)


def allocate_like(value: torch.Tensor, device: str) -> torch.Tensor:
    """Return an uninitialised tensor with the dtype, shape, strides and offset of another one."""
    like = TensorMetadata(value)
    return empty_strided(like.dtype, like.shape, like.strides, like.offset, like.span, device)


def empty_strided(
    dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int], offset: int, span: int, device: str
) -> torch.Tensor:
    """Return an uninitialised tensor.

    Args:
        dtype: Type of an element.
        shape: Sizes.
        strides: Strides in elements.
        offset: Elements before the first one in the storage.
        span: Number of elements from the first to the last.
        device: "cuda" or "cpu".

    Returns:
        The tensor.
    """
    with _Quiet():
        base = _empty((offset + span,), dtype=dtype, device=device)
        return _strided(base, shape, strides, offset if span else 0)


class _Memcpy3D(ctypes.Structure):
    """CUDA_MEMCPY3D of the driver API."""

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
"""CU_MEMORYTYPE_DEVICE."""
KEPT_CACHE_BYTES = 2 << 30
"""Freed memory of each kind, torch's and that of ``Driver.alloc``, that a process may keep while the GPU is held alone. Asking the
driver for memory and giving it back takes a lock of the whole host for each allocation: with four GPUs that each grade, that took
about half of the time for which a GPU was held (docs/measurements)."""
AMPLE_CACHE_BYTES = 8 << 30
"""The same where the device has ample memory left."""
KEPT_BYTES = 128 << 20
"""The same that a grader keeps while others use the GPU."""
_NON_BLOCKING = 1
"""CU_STREAM_NON_BLOCKING."""
_NO_MEMORY = 2
"""CUDA_ERROR_OUT_OF_MEMORY."""


class _IpcHandle(ctypes.Structure):
    """CUipcMemHandle: identifies memory of one process in other processes."""

    _fields_ = [("bytes", ctypes.c_ubyte * 64)]


class _Event:
    """A CUDA event that is destroyed with its object."""

    def __init__(self, destroy: Callable[[Any], Any]) -> None:
        self.handle, self._destroy = ctypes.c_void_p(), destroy

    def __del__(self) -> None:
        if self.handle:
            self._destroy(self.handle)


def bind(library: Any, name: str, *types: Any) -> Callable[..., None]:
    """Bind a function of a C library that returns 0 or the number of an error.

    Args:
        library: The library, as ctypes loads it.
        name: Name of the function.
        *types: Types of its arguments.

    Returns:
        A function that raises a RuntimeError for an error.
    """
    function = getattr(library, name)
    function.argtypes, function.restype = types, ctypes.c_int

    def call(*args: Any) -> None:
        code = function(*args)
        if code:
            why = " (out of memory)" if code == _NO_MEMORY else ""
            raise RuntimeError(f"CUDA driver: {name} failed with error {code}{why}")

    return call


class Driver:
    """The device: addresses are integers, sizes are bytes. CUDA must be initialised in this process."""

    def __init__(self) -> None:
        # PyDLL keeps the interpreter's lock during a call, CDLL releases it.
        held, free = ctypes.PyDLL("libcuda.so.1"), ctypes.CDLL("libcuda.so.1")
        pointer, size, handle = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p

        self._alloc = bind(free, "cuMemAlloc_v2", ctypes.POINTER(pointer), size)
        self._free = bind(free, "cuMemFree_v2", pointer)
        self._copy = bind(held, "cuMemcpyDtoDAsync_v2", pointer, pointer, size, handle)
        self._copy3 = bind(held, "cuMemcpy3DAsync_v2", ctypes.POINTER(_Memcpy3D), handle)
        self._fill8 = bind(held, "cuMemsetD8Async", pointer, ctypes.c_ubyte, size, handle)
        self._fill32 = bind(held, "cuMemsetD32Async", pointer, ctypes.c_uint, size, handle)
        self._read = bind(free, "cuMemcpyDtoH_v2", handle, pointer, size)
        self._share = bind(free, "cuIpcGetMemHandle", ctypes.POINTER(_IpcHandle), pointer)
        self._open = bind(free, "cuIpcOpenMemHandle_v2", ctypes.POINTER(pointer), _IpcHandle, ctypes.c_uint)
        self._create = bind(held, "cuEventCreate", ctypes.POINTER(handle), ctypes.c_uint)
        self._record = bind(held, "cuEventRecord", handle, handle)
        self._elapsed = bind(held, "cuEventElapsedTime", ctypes.POINTER(ctypes.c_float), handle, handle)
        self._destroy = held.cuEventDestroy_v2
        self._destroy.argtypes = [handle]
        self._sync = bind(free, "cuCtxSynchronize")
        self._set_context = bind(held, "cuCtxSetCurrent", handle)
        self._forget = held.cuCtxResetPersistingL2Cache
        cuda = torch._C
        self._sleep, self._empty_cache, self._statistics = cuda._cuda_sleep, cuda._cuda_emptyCache, cuda._cuda_memoryStats
        self._reset_peak = cuda._cuda_resetPeakMemoryStats
        self._set_stream, self._default = cuda._cuda_setStream, cuda._cuda_getDefaultStream
        self._graph = cuda._CUDAGraph
        self._begin, self._end, self._play = self._graph.capture_begin, self._graph.capture_end, self._graph.replay
        self._pool = self._graph.pool
        torch.cuda.synchronize()  # makes torch's context the one of this thread
        self._context = handle()
        bind(held, "cuCtxGetCurrent", ctypes.POINTER(handle))(ctypes.byref(self._context))
        # torch.cuda.Stream() would make 32 streams.
        side = handle()
        bind(held, "cuStreamCreate", ctypes.POINTER(handle), ctypes.c_uint)(ctypes.byref(side), _NON_BLOCKING)
        self._side = torch.cuda.ExternalStream(side.value)
        self._arena, self._cache_limit = Arena(self.alloc_dedicated, self.free_dedicated, KEPT_CACHE_BYTES), KEPT_CACHE_BYTES
        self._latest_graph: tuple[Any, int] | None = None  # the next one gets its memory: so many bytes
        self._blocks: list[int] = []
        self.emptied = 0
        """How often torch's unused memory was given back."""

    def use_in_thread(self) -> None:
        """Make torch's context the one of this thread. Torch does so only when the thread first uses CUDA through it."""
        self._set_context(self._context)

    def alloc(self, size: int) -> int:
        """Allocate device memory that no torch tensor uses. Use what is freed again in the order of the default stream.

        Args:
            size: Bytes.

        Returns:
            The address.

        Raises:
            RuntimeError: there is no memory left.
        """
        return self._arena.alloc(size)

    def free(self, address: int) -> None:
        """Free memory of ``alloc``. It stays with this process until ``give_back``."""
        self._arena.free(address)

    def preallocate(self, size: int) -> None:
        """Ask the device at once for memory of which ``alloc`` will give out parts; without effect where there is none.

        Args:
            size: Bytes.
        """
        self._arena.preallocate(size)

    def keep_suballocation_blocks(self) -> None:
        """Let small allocations of libraries in this process make no requests (``device.suballocation``).

        Where memory was short before, the next call makes up for it.
        """
        self.use_in_thread()
        missing = suballocation.BLOCKS - len(self._blocks)
        if missing:
            self._blocks += suballocation.keep_blocks(self._cu_alloc, self._free, missing)

    def alloc_dedicated(self, size: int) -> int:
        """Allocate device memory that the driver can share alone: whoever gets it sees no other memory of this process.

        Args:
            size: Bytes.

        Returns:
            The address.

        Raises:
            RuntimeError: there is no memory left.
        """
        try:
            return self._cu_alloc(max(suballocation.BLOCK_BYTES, size))
        except RuntimeError:
            self.give_back()  # what this process keeps without need may be enough
            return self._cu_alloc(max(suballocation.BLOCK_BYTES, size))

    def _cu_alloc(self, size: int) -> int:
        """Allocate device memory, and return its address."""
        address = ctypes.c_uint64()
        self._alloc(ctypes.byref(address), size)
        return address.value

    def free_dedicated(self, address: int) -> None:
        """Free memory of ``alloc_dedicated``."""
        self._free(address)

    def set_cache_limit(self, size: int) -> None:
        """Set how much freed memory of each kind this process may keep while it is not asked to give back.

        Args:
            size: Bytes.
        """
        self._cache_limit = self._arena.kept = size

    def give_back(self, keep: int = 0) -> None:
        """Return freed memory to the device for other processes: torch's, and that of ``alloc``.

        Args:
            keep: Bytes of each kind that may stay with this process; 0 also gives back the memory of a graph that is not replayed
                any more.
        """
        if not keep:
            self._latest_graph = None
        self._arena.trim(keep)  # the driver waits for the device when it frees
        self.trim_cache(keep)

    def share(self, address: int) -> bytes:
        """Share memory with other processes.

        Args:
            address: A result of ``alloc_dedicated``.

        Returns:
            A handle for ``open`` in another process.

        Raises:
            RuntimeError: the driver cannot share memory here.
        """
        handle = _IpcHandle()
        self._share(ctypes.byref(handle), address)
        return bytes(handle.bytes)

    def open(self, handle: bytes) -> int:
        """Map memory that another process shares, and return its address in this process."""
        got, shared = ctypes.c_uint64(), _IpcHandle.from_buffer_copy(handle)
        self._open(ctypes.byref(got), shared, 1)
        return int(got.value)

    def copy(self, to: int, source: int, size: int) -> None:
        """Copy ``size`` bytes between two addresses of the device, in stream order."""
        if size:
            self._copy(to, source, size, None)

    def copy_boxes(
        self, to: int, source: int, at: tuple[int, int], out: tuple[int, int], size: tuple[int, int, int],
        matrix: tuple[int, int],
    ) -> None:  # fmt: skip
        """Copy a rectangle of every matrix of a batch, in stream order.

        Args:
            to: Address of the target batch.
            source: Address of the source batch.
            at: Row and byte in the row at which the rectangle is read.
            out: Row and byte in the row at which it is written.
            size: Number of matrices, rows of the rectangle, bytes of its rows.
            matrix: Rows of a matrix, bytes of its rows.
        """
        box = _Memcpy3D()
        box.srcMemoryType = box.dstMemoryType = _DEVICE_MEMORY
        box.srcDevice, box.dstDevice = source, to
        box.srcY, box.srcXInBytes = at
        box.dstY, box.dstXInBytes = out
        box.srcHeight, box.srcPitch = matrix
        box.dstHeight, box.dstPitch = matrix
        box.Depth, box.Height, box.WidthInBytes = size
        self._copy3(ctypes.byref(box), None)

    def fill(self, to: int, byte: int, size: int) -> None:
        """Set ``size`` bytes to one value in stream order."""
        words = size // 4 if to % 4 == 0 else 0
        if words:
            self._fill32(to, byte * 0x01010101, words, None)
        if size - 4 * words:
            self._fill8(to + 4 * words, byte, size - 4 * words, None)

    def read(self, source: int, size: int) -> bytes:
        """Return ``size`` bytes of device memory, after all work before."""
        buffer = ctypes.create_string_buffer(max(1, size))
        if size:
            self._read(buffer, source, size)
        return ctypes.string_at(buffer, size)

    def event(self) -> _Event:
        """Create an event that records times."""
        event = _Event(self._destroy)
        self._create(ctypes.byref(event.handle), 0)
        return event

    def record(self, event: _Event) -> None:
        """Record an event in the default stream, even if another stream is current."""
        self._record(event.handle, None)

    def elapsed_us(self, start: _Event, end: _Event) -> float:
        """Return the microseconds between two events that have happened."""
        got = ctypes.c_float()
        self._elapsed(ctypes.byref(got), start.handle, end.handle)
        return float(got.value) * 1e3

    def wait(self, cycles: int) -> None:
        """Keep the default stream busy for a number of SM clock cycles."""
        self._sleep(cycles)

    def sync(self) -> None:
        """Wait for all streams of the device."""
        self._sync()

    def use_default_stream(self) -> None:
        """Make the default stream current again; a call may have changed the current stream."""
        stream, index, kind = self._default(0)
        self._set_stream(stream_id=stream, device_index=index, device_type=kind)

    def reset_persisting_l2(self) -> None:
        """Reset persisting lines of L2, which would survive the flush; an error on GPUs without them is ignored."""
        self._forget()

    def empty_cache(self) -> None:
        """Release torch's cached memory."""
        self.emptied += 1
        self._empty_cache()

    def trim_cache(self, keep: int) -> None:
        """Release torch's cached memory.

        Args:
            keep: Nothing is released if it is not more than so many bytes.
        """
        if self.reserved_bytes() - self._allocated_bytes("current") > keep:
            self.empty_cache()

    def _allocated_bytes(self, kind: str) -> int:
        """Return the bytes that torch's tensors have of the device: ``current`` or ``peak``."""
        return int(self._statistics(0)["allocated_bytes"]["all"][kind])

    def watch_peak(self) -> Callable[[], int]:
        """Return a function that returns how many bytes more torch's tensors have had at most since now."""
        self._reset_peak(0)
        before = self._allocated_bytes("current")
        return lambda: self._allocated_bytes("peak") - before

    def empty_outside_pool(self, size: int) -> torch.Tensor:
        """Return an uninitialised tensor that may outlive others: uint8, (size,).

        Torch gives its memory back in large pieces, each as a whole. This tensor's memory shares no piece with tensors of
        ``empty_bytes``. Use it in the order of the default stream.
        """
        side = self._side
        self._set_stream(stream_id=side.stream_id, device_index=side.device_index, device_type=side.device_type)
        try:
            return empty_bytes(size, "cuda")
        finally:
            self.use_default_stream()

    def reserved_bytes(self) -> int:
        """Return the bytes that torch's allocator has of the device, used or cached."""
        return int(self._statistics(0)["reserved_bytes"]["all"]["current"])

    def capture(self, body: Callable[[], None], reserve: int = 0) -> Callable[[], None]:
        """Capture work into a CUDA graph; the latest one must not be replayed again. If it reserved as much, its memory is used.

        Args:
            body: Enqueues the work.
            reserve: Bytes that torch allocates for the graph at once, for all that its calls allocate; otherwise it asks the
                driver for the memory of each.

        Returns:
            A function that replays the graph.

        Raises:
            Exception: any error of ``body`` or of the end of the capture.
        """
        self.sync()
        # Torch frees the memory of a graph with it: the latest one is kept until here, although nobody replays it any more.
        latest, self._latest_graph = self._latest_graph, None
        latest = latest if latest is not None and 0 < reserve <= latest[1] else None
        self.trim_cache(self._cache_limit + (0 if latest is None else latest[1]))
        side, graph = self._side, self._graph()
        pool = None if latest is None else self._pool(latest[0])
        self._set_stream(stream_id=side.stream_id, device_index=side.device_index, device_type=side.device_type)
        try:
            self._begin(graph, pool=pool, capture_error_mode="global")
            try:
                if reserve:
                    empty_bytes(reserve, "cuda")  # freed at once: it stays in the memory of the graph
                body()
            finally:
                # After an error in ``body`` the stream still captures, and the capture must be ended.
                self._end(graph)
        finally:
            self.use_default_stream()
        if reserve:
            self._latest_graph = graph, reserve if latest is None else latest[1]
        play = self._play
        return lambda: play(graph)


@functools.cache
def process_driver() -> Driver:
    """Return the driver of this process, which all of its stopwatches and transports share."""
    torch.cuda.init()
    return Driver()


def preallocate_outside_pool(size: int) -> None:
    """Ask the device at once for memory of which ``Driver.empty_outside_pool`` gives out parts. Without a device nothing happens.

    Args:
        size: Bytes.
    """
    if torch.cuda.is_available():
        with contextlib.suppress(RuntimeError):  # too little memory: each part is asked for when it is needed
            process_driver().empty_outside_pool(size)


def preallocate(size: int) -> None:
    """Ask the device at once for memory of which torch gives out parts. Without a device nothing happens.

    Args:
        size: Bytes; without effect where so many are not to be had.
    """
    if torch.cuda.is_available():
        with contextlib.suppress(RuntimeError):
            empty_bytes(size, "cuda")  # freed at once, it stays in torch's cache


def keep_suballocation_blocks() -> None:
    """See ``Driver.keep_suballocation_blocks``. Without a device nothing happens."""
    if torch.cuda.is_available():
        process_driver().keep_suballocation_blocks()


def give_back(keep: int = 0) -> None:
    """Return memory that this process has freed to the device: other processes need it. Without a device nothing happens.

    Args:
        keep: Bytes that may stay with this process, for torch and for stopwatches each.
    """
    if torch.cuda.is_available():
        process_driver().give_back(keep)
