"""The server of the grading service: uvicorn around the application, its socket, and its signals."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
import threading
from collections.abc import Iterator

import uvicorn

from kbx_env.errors import UsageError
from kbx_env.executor.pools.process import WorkerPool
from kbx_env.service.app import create_app
from kbx_env.service.guard import Guard
from kbx_env.service.service import Service, Settings, read_token, say

_BACKLOG = 4096
"""Connections that the kernel keeps until they are accepted; more of them would have to knock again, after 1, 3 and 7 s."""
_ACCEPTED = 32
"""Connections that asyncio accepts before it turns to the requests of the others. asyncio has one number for both."""


class Server(uvicorn.Server):
    """uvicorn's server, which begins to drain at the first signal and ends with status 0."""

    def __init__(self, settings: Settings, listener: socket.socket, pool: WorkerPool | None = None) -> None:
        """Make the service and its server.

        Args:
            settings: of the command line.
            listener: the bound socket.
            pool: replaces the workers, in tests and benchmarks.

        Raises:
            UsageError: a setting is not accepted.
        """
        self.service = service = Service(settings, pool)
        host, port = listener.getsockname()[:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        app = Guard(create_app(service), service.token, service.limits, service.metrics.count_response)  # type: ignore[arg-type]
        super().__init__(uvicorn.Config(
            app, http=service.connections.protocol(), ws="none", lifespan="on", loop="asyncio", access_log=False,
            log_level="error", server_header=False, timeout_keep_alive=int(service.limits.idle_seconds),
            timeout_graceful_shutdown=5, backlog=_ACCEPTED,
        ))  # fmt: skip

    def end(self) -> None:
        """Begin to end: answer all that wait, and let running gradings end. Called in the loop's thread."""
        self.service.begin_draining()
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say where."""
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(_BACKLOG)
        s = self.service
        again = f", {s.recovered} requests taken up again" if s.recovered else ""
        token = "with a token" if s.token else "without a token"
        say(f"listening on {self.url} ({token}); backend {s.backend}, {s._pool.width} workers, {s.settings.store}{again}")

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Drain at the first signal; at the second one, running gradings are not waited for."""
        loop = asyncio.get_running_loop()
        main = threading.current_thread() is threading.main_thread()

        def on_signal(name: str) -> None:
            if self.should_exit:
                say(f"{name} again: running gradings are not waited for")
                self.service.patient = False
            else:
                say(f"{name}: running gradings end, waiting ones stay in the queue; send it again to end at once")
                self.end()

        signals = (signal.SIGTERM, signal.SIGINT) if main else ()
        for sig in signals:
            loop.add_signal_handler(sig, on_signal, sig.name)
        try:
            yield
        finally:
            for sig in signals:
                loop.remove_signal_handler(sig)


def listen(host: str, port: int) -> socket.socket:
    """Bind a socket.

    Args:
        host: address.
        port: 0 for any free one.

    Returns:
        The socket.

    Raises:
        UsageError: the address is in use, or not of this machine.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        # With the protocol named, asyncio switches Nagle's algorithm off; it would delay every answer by 40 ms.
        found = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
    except (OSError, OverflowError) as e:
        raise UsageError(f"cannot listen on {host}:{port} ({e}); choose another --host or --port") from e
    return found


def serve(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        settings: of the command line.

    Raises:
        UsageError: a setting is not accepted, or the port is in use.
    """
    read_token(settings)
    listener = listen(settings.host, settings.port)
    with contextlib.closing(listener):
        say("loading the tasks and starting the workers")
        server = Server(settings, listener)
        # The tasks and libraries stay to the end: a full collection over them would stop all requests for 140 ms.
        gc.collect()
        gc.freeze()
        server.run(sockets=[listener])
