"""Turns what the client libraries raise into one kind of failure, and says whether asking again may help."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

from kbx_env.baselines.llm.chat import CallFailed

from kbx_env.errors import KbxError

_KINDS = {
    400: "bad_request", 401: "key", 402: "payment", 403: "key", 404: "not_found", 408: "timeout", 413: "too_long",
    422: "bad_request", 429: "rate_limit", 529: "overloaded",
}  # fmt: skip
_AGAIN = {408, 409, 425, 429}
_HOPELESS = {401, 402, 403, 404}
_BROKEN = (ValueError, TypeError, AttributeError, AssertionError, LookupError)
_LONG = 300.0
"""Seconds; a server that asks for more patience than this is asked again sooner."""


@contextlib.contextmanager
def failed() -> Iterator[None]:
    """Raises ``CallFailed`` for whatever goes wrong inside; the project's own errors pass."""
    try:
        yield
    except KbxError:
        raise
    except Exception as e:
        raise _translated(e) from e


def _translated(e: Exception) -> CallFailed:
    status = getattr(e, "status_code", None)
    text = f"{type(e).__name__}: {e}"[:2000]
    # Both libraries derive these from a base of this name each; the classes themselves are not imported before they are needed.
    names = {c.__name__ for c in type(e).__mro__}
    if isinstance(status, int) and "APIStatusError" in names and status >= 400:
        kind = _KINDS.get(status, "server_error" if status >= 500 else "bad_request")
        return CallFailed(
            kind, f"HTTP {status}: {text}", again=status in _AGAIN or status >= 500, after=_after(e), hopeless=status in _HOPELESS
        )
    if "overloaded" in text.lower() and "APIError" in names:  # told in the middle of a stream, with status 200
        return CallFailed("overloaded", text, again=True)
    if "APITimeoutError" in names or "TimeoutException" in names:
        return CallFailed("timeout", text, again=True)
    if names & {"APIConnectionError", "TransportError", "ConnectionError", "ProtocolError"}:
        return CallFailed("connection", f"{text} ({e.__cause__})" if e.__cause__ else text, again=True)
    if isinstance(e, json.JSONDecodeError | UnicodeDecodeError) or names & {"APIResponseValidationError", "APIError"}:
        return CallFailed("invalid", text, again=True)
    # What is left comes from a server that breaks its own protocol, in ways that the library did not foresee.
    return CallFailed("invalid", text, again=isinstance(e, _BROKEN))


def _after(e: Any) -> float | None:
    headers = getattr(getattr(e, "response", None), "headers", None) or {}
    try:
        if "retry-after-ms" in headers:
            seconds = float(headers["retry-after-ms"]) / 1000
        else:
            seconds = float(headers["retry-after"])
    except (KeyError, ValueError):
        return None
    return min(seconds, _LONG) if seconds >= 0 else None
