"""Times calls on the device with events. Used on both sides: by the runner for the candidate, by the grader
for eager, so that the two numbers differ only in what was called."""

from __future__ import annotations

import ctypes
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

FLUSH_BYTES = 512 << 20
"""Written before every timed call: evicts L2 (60 MB on an H200)."""
CYCLES_PER_US = 2000
"""At least the SM clock in MHz: a wait of this many cycles lasts a microsecond or longer."""
MAX_WAIT_US = 5000.0
GRAPH_CALLS = 20
"""Calls captured into one graph."""
JUNK = 4
"""Buffers of random size that push the others to new addresses."""


class Stopwatch:
    """Holds the input slots of one timed case and the last result of each."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._flush: torch.Tensor | None = None
        self._call: Callable[[dict[str, Any]], Any] | None = None
        self._slots: list[dict[str, Any]] = []
        self._results: dict[int, Any] = {}
        self._wait_us = 100.0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._driver = ctypes.CDLL("libcuda.so.1") if device == "cuda" else None

    def prepare(self, call: Callable[[dict[str, Any]], Any], slots: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Take new inputs and warm up: compilation and autotuning happen here, outside every timed region."""
        self._call, self._slots, self._results, self._graph = call, list(slots), {}, None
        if self._flush is None:
            self._flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device=self.device)
        start = time.perf_counter()
        for i, slot in enumerate(self._slots):
            self._results[i] = call(slot)
        torch.cuda.synchronize()
        warm = time.perf_counter() - start
        # The device waits this long before each timed call, so that the host has enqueued the whole call by then:
        # what is timed is the device's work, not Python's. A call that reads back to the host still pays for it.
        host = []
        for i, slot in enumerate(self._slots):
            before = time.perf_counter()
            self._results[i] = call(slot)
            host.append(time.perf_counter() - before)
            torch.cuda.synchronize()
        self._wait_us = min(MAX_WAIT_US, 100.0 + 2e6 * max(host))
        return {"warm_seconds": warm}

    def shuffle(self, seed: int) -> dict[str, Any]:
        """Move every input to a new address and give cached memory back, so that outputs move too.

        A kernel of a few microseconds is faster or slower by 1-2 % for where its buffers happen to lie; only over
        several placements does that average out.
        """
        assert self._call is not None
        rng = random.Random(seed)
        self._graph = None
        self._results = {}
        torch.cuda.empty_cache()
        junk = [torch.empty(rng.randrange(1, 64) << 18, dtype=torch.uint8, device=self.device) for _ in range(JUNK)]
        for i in rng.sample(range(len(self._slots)), len(self._slots)):
            slot = self._slots[i]
            slot.update({name: _moved(v) for name, v in slot.items() if isinstance(v, torch.Tensor)})
            junk.append(torch.empty(rng.randrange(1, 64) << 18, dtype=torch.uint8, device=self.device))
        del junk
        torch.cuda.empty_cache()
        for i, slot in enumerate(self._slots):
            self._results[i] = self._call(slot)
        torch.cuda.synchronize()
        return {}

    def capture(self) -> dict[str, Any]:
        """Capture calls into a graph, whose replay costs the host nothing; ``captured`` is false where a call reads
        back to the host."""
        assert self._call is not None
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                for k in range(GRAPH_CALLS):
                    self._results[k % len(self._slots)] = self._call(self._slots[k % len(self._slots)])
        except Exception:  # whatever the capture does not allow
            self._graph = None
            torch.cuda.synchronize()
            return {"captured": False}
        self._graph = graph
        graph.replay()
        torch.cuda.synchronize()
        return {"captured": True}

    def replay(self, times: int) -> dict[str, Any]:
        """Run the captured graph."""
        assert self._graph is not None
        for _ in range(times):
            self._graph.replay()
        torch.cuda.synchronize()
        return {}

    def refill(self, slots: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """New values in the same storage, without a version bump that would give the moment away."""
        for old, new in zip(self._slots, slots, strict=False):
            for name, value in new.items():
                if isinstance(value, torch.Tensor):
                    with torch.autograd._unsafe_preserve_version_counter(old[name]):
                        old[name].copy_(value)
                else:
                    old[name] = value
        torch.cuda.synchronize()
        return {}

    def measure(self, header: Mapping[str, Any]) -> dict[str, Any]:
        """Time ``order`` (slot numbers), one call each; ``flush`` off runs them back to back.

        Returns device times in microseconds per call, or the total for back-to-back runs.
        """
        assert self._call is not None and self._flush is not None
        order = [int(i) for i in header["order"]]
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in order]
        if self._driver is not None:
            # Lines that a kernel asked to persist in L2 would survive the flush.
            self._driver.cuCtxResetPersistingL2Cache()
        torch.cuda.synchronize()
        if not header.get("flush", True):
            events[0][0].record()
            for i in order:
                self._results[i] = self._call(self._slots[i])
            events[0][1].record()
            torch.cuda.synchronize()
            return {"us": [events[0][0].elapsed_time(events[0][1]) * 1e3]}
        # The first call after the other side's turn finds cold instruction caches: it is not timed.
        self._call(self._slots[order[0]])
        for (start, end), i in zip(events, order, strict=True):
            self._flush.zero_()
            torch.cuda._sleep(int(self._wait_us * CYCLES_PER_US))
            start.record()
            self._results[i] = self._call(self._slots[i])
            end.record()
        torch.cuda.synchronize()
        return {"us": [start.elapsed_time(end) * 1e3 for start, end in events]}

    def result(self, slot: int) -> Any:
        """What the last timed call on this slot returned."""
        return self._results[slot]

    def tensors(self, slot: int) -> dict[str, torch.Tensor]:
        """The tensor arguments of a slot, as they are now."""
        return {k: v for k, v in self._slots[slot].items() if isinstance(v, torch.Tensor)}


def _moved(value: torch.Tensor) -> torch.Tensor:
    """A copy elsewhere with the same shape, strides and offset."""
    if not value.numel():
        return value.clone()
    span = 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
    offset = value.storage_offset()
    new = torch.empty(offset + span, dtype=value.dtype, device=value.device)
    new[offset:].copy_(value.as_strided((span,), (1,), offset))
    return new.as_strided(value.shape, value.stride(), offset)
