"""Translates the exceptions of the client libraries into ``CallFailed``, with whether another attempt may succeed."""

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
"""HTTP status -> kind of failure; 529 is Anthropic's own."""
_RETRYABLE = {408, 409, 425, 429}
_FATAL = {401, 402, 403, 404}
_BROKEN = (ValueError, TypeError, AttributeError, AssertionError, LookupError)
"""Exceptions of the client libraries on replies that break the protocol."""
_LONGEST_WAIT = 300.0
"""Seconds; a longer wait that a server asks for is cut to this."""


@contextlib.contextmanager
def translate_errors() -> Iterator[None]:
    """Within the block, turn every exception into ``CallFailed``, except the project's own errors.

    Yields:
        Nothing.

    Raises:
        CallFailed: for an exception of a client library.
    """
    try:
        yield
    except KbxError:
        raise
    except Exception as e:
        raise _translated(e) from e


def _translated(e: Exception) -> CallFailed:
    status = getattr(e, "status_code", None)
    text = f"{type(e).__name__}: {e}"[:2000]
    # Both libraries have their own base classes with these names. Comparing names avoids importing the libraries here.
    names = {c.__name__ for c in type(e).__mro__}
    if isinstance(status, int) and "APIStatusError" in names and status >= 400:
        kind = _KINDS.get(status, "server_error" if status >= 500 else "bad_request")
        retryable = status in _RETRYABLE or status >= 500
        return CallFailed(
            kind, f"HTTP {status}: {text}", retryable=retryable, retry_after=_retry_after(e), fatal=status in _FATAL
        )
    if "overloaded" in text.lower() and "APIError" in names:  # an error event within a stream, which has status 200
        return CallFailed("overloaded", text, retryable=True)
    if type(e.__cause__).__name__ == "ConnectTimeout":  # nothing is at the address, which another attempt rarely mends
        return CallFailed("connection", f"{text} ({e.__cause__})", retryable=True)
    if "APITimeoutError" in names or "TimeoutException" in names:
        return CallFailed("timeout", text, retryable=True)
    if names & {"APIConnectionError", "TransportError", "ConnectionError", "ProtocolError"}:
        return CallFailed("connection", f"{text} ({e.__cause__})" if e.__cause__ else text, retryable=True)
    if isinstance(e, json.JSONDecodeError | UnicodeDecodeError) or names & {"APIResponseValidationError", "APIError"}:
        return CallFailed("invalid", text, retryable=True)
    # Everything else comes from a server that breaks the protocol in a way that the library does not expect.
    return CallFailed("invalid", text, retryable=isinstance(e, _BROKEN))


def _retry_after(e: Any) -> float | None:
    """Return the seconds that the server asks to wait, from the reply's headers; ``None`` without such a header."""
    headers = getattr(getattr(e, "response", None), "headers", None) or {}
    try:
        if "retry-after-ms" in headers:
            seconds = float(headers["retry-after-ms"]) / 1000
        else:
            seconds = float(headers["retry-after"])
    except (KeyError, ValueError):
        return None
    return min(seconds, _LONGEST_WAIT) if seconds >= 0 else None
