"""A client of OpenAI-compatible servers: vLLM, SGLang, ``transformers serve``, DeepSeek, OpenRouter, OpenAI."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

from kbx_env.baselines.llm.chat import CallFailed, ChatRequest, Finish, Reply
from kbx_env.baselines.llm.failures import translate_errors

from kbx_env.errors import UsageError
from kbx_env.extras import install_hint

_FINISH = {"length": Finish.LENGTH, "max_tokens": Finish.LENGTH, "content_filter": Finish.REFUSAL}
_CONNECT_SECONDS = 10.0


class OpenAIServer:
    """Streams every answer, so that a server that stalls differs from one that takes long."""

    def __init__(
        self, model: str, base_url: str | None, key: str | None, *, stall: float, wall: float,
        completions: bool = False, seeded: bool = True,
    ) -> None:  # fmt: skip
        """Create a client; nothing is sent yet.

        Args:
            model: the model's name on the server.
            base_url: ends in ``/v1`` with most servers; ``None`` for OpenAI's own API.
            key: sent as the bearer token; local servers need none.
            stall: seconds without a byte after which an attempt has failed.
            wall: seconds after which an attempt has failed.
            completions: use the plain completion interface, with prompts that are rendered here.
            seeded: send the seed; some servers refuse the parameter.

        Raises:
            UsageError: the package openai is missing, or the address is invalid.
        """
        try:
            import openai
        except ImportError as e:
            raise UsageError(f"model servers need the openai package: {install_hint('llm')}") from e
        self.model, self._wall, self._completions, self._seeded = model, wall, completions, seeded
        self._official = base_url is None
        try:
            # The client must not retry by itself: every attempt is counted and recorded by ``Caller``.
            self._client = openai.OpenAI(
                api_key=key or "none", base_url=base_url, max_retries=0,
                timeout=openai.Timeout(stall, connect=min(stall, _CONNECT_SECONDS)),
            )  # fmt: skip
            self.address = str(self._client.base_url)
        except Exception as e:
            raise UsageError(f"--base-url {base_url!r}: {e}; give an address such as http://127.0.0.1:8000/v1") from e

    def complete(self, request: ChatRequest) -> Reply:
        """Ask once, and read the stream to its end.

        Args:
            request: the request.

        Returns:
            The complete answer.

        Raises:
            CallFailed: the server failed, the time is over, or the stream ended early.
        """
        start = time.monotonic()
        with translate_errors():
            stream = self._completion(request) if self._completions else self._chat(request)
            with stream:
                return _read(stream, self._completions, lambda: time.monotonic() - start, self._wall)

    def _common(self, request: ChatRequest) -> dict[str, Any]:
        parameters: dict[str, Any] = {
            "model": self.model, "stream": True, "stream_options": {"include_usage": True}
        }  # fmt: skip
        optional = {
            "temperature": request.temperature, "top_p": request.top_p, "stop": list(request.stop) or None,
            "seed": request.seed if self._seeded else None,
        }  # fmt: skip
        return parameters | {name: value for name, value in optional.items() if value is not None}

    def _chat(self, request: ChatRequest) -> Any:
        # OpenAI has replaced ``max_tokens`` by ``max_completion_tokens``; other servers may know only the old name.
        limit = {"max_completion_tokens" if self._official else "max_tokens": request.max_tokens}
        create: Any = self._client.chat.completions.create
        return create(messages=[dict(m) for m in request.messages], **limit, **self._common(request))

    def _completion(self, request: ChatRequest) -> Any:
        if request.raw is None:
            raise UsageError("this method has no prompt of its own for --api completions; use --api openai")
        create: Any = self._client.completions.create
        return create(prompt=request.raw, max_tokens=request.max_tokens, **self._common(request))

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


def _read(stream: Iterator[Any], completions: bool, elapsed: Callable[[], float], wall: float) -> Reply:
    text, thinking, refusal = [], [], False
    finish, usage, model = None, None, None
    for chunk in stream:
        if elapsed() > wall:
            raise CallFailed("timeout", f"no end after {wall:g} s", retryable=True)
        model, usage = getattr(chunk, "model", None) or model, getattr(chunk, "usage", None) or usage
        for choice in (getattr(chunk, "choices", None) or [])[:1]:
            finish = choice.finish_reason or finish
            if completions:
                text.append(choice.text or "")
                continue
            delta = choice.delta
            if delta is None:
                continue
            text.append(getattr(delta, "content", None) or "")
            thinking.append(getattr(delta, "reasoning_content", None) or getattr(delta, "reasoning", None) or "")
            if getattr(delta, "refusal", None):
                refusal = True
                text.append(delta.refusal)
    if finish is None:
        # A connection that is closed early ends the stream without an error; a complete answer has a finish reason.
        received = sum(map(len, text))
        raise CallFailed("truncated", f"the stream ended after {received} characters without a reason", retryable=True)
    return Reply(
        "".join(map(str, text)), Finish.REFUSAL if refusal else _FINISH.get(str(finish), Finish.STOP),
        "".join(map(str, thinking)), _count(usage, "prompt_tokens"), _count(usage, "completion_tokens"),
        _dollars(usage), model, elapsed(),
    )  # fmt: skip


def _count(usage: Any, name: str) -> int | None:
    value = getattr(usage, name, None)
    return value if type(value) is int and value >= 0 else None


def _dollars(usage: Any) -> float | None:
    """Return the cost of a call, which OpenRouter and some gateways report; else ``None``."""
    value = getattr(usage, "cost", None)
    try:
        return float(value) if value is not None and float(value) >= 0 else None
    except (TypeError, ValueError, json.JSONDecodeError):
        return None
