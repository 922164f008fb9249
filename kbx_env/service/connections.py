"""Connections of the service: uvicorn's HTTP protocol, with limits on their number and on the time without a request."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol

from kbx_env.service.limits import Limits


class Connections:
    """All connections of one service.

    Attributes:
        limits: of connections.
        idle: connections without a request, the one that has been so longest first.
        evicted: number of connections that were closed to make room.
    """

    def __init__(self, limits: Limits) -> None:
        """Make an empty set.

        Args:
            limits: of connections.
        """
        self.limits, self.evicted = limits, 0
        self.idle: dict[LimitedProtocol, None] = {}

    def protocol(self) -> type[LimitedProtocol]:
        """Return a protocol class for uvicorn whose connections belong to this set."""
        return type("LimitedProtocol", (LimitedProtocol,), {"shared": self})


class LimitedProtocol(H11Protocol):
    """One connection.

    The header of a request must be complete ``header_seconds`` after the connection was made, or after the first byte of a
    later request. At ``connections`` connections a new one takes the place of the one that has been without a request
    longest: sockets that are only held open, or whose requests are refused, keep nobody out. If each has a request, the
    new one is closed.
    """

    shared: ClassVar[Connections]

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Admit the connection, perhaps in the place of another one."""
        shared = self.shared
        if len(self.connections) >= shared.limits.connections:
            shared.evicted += 1
            oldest = next(iter(shared.idle), None)
            if oldest is None:
                transport.abort()
            else:
                oldest.drop()
        super().connection_made(transport)
        shared.idle[self] = None
        self._expect_header()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._unset_deadline()
        self.shared.idle.pop(self, None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what arrived; a whole header begins a request."""
        super().data_received(data)
        if self._busy:
            self._unset_deadline()
            self.shared.idle.pop(self, None)
        elif self._deadline is None:
            self._expect_header()

    def on_response_complete(self) -> None:
        """Note that the connection is without a request, unless the next one has arrived."""
        super().on_response_complete()
        if not self._busy and not self.transport.is_closing():
            self.shared.idle[self] = None

    def drop(self) -> None:
        """Close the connection at once."""
        self.shared.idle.pop(self, None)
        self.connections.discard(self)
        if not self.transport.is_closing():
            self.transport.abort()

    @property
    def _busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _expect_header(self) -> None:
        self._unset_deadline()
        self._deadline = self.loop.call_later(self.shared.limits.header_seconds, self._late)

    def _late(self) -> None:
        self._deadline = None
        if not self._busy:
            self.drop()

    def _unset_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
