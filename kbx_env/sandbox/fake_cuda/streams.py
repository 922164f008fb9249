"""Streams, events and device guards of the stand-in GPU. Work is done in the order in which it was asked for."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import torch

_numbers = itertools.count(1)


class Stream:
    """A stream that does its work at once, which is a valid order for any synchronisation."""

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        self.device, self.priority = torch.device("cuda", 0), priority
        self.device_index, self.device_type = 0, 1
        self.stream_id = self.cuda_stream = next(_numbers)
        self._outer: list[Stream] = []

    def synchronize(self) -> None:
        """Do nothing: no work is ever pending."""

    def wait_stream(self, stream: Any) -> None:
        """Do nothing: no work is ever pending."""

    def wait_event(self, event: Any) -> None:
        """Do nothing: no work is ever pending."""

    def record_event(self, event: Event | None = None) -> Event:
        """Return the event, or a new one; it has already happened."""
        return event if event is not None else Event()

    def query(self) -> bool:
        """Return true: all work is done."""
        return True

    def __enter__(self) -> Stream:
        self._outer.append(_current[0])
        _current[0] = self
        return self

    def __exit__(self, *exc: Any) -> None:
        _current[0] = self._outer.pop()


class ExternalStream(Stream):
    """A stream made outside torch, such as the default stream."""

    def __init__(self, stream_ptr: int, device: Any = None, **kwargs: Any) -> None:
        super().__init__(device)
        self.stream_id = self.cuda_stream = stream_ptr


class Event:
    """An event that has always happened."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, **kwargs: Any) -> None:
        self.device, self.cuda_event, self.enable_timing = torch.device("cuda", 0), next(_numbers), enable_timing

    def record(self, stream: Any = None) -> None:
        """Do nothing: the event has already happened."""

    def wait(self, stream: Any = None) -> None:
        """Do nothing: the event has already happened."""

    def query(self) -> bool:
        """Return true: the event has already happened."""
        return True

    def synchronize(self) -> None:
        """Do nothing: the event has already happened."""

    def elapsed_time(self, end_event: Any) -> float:
        """Return one millisecond for any interval: nothing can be timed here."""
        return 1.0


class Guard(contextlib.AbstractContextManager["Guard"]):
    """Replaces ``torch.cuda.device`` and similar guards: the one device stays the current one."""

    def __init__(self, device: Any = None) -> None:
        self.idx = self.prev_idx = 0

    def __exit__(self, *exc: Any) -> None:
        return None


DEFAULT = ExternalStream(0)
_current: list[Stream] = [DEFAULT]


def current(device: Any = None) -> Stream:
    """Return the current stream."""
    return _current[0]


def choose(stream: Stream | None) -> None:
    """Set the current stream, as ``torch.cuda.set_stream`` does; ``None`` changes nothing."""
    if stream is not None:
        _current[0] = stream


def within(stream: Stream | None) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which a stream is current, as ``torch.cuda.stream`` does."""
    return contextlib.nullcontext() if stream is None else stream
