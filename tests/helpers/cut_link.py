"""A TCP proxy on loopback that can be cut: connections go silent, as on a cut cable, or are reset."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator


class Link:
    """One way to a server.

    Attributes:
        port: to connect to.
        bytes: that passed towards the client.
    """

    def __init__(self, host: str, port: int) -> None:
        self._to, self._cut, self.bytes = (host, port), False, 0
        self._loop = asyncio.new_event_loop()
        self._open: set[asyncio.StreamWriter] = set()
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), daemon=True)
        self._thread.start()
        assert ready.wait(10)

    def cut(self, reset: bool = False) -> None:
        """Cut: nothing passes any more. With ``reset``, open connections break at once; new ones go silent either way."""
        self._cut = True
        if reset:
            self._loop.call_soon_threadsafe(self._reset)

    def mend(self) -> None:
        """Let new connections pass again; those from before the cut are reset."""
        self._loop.call_soon_threadsafe(self._reset)
        self._cut = False

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    def _reset(self) -> None:
        for writer in list(self._open):
            writer.transport.abort()

    def _run(self, ready: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        ready.set()
        self._loop.run_forever()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            while self._cut:
                await asyncio.sleep(0.05)
            there, back = await asyncio.open_connection(*self._to)
            self._open.add(back)
            await asyncio.gather(self._pump(reader, back), self._pump(there, writer, count=True))
        except OSError:
            writer.transport.abort()
        finally:
            self._open.discard(writer)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, count: bool = False) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                while self._cut:  # what is on the way is lost with its connection
                    await asyncio.sleep(0.05)
                writer.write(data)
                await writer.drain()
                self.bytes += len(data) if count else 0
        with contextlib.suppress(OSError, RuntimeError):
            writer.close()


@contextlib.contextmanager
def link(url: str) -> Iterator[Link]:
    """Open a link to the server of a URL, and close it at the end of the block."""
    host, port = url.removeprefix("http://").rsplit(":", 1)
    made = Link(host, int(port))
    try:
        yield made
    finally:
        made.close()
