"""The gate before the service: token, host, size and time of a request's body. Works on ASGI messages, before any parsing."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import json
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from kbx_env.service.limits import Limits

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

OPEN = frozenset({"/", "/healthz", "/readyz", "/docs", "/openapi.json"})
"""Paths that need no token: they tell nothing about gradings. The live page asks for the token itself."""
_LINGER_SECONDS, _LINGER_BYTES = 2.0, 8 << 20
"""After a refusal the body is read for so long, so that the client reads the answer before its connection is reset."""


class Guard:
    """An ASGI application around another one.

    It refuses a request without the token (401), for a foreign host (421; only without a token, against web pages that
    resolve their name to loopback), with a body that is too large (413) or too slow (408). The inner application gets the
    whole body in one message.
    """

    def __init__(self, app: App, token: str | None, limits: Limits, count: Callable[[int], None]) -> None:
        """Wrap an application.

        Args:
            app: the inner application.
            token: bearer token; ``None`` for none.
            limits: of bodies.
            count: called with the status of every response.
        """
        self._app, self._limits, self._count = app, limits, count
        # Digests of equal length: a comparison in constant time that does not tell the length either.
        self._token = None if token is None else _digest(token.encode())

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._count(message["status"])
            await send(message)

        headers = {name.lower(): value for name, value in scope["headers"]}
        refusal = self._refusal(scope["path"], headers)
        body = b""
        if refusal is None:
            try:
                async with asyncio.timeout(self._limits.body_seconds):
                    found = await self._body(headers, receive)
            except TimeoutError:
                refusal = (408, f"the body did not arrive within {self._limits.body_seconds:g} s", {})
            else:
                if found is None:
                    refusal = (413, f"the body is larger than {self._limits.body} bytes; send less at a time", {})
                else:
                    body = found
        if refusal is not None:
            await _refuse(refusal, receive, counted)
            return
        sent = False

        async def whole() -> Message:
            nonlocal sent
            if sent:
                return await receive()
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, whole, counted)

    def _refusal(self, path: str, headers: dict[bytes, bytes]) -> tuple[int, str, dict[str, str]] | None:
        if self._token is None:
            host = headers.get(b"host", b"").decode("latin-1")
            if not is_loopback_name(host):
                return 421, f"host {host[:80]!r} is not this service; without a token it answers on loopback names only", {}
            return None
        if path in OPEN:
            return None
        kind, _, given = headers.get(b"authorization", b"").partition(b" ")
        if kind.lower() == b"bearer" and hmac.compare_digest(_digest(given.strip()), self._token):
            return None
        return 401, "a valid bearer token is needed: Authorization: Bearer TOKEN", {"WWW-Authenticate": "Bearer"}

    async def _body(self, headers: dict[bytes, bytes], receive: Receive) -> bytes | None:
        """Return the body; ``None`` if it is too large, which its header may say already."""
        try:
            declared = int(headers.get(b"content-length", b"0"))
        except ValueError:
            declared = 0
        if declared > self._limits.body:
            return None
        parts, size, more = list[bytes](), 0, True
        while more:
            message = await receive()
            if message["type"] != "http.request":  # disconnected
                break
            parts.append(message.get("body", b""))
            size, more = size + len(parts[-1]), bool(message.get("more_body"))
            if size > self._limits.body:
                return None
        return b"".join(parts)


async def _refuse(refusal: tuple[int, str, dict[str, str]], receive: Receive, send: Send) -> None:
    status, text, extra = refusal
    body = json.dumps({"detail": text}).encode()
    named = {"Content-Type": "application/json", "Content-Length": str(len(body)), "Connection": "close", **extra}
    headers = [(k.lower().encode(), v.encode()) for k, v in named.items()]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": True})
    await _linger(receive)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _linger(receive: Receive) -> None:
    """Throw away what still arrives, for a moment."""
    until, size = time.monotonic() + _LINGER_SECONDS, 0
    try:
        while size < _LINGER_BYTES and (left := until - time.monotonic()) > 0:
            async with asyncio.timeout(left):
                message = await receive()
            size += len(message.get("body", b""))
            if message["type"] != "http.request" or not message.get("more_body"):
                return
    except TimeoutError:
        pass


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def is_loopback_name(host: str) -> bool:
    """Return whether a Host header names this machine itself.

    Args:
        host: such as ``localhost:8300``, ``127.0.0.1`` or ``[::1]:8300``.

    Returns:
        Whether it does.
    """
    name = host.strip()
    name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
    if name.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
