"""Times calls on the device with events.

The runner times the candidate with it and the grader times eager, so that the two times differ only by the function
that was called. In the runner it shares a process with the submission: it binds all functions that it needs before the
submission is loaded, gives every timed call values that no earlier call has had, and copies a call's result as it is at
the end event.
"""

from __future__ import annotations

import contextlib
import gc
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from kbx_env.device.autotuners import Autotuners
from kbx_env.device.driver import (
    AMPLE_CACHE_BYTES,
    KEPT_CACHE_BYTES,
    Driver,
    ResultCopy,
    TensorMetadata,
    allocate_like,
    empty_bytes,
    empty_strided,
    is_plain_tensor,
    process_driver,
    storage_of,
)
from kbx_env.device.input_windows import DeviceWindows, Window
from kbx_env.device.ipc_runner import Result

FLUSH_BYTES = 512 << 20
"""Bytes written before every timed call to evict the L2 cache (60 MB on an H200)."""
CYCLES_PER_US = 2000
"""At least the SM clock in MHz, so that a wait of this many cycles lasts a microsecond or longer."""
MAX_WAIT_US = 5000.0
"""Longest wait of the device before a timed call, in microseconds."""
MIN_WAIT_US = 20.0
"""Shortest wait of the device before a timed call, in microseconds."""
LATER_WAIT = 1.2
"""Host's time for a call times this: the wait before each timed call but the first of a block. The first one waits longer, and
the device falls further behind the host with every call, so that a delay of the host seldom reaches it."""
WAIT_BELOW_US = 200.0
"""Between calls that take less, the host waits for the device: a kernel starts up to 0.7 us later if more work is enqueued behind
it, by how the driver lays out its commands. A runner also enqueues the copy of the result, so it would always be the slower side
(docs/measurements)."""
SHORT_CALL_SECONDS = 0.001
"""A call that takes less in the warm-up, with the host's part, counts as a short one in its first block."""
SLOW_SECONDS = 0.01
"""If a warm-up call takes longer, one slot is enough, and the other slots are not called."""
FILLERS = 4
"""Number of buffers of random size, for each of two ranges of sizes, that move the others to new addresses."""
POOL_FACTOR = 3
"""Size of the memory pool in which ``shuffle`` moves the slots, as a multiple of the slots' bytes."""
FILLER_BYTES = 128 << 20
"""Bytes of the pool for buffers of random size."""
MAX_POOL_BYTES, MAX_PREALLOCATED_BYTES = 4 << 30, 2 << 30
"""Most bytes of the pool, and of messages, windows and results, for which the driver is asked at once, however full the device is.
What is larger is allocated step by step."""
AMPLE_POOL_BYTES, AMPLE_PREALLOCATED_BYTES = 8 << 30, 12 << 30
"""The same where the caller has seen that the device has ample memory left."""
MAX_GRAPH_RESERVE_BYTES = 2 << 30
"""Most bytes that are allocated at once for what the calls of a graph allocate."""
LEAST_AMPLE_GRAPH_RESERVE_BYTES, AMPLE_GRAPH_RESERVE_BYTES = 64 << 20, 4 << 30
"""Least and most of them where the device has ample memory left."""
TORCH_ALIGN = 512
"""Torch rounds the bytes of an allocation up to a multiple of this."""
POISON = 0xFF
"""Every byte of a result after it was copied: NaN as a float, -1 as an integer.

A submission that returns the same tensor again without writing it returns these.
"""
SWITCH_SECONDS = 5.0
"""Seconds that other threads must wait for the interpreter's lock while a result is copied."""
LAUNCHES, LAUNCH_WAIT_US = 32, 40.0
"""Empty kernels that are timed, and the device's wait before each: with the flush it is longer than the host needs to enqueue."""


def pool_bytes(slot_bytes: int) -> int:
    """Return the bytes of torch's memory in which slots of so many bytes move."""
    return POOL_FACTOR * slot_bytes + FILLER_BYTES


class Stopwatch:
    """Holds the input slots of one timed case and the results of the last block of calls.

    A slot is one set of input buffers. The values of a call are a ``Window`` of values that are copied into a slot.

    Args:
        device: "cuda", or "cpu" in tests.
        driver: The device's driver; by default the CUDA driver.
        guards: Protect against the submission in this process: copy results, poison the originals, watch autotuners.
    """

    def __init__(self, device: str, driver: Driver | None = None, *, guards: bool = False) -> None:
        self.device, self.guards = device, guards
        self._driver = driver or process_driver()
        self._flush = 0
        self._call: Callable[[dict[str, Any]], Any] | None = None
        self._slots: list[dict[str, Any]] = []
        # By slot and tensor: its metadata, and its storage, which stays alive even if a call uses ``set_`` on the
        # tensor.
        self._slot_tensors: list[dict[str, tuple[TensorMetadata, Any]]] = []
        self._results: list[tuple[int, ResultCopy]] = []  # slot and result of every call of the last block
        self._written: tuple[str, ...] = ()
        self._rings = DeviceWindows(self._driver)
        self._wait_us = self._most_wait_us = self._later_wait_us = 100.0
        self._short = self._slow = False  # how long the latest case's calls took in the warm-up
        self._moved = False  # whether the buffers of this case have been moved
        self._pool_bytes = 0  # of torch's memory, one piece when it was allocated, in which buffers move
        self._pool_since = 0  # how often torch's memory had been given back then
        self._call_bytes = 0  # of torch's memory that a call has had at most, with its result
        self._ample = False  # whether the device has ample memory left
        # A buffer that stays until the next shuffle: results move too, and torch does not release the pool.
        self._filler: list[torch.Tensor] = []
        self._replay_graph: Callable[[], None] | None = None
        self._graph_copies: list[ResultCopy] = []
        self._graph_results: list[tuple[int, Any]] = []  # slot and result of every captured call
        self._now, self._switch_interval = time.perf_counter, (sys.setswitchinterval, sys.getswitchinterval())
        self._autotuners = Autotuners() if guards else None
        self._frames, self._collector = sys._current_frames, (gc.isenabled, gc.disable, gc.enable)
        self._launch_us: float | None = None

    # --- inputs -------------------------------------------------------------------------------------------

    def preallocate(self, slot_bytes: int, slots: int, other_bytes: int, ample: bool = False) -> None:
        """Ask the driver at once for the memory of the next case, before its values are drawn or taken; drops the case before.

        Each request waits for a lock that all GPUs of the host share (docs/measurements). The largest cases, and those for which
        there is too little memory, ask for each part when they need it.

        Args:
            slot_bytes: Bytes of the tensors of one slot.
            slots: Number of slots.
            other_bytes: Most bytes of messages, windows and results at one time; the memory that empties the L2 cache comes on top.
            ample: Whether the device has ample memory left, so that larger pieces are asked for as well, and more is kept for the
                next case.
        """
        self._driver.use_in_thread()
        self._ample = ample
        self._driver.set_cache_limit(AMPLE_CACHE_BYTES if ample else KEPT_CACHE_BYTES)
        self.clear()
        pool = pool_bytes(slots * slot_bytes)
        if pool <= (AMPLE_POOL_BYTES if ample else MAX_POOL_BYTES) and not self._has_pool(pool):
            self._make_pool(pool)
        if other_bytes <= (AMPLE_PREALLOCATED_BYTES if ample else MAX_PREALLOCATED_BYTES):
            self._driver.preallocate(other_bytes + (0 if self._flush else FLUSH_BYTES))
        try:
            self._flush = self._flush or self._driver.alloc(FLUSH_BYTES)
        except RuntimeError:  # ``warm`` asks again
            self._flush = 0

    @property
    def pooled(self) -> bool:
        """Whether the slots move within one piece of memory."""
        return self._has_pool(1)

    def _has_pool(self, size: int) -> bool:
        """Return whether the pool has so many bytes, and was not given back meanwhile."""
        return size <= self._pool_bytes and self._pool_since == self._driver.emptied

    def _keep_pool(self, had_one: bool) -> None:
        """Note that the pool was in use, so not given back, when torch's unused memory was.

        Args:
            had_one: Whether there was a pool before.
        """
        if had_one:
            self._pool_since = self._driver.emptied

    def _make_pool(self, size: int) -> None:
        """Replace the pool. Freed at once, it stays in torch's cache; without memory there is none."""
        self._pool_bytes = 0
        try:
            self._driver.give_back()
            empty_bytes(size, self.device)
        except RuntimeError:
            return
        self._pool_bytes, self._pool_since = size, self._driver.emptied

    def prepare(
        self, call: Callable[[dict[str, Any]], Any], draws: list[dict[str, Any]], *, slots: int = 0,
        turning: Mapping[str, Sequence[int]] | None = None, written: Sequence[str] = (), warm: bool = True,
    ) -> dict[str, Any]:  # fmt: skip
        """Take new inputs.

        Args:
            call: The function to time; it takes a slot.
            draws: Sets of arguments. Without ``turning`` each one is a slot; otherwise the list is emptied, because the slots of
                the largest cases need the memory of its values.
            slots: Number of slots, with ``turning``.
            turning: The tensors whose values change from call to call: these tensors of all draws are laid end to end,
                and a call gets a window of them. The values are the rows and columns of the matrices in them, or two
                zeros.
            written: Names of the tensors that a call changes in place; their values are part of the result.
            warm: Whether to make the warm-up calls now.

        Returns:
            The result of ``warm``, or nothing.
        """
        self._free()
        self._freeze_autotuners(False)
        self._call, self._written, self._moved, self._filler = call, tuple(written), False, []
        self._slots = list(draws)
        if turning is not None:
            self._allocate_slots(draws, slots, turning)
        self._record_slots()
        return self.warm() if warm else {}

    def dry(self) -> dict[str, Any]:
        """Make one call that compiles kernels; the caller has disabled their launches."""
        assert self._call is not None
        with contextlib.suppress(Exception):  # host code may fail on values that no kernel has written
            self._call(self._slots[0])
        return {}

    def warm(self) -> dict[str, Any]:
        """Make the warm-up calls; autotuning happens here, outside every timed region.

        Returns:
            ``call_seconds``, the median time of one call in seconds, with the host's part.
        """
        assert self._call is not None
        if not self._flush:
            self._flush = self._driver.alloc(FLUSH_BYTES)
        host, total = list[float](), list[float]()
        began = self._now()
        self._call(self._slots[0])
        self._settle()
        self._call_bytes = 0
        # Where the calls of the case before were slow, and this one was, another one would tell nothing new. If this one has loaded
        # code and is not slow, the first block of the measurement has one call instead of several.
        if self._slow and not self.guards and (took := self._now() - began) > SLOW_SECONDS:
            host, total = [took], [took]
        # One warm-up call is enough for all slots: ``shuffle`` calls each of them again before blocks of several calls.
        for slot in () if total else self._slots:
            peak = self._driver.watch_peak()
            before = self._now()
            self._call(slot)
            host.append(self._now() - before)
            self._settle()
            total.append(self._now() - before)
            self._call_bytes = max(self._call_bytes, peak())
            if total[0] > SLOW_SECONDS:
                break
        # Before each timed call the device waits until the host has enqueued the call: the events then enclose only
        # work of the device, not of Python. A call that reads back to the host still pays for that. The median, because
        # one interrupted call would make all of them wait.
        most = min(MAX_WAIT_US, 100.0 + 30.0 * len(self._rings) + 2e6 * statistics.median(host))
        self._wait_us = self._most_wait_us = self._later_wait_us = most
        self._short, self._slow = statistics.median(total) < SHORT_CALL_SECONDS, statistics.median(total) > SLOW_SECONDS
        self._freeze_autotuners(True)
        return {"call_seconds": statistics.median(total)}

    def _freeze_autotuners(self, frozen: bool) -> None:
        if self._autotuners is not None:
            self._autotuners.frozen = frozen

    @property
    def tuned(self) -> int:
        """How often an autotuner measured after the warm-up calls."""
        return self._autotuners.late if self._autotuners is not None else 0

    def _free(self) -> None:
        self._rings.free()
        self._drop_all_results()

    def release(self) -> dict[str, Any]:
        """Forget the inputs and release all memory, also torch's unused memory, for other processes."""
        self.close()
        self._call = None
        self._driver.give_back()
        return {}

    def clear(self) -> None:
        """Drop the slots, and free the driver's memory for them."""
        self._driver.sync()
        self._free()
        self._slots, self._slot_tensors, self._moved, self._filler = [], [], False, []

    def close(self) -> None:
        """Drop the slots, and free all of the driver's memory."""
        self.clear()
        if self._flush:
            self._driver.free(self._flush)
        self._flush = self._pool_bytes = 0

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the interpreter or the context may be gone
            self.close()

    def _allocate_slots(self, draws: list[dict[str, Any]], slots: int, turning: Mapping[str, Sequence[int]]) -> None:
        """Lay the draws end to end, empty their list, and make slots with the values of the first draw."""
        self._slots = []
        self._rings.lay(draws, turning)
        self._driver.sync()
        first = {name: TensorMetadata(value) if name in turning else value for name, value in draws[0].items()}
        draws.clear()
        for _ in range(slots):
            slot = dict(first)
            for name, value in first.items():
                if isinstance(value, TensorMetadata):
                    slot[name] = empty_strided(value.dtype, value.shape, value.strides, value.offset, value.span, self.device)
                    self._rings.load(name, TensorMetadata(slot[name]), (0, 0, 0))
                elif isinstance(value, torch.Tensor):
                    slot[name] = self._duplicate(value)
            self._slots.append(slot)
        self._driver.sync()

    def _record_slots(self) -> None:
        """Record the metadata and storages of the slots' tensors."""
        self._slot_tensors = [
            {k: (TensorMetadata(v), storage_of(v)) for k, v in slot.items() if isinstance(v, torch.Tensor)}
            for slot in self._slots
        ]

    def _duplicate(self, value: torch.Tensor) -> torch.Tensor:
        """Return a copy at another address with the same shape, strides and offset; copied in stream order."""
        new = allocate_like(value, self.device)
        self._driver.copy(TensorMetadata(new).pointer, (old := TensorMetadata(value)).pointer, old.size)
        return new

    def load(self, slot: int, windows: Window) -> None:
        """Copy values into a slot, in stream order.

        Tensors and storages stay the same: torch does not notice the change.

        Args:
            slot: Number of the slot.
            windows: Which values.
        """
        for name, window in windows.items():
            self._rings.load(name, self._slot_tensors[slot][name][0], window)

    def shuffle(self, seed: int, calls: bool = True) -> dict[str, Any]:
        """Move every input to a new address, so that the memory that a call allocates moves as well.

        The time of a kernel of a few microseconds depends by 1-2 % on the addresses of its buffers; only the average
        over several placements does not. Slots move within the pool of ``preallocate``, or of the first move where there was none.

        Args:
            seed: Of the addresses.
            calls: Call each slot once, so that the allocator has all the memory for timed calls.

        Returns:
            Nothing.
        """
        assert self._call is not None
        rng = random.Random(seed)
        self._drop_all_results()
        pool = pool_bytes(sum(t.size for tensors in self._slot_tensors for t, _ in tensors.values()))
        first, self._moved = not (self._moved or self._has_pool(pool)), True
        self._filler = []
        if first and pool <= MAX_POOL_BYTES:
            self._make_pool(pool)
        elif first:
            # Without a pool each slot moves to the memory of the slot that moved before it, and the first one to that of the slot
            # that moved last.
            self._driver.give_back()
            self._pool_bytes = 0
        # torch keeps small and large tensors in different pools.
        filler = [empty_bytes(rng.randrange(1, 64) << bits, self.device) for bits in (18, 13) for _ in range(FILLERS)]
        for i in rng.sample(range(len(self._slots)), len(self._slots)):
            slot = self._slots[i]
            moved = {name: self._duplicate(v) for name, v in slot.items() if isinstance(v, torch.Tensor)}
            self._driver.sync()
            slot.update(moved)
            self._slot_tensors[i], moved = {}, {}
            filler += [empty_bytes(rng.randrange(1, 64) << bits, self.device) for bits in (18, 13)]
        self._filler, filler = rng.sample([f for f in filler if TensorMetadata(f).size > 1 << 20] or filler, 1), []
        self._record_slots()
        self._driver.sync()
        if first and pool <= MAX_POOL_BYTES:
            has_pool = self.pooled
            self._driver.empty_cache()  # the memory in which the slots were before
            self._keep_pool(has_pool)
        for slot in self._slots if calls else ():
            self._call(slot)
        self._settle()
        return {}

    def _drop_all_results(self) -> None:
        self._drop_results()
        self._drop(self._graph_copies)
        self._graph_copies, self._graph_results, self._replay_graph = [], [], None

    def _drop_results(self) -> None:
        self._drop([copy for _, copy in self._results])
        self._results = []

    def _drop(self, copies: Sequence[ResultCopy]) -> None:
        for address in [a for copy in copies for a in copy.buffers if a]:
            self._driver.free(address)

    def _settle(self) -> None:
        self._driver.sync()
        self._driver.use_default_stream()

    # --- time ---------------------------------------------------------------------------------------------

    def measure(self, header: Mapping[str, Any]) -> dict[str, Any]:
        """Time a block of calls.

        Args:
            header: ``order``, the slot of each call; ``turns``, the values of an untimed first call and of each call in
                ``order``; ``warm``, false to leave out the untimed call; ``flush``, false to run the calls back to back,
                without values of their own.

        Returns:
            ``us``, the device microseconds of each call, or their total back to back, ``tuned``, and ``late``: the calls
            that the host had not enqueued when the device came to them. Their times contain the host's delay.
        """
        assert self._call is not None
        driver, call = self._driver, self._call
        order = [int(i) for i in header["order"]]
        turns: Sequence[Window] = header.get("turns") or [{}] * (len(order) + 1)
        events = [(driver.event(), driver.event()) for _ in order]
        driver.reset_persisting_l2()
        self._settle()
        self._drop_results()
        if not header.get("flush", True):
            return {"us": [self._back_to_back(order, *events[0])], "tuned": self.tuned, "late": []}
        if header.get("warm", True):
            # The instruction caches are cold after the other contestant's block: the first call is not timed.
            self.load(order[0], turns[0])
            call(self._slots[order[0]])
        origin, ready = driver.event(), [driver.event() for _ in order]
        set_switch_interval, usual = self._switch_interval
        host, enqueued = list[float](), list[float]()
        short = self._short
        waits = [self._wait_us] + [self._wait_us if short else self._later_wait_us] * (len(order) - 1)
        began = self._now()
        driver.record(origin)
        try:
            for k, ((start, end), i) in enumerate(zip(events, order, strict=True)):
                driver.use_default_stream()
                # The host enqueues while the device waits. The values and the flush come after the wait: work that runs
                # early, on another stream, reads the values of the call before.
                driver.wait(int(waits[k] * CYCLES_PER_US))
                driver.record(ready[k])
                before = self._now()
                self.load(i, turns[k + 1])
                driver.fill(self._flush, k, FLUSH_BYTES)
                driver.record(start)
                result = call(self._slots[i])
                set_switch_interval(SWITCH_SECONDS)
                driver.record(end)
                enqueued.append(self._now() - began)
                if self.guards:
                    self._keep_result(i, result)
                del result
                set_switch_interval(usual)
                host.append(self._now() - before)
                if short:
                    driver.sync()
        finally:
            set_switch_interval(usual)
        self._settle()
        # A call is in time if the host had enqueued it when the device came to it. The device came to ``origin`` after ``began``.
        reached = [driver.elapsed_us(origin, start) for start, _ in events]
        late = [k for k, (s, us) in enumerate(zip(enqueued, reached, strict=True)) if 1e6 * s > us]
        self._adapt_waits(host, min(driver.elapsed_us(one, start) for one, (start, _) in zip(ready, events, strict=True)))
        us = [driver.elapsed_us(start, end) for start, end in events]
        self._short = min(us) < WAIT_BELOW_US
        return {"us": us, "tuned": self.tuned, "late": late}

    def _back_to_back(self, order: Sequence[int], start: Any, end: Any) -> float:
        """Return the microseconds of calls that are enqueued one after the other."""
        assert self._call is not None
        self._drop_all_results()
        self._driver.record(start)
        for i in order:
            self._call(self._slots[i])
        self._driver.record(end)
        self._driver.sync()
        return self._driver.elapsed_us(start, end)

    def time_empty(self) -> dict[str, Any]:
        """Time an empty kernel as calls are timed: what the driver allots to a process makes all of its launches faster or slower.

        Measured once, because it does not change while the process lives. Calls have been timed or warmed up before.

        Returns:
            ``us``, the mean of the middle half in microseconds; ``None`` where a submission's thread could disturb it.
        """
        assert self._flush
        if self._launch_us is None:
            if self.guards and len(self._frames()) > 1:
                return {"us": None}
            enabled, disable, enable = self._collector
            collects = enabled()
            disable()  # a submission may have a function called at each collection
            try:
                us = sorted(self._empty_kernels())
            finally:
                if collects:
                    enable()
            middle = us[len(us) // 4 : len(us) - len(us) // 4]
            self._launch_us = sum(middle) / len(middle)
        return {"us": self._launch_us}

    def _empty_kernels(self) -> list[float]:
        """Return the microseconds of empty kernels, each after a flush as a short call."""
        driver = self._driver
        events = [(driver.event(), driver.event()) for _ in range(LAUNCHES)]
        for k, (start, end) in enumerate(events):
            self._settle()
            driver.wait(int(LAUNCH_WAIT_US * CYCLES_PER_US))
            driver.fill(self._flush, k, FLUSH_BYTES)
            driver.record(start)
            driver.wait(0)
            driver.record(end)
        driver.sync()
        return [driver.elapsed_us(start, end) for start, end in events]

    def _adapt_waits(self, host: Sequence[float], covered: float) -> None:
        """Set the waits of the next block: enqueueing may have become faster since the warm-up.

        A call that reads back takes at least the whole wait, which the bound keeps from growing.

        Args:
            host: the host's seconds for each call of a block.
            covered: microseconds for which the device at least loads values and flushes before a call, while the host goes on.
        """
        # One interrupted call is late and does not count; it makes no other wait.
        slowest = 1e6 * sorted(host)[-2 if len(host) > 2 else -1]
        self._wait_us = max(MIN_WAIT_US, min(self._most_wait_us, 100.0 + 2.0 * slowest) - covered)
        self._later_wait_us = max(MIN_WAIT_US, min(self._most_wait_us, LATER_WAIT * slowest) - covered)

    def _keep_result(self, slot: int, result: Any) -> None:
        """Copy a result in stream order and poison the original; work that runs after the end event is not in the copy.

        The original is freed as without the stopwatch: otherwise a later call would have to ask the driver for memory,
        and that would be timed.
        """
        self._results.append((slot, self._copy_of(slot, result)))

    def _copy_of(self, slot: int, result: Any) -> ResultCopy:
        copy = self._describe(slot, result)
        for value in copy.values:
            tensor = value if isinstance(value, TensorMetadata) else value[1] if isinstance(value, tuple) else None
            if tensor is None:
                copy.buffers.append(0)
                continue
            copy.buffers.append(self._driver.alloc(tensor.size))
            self._driver.copy(copy.buffers[-1], tensor.pointer, tensor.size)
        self._poison(slot, copy)
        return copy

    def _poison(self, slot: int, result: ResultCopy) -> None:
        """Overwrite the tensors of a result, except inputs, in case the submission returns them again."""
        inputs = {tensor.storage for tensor, _ in self._slot_tensors[slot].values()}
        for value in result.values:
            if isinstance(value, TensorMetadata) and value.dense and value.storage not in inputs:
                self._driver.fill(value.pointer, POISON, value.size)

    def _describe(self, slot: int, result: Any) -> ResultCopy:
        """Return the metadata of a result without buffers: its tensors, and the written arguments with their names."""
        is_tuple = isinstance(result, tuple | list)
        # A subclass may define an iterator of its own, which must not run here.
        each = tuple.__iter__ if isinstance(result, tuple) else list.__iter__
        values: list[Any] = [
            v if not is_plain_tensor(v, self.device) else TensorMetadata(v)
            for v in (each(result) if is_tuple else [result])
        ]
        outputs = [type(v).__name__ if not isinstance(v, TensorMetadata) else v for v in values]
        written = [(n, self._slot_tensors[slot][n][0]) for n in self._written if n in self._slot_tensors[slot]]
        return ResultCopy([*outputs, *written], is_tuple)

    # --- graphs -------------------------------------------------------------------------------------------

    def capture(self, order: Sequence[int]) -> dict[str, Any]:
        """Capture calls into a graph, whose replay needs no work of the host.

        Args:
            order: The slot of each call.

        Returns:
            ``captured``, false where the calls cannot be captured, for example because they read back to the host.
        """
        assert self._call is not None
        call = self._call
        results: list[tuple[int, Any]] = []
        each, has_pool = self._result_bytes(), self.pooled
        reserve = len(order) * each + max(0, self._call_bytes - each)  # calls use the same memory for what is no result
        if self._ample:  # the graph of the next case, whose calls are smaller and more, then fits into the same memory
            reserve = max(LEAST_AMPLE_GRAPH_RESERVE_BYTES, 1 << max(0, reserve - 1).bit_length())
        at_once = reserve <= (AMPLE_GRAPH_RESERVE_BYTES if self._ample else MAX_GRAPH_RESERVE_BYTES)
        self._drop_all_results()

        def body() -> None:
            for i in order:
                results.append((i, call(self._slots[i])))

        try:
            self._replay_graph = self._capture_graph(body, results, reserve if at_once else 0)
        except Exception:  # anything that a capture does not allow
            self._replay_graph = None
            with contextlib.suppress(Exception):  # the failed capture may leave an error that the next call reports
                self._driver.sync()
            self._settle()
            return {"captured": False}
        finally:
            self._keep_pool(has_pool)
        self._graph_results = results
        self._settle()
        return {"captured": True}

    def _capture_graph(self, body: Callable[[], None], results: list[tuple[int, Any]], reserve: int) -> Callable[[], None]:
        """Capture a graph; if its memory is not to be had at once, again, step by step.

        Args:
            body: Makes the calls, and adds their results to ``results``.
            results: Of the calls.
            reserve: Bytes that are asked for at once; 0 for none.

        Returns:
            As ``Driver.capture``.
        """
        try:
            return self._driver.capture(body, reserve)
        except RuntimeError as e:
            if not reserve or "out of memory" not in str(e).lower():
                raise
        # Not in the handler: the error's traceback keeps the graph that failed, and its memory.
        results.clear()
        self._settle()
        self._driver.trim_cache(0)
        return self._driver.capture(body)

    def _result_bytes(self) -> int:
        """Return the bytes that the new tensors of the last result take of torch's memory."""
        slot, copy = self._results[-1] if self._results else (0, ResultCopy([], False))
        inputs = {tensor.storage for tensor, _ in self._slot_tensors[slot].values()}
        new = [v for v in copy.values if isinstance(v, TensorMetadata) and v.storage not in inputs]
        return sum(-(-v.size // TORCH_ALIGN) * TORCH_ALIGN for v in new)

    def replay(self, times: int, turns: Mapping[str, Window] | None = None) -> dict[str, Any]:
        """Replay the captured graph.

        Args:
            times: How often, without ``turns``.
            turns: New values by slot. Then the graph is replayed once; its results are poisoned before and copied after
                it.

        Returns:
            Nothing.
        """
        assert self._replay_graph is not None
        self._settle()
        if turns is None:
            for _ in range(times):
                self._replay_graph()
            self._driver.sync()
            return {}
        for slot, windows in turns.items():
            self.load(int(slot), windows)
        for i, result in self._graph_results:
            self._poison(i, self._describe(i, result))
        self._replay_graph()
        self._graph_copies = [self._copy_of(i, result) for i, result in self._graph_results]
        self._driver.sync()
        return {}

    # --- results ------------------------------------------------------------------------------------------

    def result(self, call: int, captured: bool = False) -> Result:
        """Return the copy of a call's result.

        Args:
            call: Number of the call in the last block, or in the captured graph.
            captured: Whether it is a call of the graph, which was replayed on new values.

        Returns:
            The result, with the metadata of the inputs.
        """
        self._driver.sync()
        slot, copy = (self._graph_results[call][0], self._graph_copies[call]) if captured else self._results[call]
        outputs: list[str | tuple[TensorMetadata, int]] = []
        after = {}
        for value, address in zip(copy.values, copy.buffers, strict=True):
            if isinstance(value, tuple):
                after[value[0]] = value[1], address
            else:
                outputs.append((value, address) if isinstance(value, TensorMetadata) else value)
        return Result(outputs, after, {k: tensor for k, (tensor, _) in self._slot_tensors[slot].items()}, copy.is_tuple)
