"""Settings of the adapters that are servers: environment variables, and a small JSON app.

``KBX_REWARD`` (preset, ``default``), ``KBX_BACKEND`` (``auto``), ``KBX_GRADER`` and ``KBX_TOKEN`` (address and token of a
grading service; without it the server grades by itself), ``KBX_WORKERS`` (gradings at a time).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from kbx_env.errors import UsageError
from kbx_env.train.warm_grader import WarmGrader

MOST_BYTES = 4 << 20
"""Largest body of a request, in bytes: an answer of 1 MB, its prompt, and the rest of a conversation."""


def options_of(settings: Mapping[str, str]) -> dict[str, Any]:
    """Return the options of ``WarmGrader`` that environment variables describe.

    Args:
        settings: the variables.

    Returns:
        The options.

    Raises:
        UsageError: a variable that is not accepted.
    """
    url = settings.get("KBX_GRADER")
    place = {} if url is None else {"url": url, "token": settings.get("KBX_TOKEN")}
    workers = {} if "KBX_WORKERS" not in settings else {"workers": number_of(settings, "KBX_WORKERS", 1)}
    return {
        "preset": settings.get("KBX_REWARD", "default"), "backend": settings.get("KBX_BACKEND", "auto"), **place, **workers
    }  # fmt: skip


def grader_of(settings: Mapping[str, str]) -> WarmGrader:
    """Return the grader that environment variables describe; it starts with its first use.

    Args:
        settings: the variables.

    Returns:
        The grader.
    """
    return WarmGrader(**options_of(settings))


def number_of(settings: Mapping[str, str], name: str, default: int) -> int:
    """Return a whole number of at least 1.

    Args:
        settings: environment variables.
        name: of the variable.
        default: where it is not set.

    Returns:
        The number.

    Raises:
        UsageError: the value is no such number.
    """
    text = settings.get(name, str(default))
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"{name} is {text!r}; a whole number, at least 1")
    return int(text)


def json_app(title: str, routes: Mapping[str, Callable[[dict[str, Any]], Awaitable[Any]]]) -> Any:
    """Make a server app whose routes take a JSON object by POST.

    A ``UsageError`` is answered with status 422, a body above ``MOST_BYTES`` with 413. ``GET /health`` says that it runs.

    Args:
        title: of the app.
        routes: the function that answers, by path.

    Returns:
        A FastAPI app.
    """
    from fastapi import FastAPI, Request
    from fastapi.responses import JSONResponse

    app = FastAPI(title=title)

    def answering(function: Callable[[dict[str, Any]], Awaitable[Any]]) -> Any:
        async def answer(request: Request) -> Any:
            data = bytearray()
            async for part in request.stream():
                data += part
                if len(data) > MOST_BYTES:
                    return JSONResponse({"detail": f"the body has more than {MOST_BYTES} bytes"}, status_code=413)
            try:
                body = _object(bytes(data))
                return await function(body)
            except UsageError as e:
                return JSONResponse({"detail": str(e)}, status_code=422)

        answer.__annotations__["request"] = Request  # a text in this module, which FastAPI could not resolve
        return answer

    for path, function in routes.items():
        app.post(path, response_model=None)(answering(function))
    app.get("/health")(lambda: {"status": "ok"})
    return app


def _object(data: bytes) -> dict[str, Any]:
    import json

    try:
        body = json.loads(data)
    except ValueError as e:
        raise UsageError(f"the body is no JSON: {e}") from e
    if not isinstance(body, dict):
        raise UsageError("the body is no JSON object")
    return body
