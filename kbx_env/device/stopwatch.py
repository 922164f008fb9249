"""Times calls on the device with events. Used on both sides: by the runner for the candidate, by the grader
for eager, so that the two numbers differ only in what was called.

In the runner it lives beside the submission. It holds what it needs from before the submission was loaded, gives every timed
call values that no earlier call has seen, and keeps a call's result as it is when the end event happens.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from kbx_env.device.autotuners import Autotuners
from kbx_env.device.driver import Driver, Kept, Seen, again, blank, is_plain, like
from kbx_env.device.input_windows import DeviceWindows, Window
from kbx_env.device.ipc_runner import Result

FLUSH_BYTES = 512 << 20
"""Written before every timed call: evicts L2 (60 MB on an H200)."""
CYCLES_PER_US = 2000
"""At least the SM clock in MHz: a wait of this many cycles lasts a microsecond or longer."""
MAX_WAIT_US = 5000.0
SLOW_SECONDS = 0.01
"""A call that takes longer says all there is to say on one slot; the others would keep everybody waiting."""
JUNK = 4
"""Buffers of random size that push the others to new addresses."""
YARD, JUNK_BYTES, YARD_BYTES = 3, 128 << 20, 4 << 30
"""Times the slots' bytes, with room for junk, and at most, that torch has at hand to move them about in."""
POISON = 0xFF
"""Every byte of a result that was looked at: NaN, -1. Who returns it again returns this."""
ALONE = 5.0
"""Seconds that another thread must wait for the interpreter while a result is being kept."""


class Stopwatch:
    """Holds the input slots of one timed case and the last result of each.

    Args:
        device: where it times.
        tools: the device's; another one in tests.
        guards: keep results, spoil them after that, watch autotuners: beside a submission.
    """

    def __init__(self, device: str, tools: Driver | None = None, *, guards: bool = False) -> None:
        self.device, self.guards = device, guards
        self._tools = tools or Driver()
        self._flush = 0
        self._call: Callable[[dict[str, Any]], Any] | None = None
        self._slots: list[dict[str, Any]] = []
        # By slot and tensor: what it is, and a hold on its memory that no ``set_`` of a call loosens.
        self._homes: list[dict[str, tuple[Seen, Any]]] = []
        self._kept: list[tuple[int, Kept]] = []  # slot and result of every call of the last block
        self._written: tuple[str, ...] = ()
        self._rings = DeviceWindows(self._tools)
        self._spare: list[tuple[int, int]] = []
        self._wait_us = self._most_wait_us = 100.0
        self._yard = False
        # Junk that stays between two moves: results move too, and the yard is never quite empty, which would end it.
        self._stake: list[torch.Tensor] = []
        self._play: Callable[[], None] | None = None
        self._captured: list[Kept] = []
        self._replayed: list[tuple[int, Any]] = []  # slot and result of every captured call
        self._now, self._patience = time.perf_counter, (sys.setswitchinterval, sys.getswitchinterval())
        self._tuners = Autotuners() if guards else None

    # --- inputs -------------------------------------------------------------------------------------------

    def prepare(
        self, call: Callable[[dict[str, Any]], Any], draws: Sequence[dict[str, Any]], *, slots: int = 0,
        turning: Mapping[str, Sequence[int]] | None = None, written: Sequence[str] = (), warm: bool = True,
    ) -> dict[str, Any]:  # fmt: skip
        """Take new inputs and ``warm`` up.

        Args:
            call: what is timed, on one slot.
            draws: values. Without ``turning`` each is a slot; with it the tensors named there are laid end to end in rings.
            slots: sets of buffers, where there are rings.
            turning: by tensor that changes from call to call, the sizes of its matrices, or two zeros.
            written: tensors that a call changes in place; their values are part of the result.
            warm: otherwise that is still to come.
        """
        self._free()
        self._freeze(False)
        self._call, self._written, self._yard, self._stake = call, tuple(written), False, []
        self._slots = list(draws)
        if turning is not None:
            self._lay(draws, slots, turning)
        self._settled_down()
        if not self._flush:
            self._flush = self._tools.alloc(FLUSH_BYTES)
        return self.warm() if warm else {}

    def dry(self) -> dict[str, Any]:
        """One call in which nothing is launched, as the caller has seen to: it compiles."""
        assert self._call is not None
        with contextlib.suppress(Exception):  # host code may stumble over what no kernel wrote
            self._call(self._slots[0])
        return {}

    def warm(self) -> dict[str, Any]:
        """The first calls: autotuning happens here, outside every timed region. Gives the seconds of one call."""
        assert self._call is not None
        host, whole = list[float](), list[float]()
        for slots in (self._slots[:1], self._slots[1:]):
            if whole and whole[0] > SLOW_SECONDS:
                break
            for slot in slots:
                self._call(slot)
            self._settle()
            # The device waits so long before each timed call that the host has enqueued it by then: what is timed is the
            # device's work, not Python's. A call that reads back to the host still pays for it.
            for slot in slots:
                before = self._now()
                self._call(slot)
                host.append(self._now() - before)
                self._settle()
                whole.append(self._now() - before)
        # The middle one: a call that the host was interrupted in would make all of them wait.
        most = min(MAX_WAIT_US, 100.0 + 30.0 * len(self._rings) + 2e6 * statistics.median(host))
        self._wait_us = self._most_wait_us = most
        self._freeze(True)
        return {"call_seconds": max(whole)}

    def _freeze(self, frozen: bool) -> None:
        if self._tuners is not None:
            self._tuners.frozen = frozen

    @property
    def tuned(self) -> int:
        """Times that an autotuner measured after it should have been done with that."""
        return self._tuners.late if self._tuners is not None else 0

    def _free(self) -> None:
        self._rings.free()
        self._drop()
        for address in {a for a, _ in self._spare if a}:
            self._tools.free(address)
        self._spare = []

    def release(self) -> dict[str, Any]:
        """Forget the inputs and give all memory back, torch's included: somebody else may need it."""
        self.close()
        self._call = None
        self._tools.empty_cache()
        return {}

    def close(self) -> None:
        """Give the driver's memory back; torch's goes with the slots."""
        self._tools.sync()
        self._free()
        if self._flush:
            self._tools.free(self._flush)
        self._flush, self._slots, self._homes, self._yard, self._stake = 0, [], [], False, []

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the interpreter or the context may be gone
            self.close()

    def _lay(self, draws: Sequence[dict[str, Any]], slots: int, turning: Mapping[str, Sequence[int]]) -> None:
        self._rings.lay(draws, turning)
        self._slots = []
        for _ in range(slots):
            self._slots.append({k: self._moved(v) if isinstance(v, torch.Tensor) else v for k, v in draws[0].items()})
        self._tools.sync()

    def _settled_down(self) -> None:
        self._homes = [
            {k: (Seen(v), again(v)) for k, v in slot.items() if isinstance(v, torch.Tensor)} for slot in self._slots
        ]

    def _moved(self, value: torch.Tensor) -> torch.Tensor:
        """A copy elsewhere with the same shape, strides and offset."""
        new = like(value, self.device)
        self._tools.copy(Seen(new).pointer, (old := Seen(value)).pointer, old.size)
        return new

    def load(self, slot: int, turn: Window) -> None:
        """Give a slot the values of a turn, in stream order and in the same storage: on the device nothing but a copy,
        for torch nothing at all."""
        for name, window in turn.items():
            self._rings.load(name, self._homes[slot][name][0], window)

    def shuffle(self, seed: int, calls: bool = True) -> dict[str, Any]:
        """Move every input to a new address, and so what a call allocates.

        With ``calls`` each slot is called once, so that the allocator has all it needs when the clock runs.

        A kernel of a few microseconds is faster or slower by 1-2 % for where its buffers happen to lie; only over several
        placements does that average out. The driver is asked rarely: where processes start up, each request takes milliseconds.
        """
        assert self._call is not None
        rng = random.Random(seed)
        self._drop()
        room = YARD * sum(seen.size for homes in self._homes for seen, _ in homes.values()) + JUNK_BYTES
        first, self._yard = not self._yard, True
        self._stake = []
        if first:
            self._tools.empty_cache()
            with contextlib.suppress(RuntimeError):  # out of memory: then without
                # Stays torch's, for later. Large ones have no yard: each moves to where the one before it lay, the first to
                # the place that the last left.
                blank(room if room <= YARD_BYTES else 0, self.device)
        # Small tensors lie in another part of torch's memory than large ones.
        junk = [blank(rng.randrange(1, 64) << bits, self.device) for bits in (18, 13) for _ in range(JUNK)]
        for i in rng.sample(range(len(self._slots)), len(self._slots)):
            slot = self._slots[i]
            moved = {name: self._moved(v) for name, v in slot.items() if isinstance(v, torch.Tensor)}
            self._tools.sync()
            slot.update(moved)
            self._homes[i], moved = {}, {}
            junk += [blank(rng.randrange(1, 64) << bits, self.device) for bits in (18, 13)]
        self._stake, junk = rng.sample([j for j in junk if Seen(j).size > 1 << 20] or junk, 1), []
        self._settled_down()
        self._tools.sync()
        if first and room <= YARD_BYTES:
            self._tools.empty_cache()  # where they lay before
        for slot in self._slots if calls else ():
            self._call(slot)
        self._settle()
        return {}

    def _drop(self) -> None:
        self._drop_block()
        self._spare += [at for kept in self._captured for at in kept.at]
        self._captured, self._replayed, self._play = [], [], None

    def _drop_block(self) -> None:
        self._spare += [at for _, kept in self._kept for at in kept.at]
        self._kept = []

    def _settle(self) -> None:
        self._tools.sync()
        self._tools.main_stream()

    # --- time ---------------------------------------------------------------------------------------------

    def measure(self, header: Mapping[str, Any]) -> dict[str, Any]:
        """Time ``order`` (slot numbers), one call each; ``flush`` off runs them back to back.

        ``turns`` are the values of the calls: of the untimed first one, then of each in ``order``. Returns device times in
        microseconds per call, or the total for back-to-back runs.
        """
        assert self._call is not None
        tools, call = self._tools, self._call
        order = [int(i) for i in header["order"]]
        turns: Sequence[Window] = header.get("turns") or [{}] * (len(order) + 1)
        events = [(tools.event(), tools.event()) for _ in order]
        tools.forget_lines()
        self._settle()
        self._drop_block()
        if not header.get("flush", True):
            self._drop()
            tools.record(events[0][0])
            for i in order:
                call(self._slots[i])
            tools.record(events[0][1])
            tools.sync()
            return {"us": [tools.elapsed_us(*events[0])], "tuned": self.tuned}
        # The first call after the other side's turn finds cold instruction caches: it is not timed.
        self.load(order[0], turns[0])
        call(self._slots[order[0]])
        patient, usual = self._patience
        host = list[float]()
        try:
            for k, ((start, end), i) in enumerate(zip(events, order, strict=True)):
                tools.main_stream()
                # While the device waits the host enqueues. Then come the values and the flush: what runs early, on another
                # stream, finds the values of before.
                tools.wait(int(self._wait_us * CYCLES_PER_US))
                before = self._now()
                self.load(i, turns[k + 1])
                tools.fill(self._flush, k, FLUSH_BYTES)
                tools.record(start)
                result = call(self._slots[i])
                patient(ALONE)
                tools.record(end)
                if self.guards:
                    self._keep(i, result)
                del result
                patient(usual)
                host.append(self._now() - before)
        finally:
            patient(usual)
        self._settle()
        # Enqueueing may have become faster since the first calls. A call that reads back takes all of the wait and more.
        self._wait_us = min(self._most_wait_us, 100.0 + 2e6 * max(host))
        return {"us": [tools.elapsed_us(start, end) for start, end in events], "tuned": self.tuned}

    def _keep(self, slot: int, result: Any) -> None:
        """Copy a result in stream order: work that was not done by the end event is not in it. Then spoil the original, and
        let it go as it would without us: a later call that had to ask the driver for memory would be timed doing so."""
        self._kept.append((slot, self._copied(slot, result)))

    def _copied(self, slot: int, result: Any) -> Kept:
        kept = self._seen(slot, result)
        for value in kept.values:
            seen = value if isinstance(value, Seen) else value[1] if isinstance(value, tuple) else None
            if seen is None:
                kept.at.append((0, 0))
                continue
            kept.at.append(self._room(seen.size))
            self._tools.copy(kept.at[-1][0], seen.pointer, seen.size)
        self._spoil(slot, kept)
        return kept

    def _spoil(self, slot: int, result: Kept) -> None:
        """What a call returned is the caller's: who keeps it to return it again keeps this."""
        homes = {seen.home for seen, _ in self._homes[slot].values()}
        for value in result.values:
            if isinstance(value, Seen) and value.dense and value.home not in homes:
                self._tools.fill(value.pointer, POISON, value.size)

    def _seen(self, slot: int, result: Any) -> Kept:
        """A result's tensors, and the written arguments as pairs of name and metadata."""
        is_tuple = isinstance(result, tuple | list)
        # A subclass may bring an iterator of its own, which runs when it is asked.
        each = tuple.__iter__ if isinstance(result, tuple) else list.__iter__
        values: list[Any] = [
            v if not is_plain(v, self.device) else Seen(v) for v in (each(result) if is_tuple else [result])
        ]
        names = [type(v).__name__ if not isinstance(v, Seen) else v for v in values]
        written = [(n, self._homes[slot][n][0]) for n in self._written if n in self._homes[slot]]
        return Kept([*names, *written], is_tuple)

    def _room(self, size: int) -> tuple[int, int]:
        """Memory for a copy; what an earlier copy needed serves again."""
        fits = [s for s in self._spare if s[0] and s[1] >= size]
        if fits:
            best = min(fits, key=lambda s: s[1])
            self._spare.remove(best)
            return best
        return self._tools.alloc(size), size

    # --- graphs -------------------------------------------------------------------------------------------

    def capture(self, order: Sequence[int]) -> dict[str, Any]:
        """Capture a call on each slot of ``order`` into a graph, whose replay costs the host nothing; ``captured`` is false
        where a call reads back to the host."""
        assert self._call is not None
        call = self._call
        results: list[tuple[int, Any]] = []
        self._drop()

        def body() -> None:
            for i in order:
                results.append((i, call(self._slots[i])))

        try:
            self._play = self._tools.capture(body)
        except Exception:  # whatever the capture does not allow
            self._play = None
            with contextlib.suppress(Exception):  # an error that the failed capture left behind is told once
                self._tools.sync()
            self._settle()
            return {"captured": False}
        self._replayed = results
        self._play()
        self._settle()
        return {"captured": True}

    def replay(self, times: int, turns: Mapping[str, Window] | None = None) -> dict[str, Any]:
        """Run the captured graph. With ``turns`` (values by slot) once: on values that it has not seen, its results spoilt
        before and kept after it."""
        assert self._play is not None
        self._settle()
        if turns is None:
            for _ in range(times):
                self._play()
            self._tools.sync()
            return {}
        for slot, turn in turns.items():
            self.load(int(slot), turn)
        for i, result in self._replayed:
            self._spoil(i, self._seen(i, result))
        self._play()
        self._captured = [self._copied(i, result) for i, result in self._replayed]
        self._tools.sync()
        return {}

    # --- results ------------------------------------------------------------------------------------------

    def result(self, call: int, captured: bool = False) -> Result:
        """What a call returned, by its number in the last block, or among those ``captured`` and replayed."""
        self._tools.sync()
        slot, kept = (self._replayed[call][0], self._captured[call]) if captured else self._kept[call]
        outputs: list[str | tuple[Seen, int]] = []
        after = {}
        for value, (address, _) in zip(kept.values, kept.at, strict=True):
            if isinstance(value, tuple):
                after[value[0]] = value[1], address
            else:
                outputs.append((value, address) if isinstance(value, Seen) else value)
        return Result(outputs, after, {k: seen for k, (seen, _) in self._homes[slot].items()}, kept.is_tuple)
