"""A client of Anthropic's Messages API, and of gateways that implement it."""

from __future__ import annotations

import time
from typing import Any

from kbx_env.baselines.llm.chat import CallFailed, ChatRequest, Finish, Reply
from kbx_env.baselines.llm.failures import translate_errors

from kbx_env.errors import UsageError
from kbx_env.extras import install_hint

_FINISH = {
    "end_turn": Finish.STOP, "stop_sequence": Finish.STOP, "max_tokens": Finish.LENGTH,
    "model_context_window_exceeded": Finish.LENGTH, "refusal": Finish.REFUSAL,
}  # fmt: skip
_CONNECT_SECONDS = 10.0


class AnthropicServer:
    """Streams every answer. Sampling parameters are sent only if a method sets them: newer models refuse them."""

    def __init__(self, model: str, base_url: str | None, key: str | None, *, stall: float, wall: float) -> None:
        """Create a client; nothing is sent yet.

        Args:
            model: the model's name on the server.
            base_url: address of a gateway; ``None`` for Anthropic's own API.
            key: the API key; a gateway may need none.
            stall: seconds without a byte after which an attempt has failed.
            wall: seconds after which an attempt has failed.

        Raises:
            UsageError: the package anthropic or the key is missing, or the address is invalid.
        """
        try:
            import anthropic
        except ImportError as e:
            raise UsageError(f"Claude needs the anthropic package: {install_hint('llm')}") from e
        if not key and base_url is None:
            raise UsageError(
                "no key for Anthropic's API: set ANTHROPIC_API_KEY, or name the variable with --api-key-env"
            )
        self.model, self._wall = model, wall
        try:
            self._client = anthropic.Anthropic(
                api_key=key or "none", base_url=base_url, max_retries=0,
                timeout=anthropic.Timeout(stall, connect=min(stall, _CONNECT_SECONDS)),
            )  # fmt: skip
            self.address = str(self._client.base_url)
        except Exception as e:
            raise UsageError(f"--base-url {base_url!r}: {e}; give an address such as http://127.0.0.1:8000") from e

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
        system = "\n\n".join(m["content"] for m in request.messages if m["role"] == "system")
        optional: dict[str, object] = {"system": system} if system else {}
        if request.stop:
            optional["stop_sequences"] = list(request.stop)
        sampling = {"temperature": request.temperature, "top_p": request.top_p}
        extra = {k: v for k, v in sampling.items() if v is not None}
        with translate_errors():
            messages = [dict(m) for m in request.messages if m["role"] != "system"]
            stream = self._client.messages.stream(
                model=self.model, max_tokens=request.max_tokens, messages=messages,  # type: ignore[arg-type]
                extra_body=extra or None, **optional,  # type: ignore[arg-type]
            )  # fmt: skip
            with stream as events:
                for _ in events:
                    if time.monotonic() - start > self._wall:
                        raise CallFailed("timeout", f"no end after {self._wall:g} s", retryable=True)
                message = events.get_final_message()
        return _reply(message, time.monotonic() - start)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


def _reply(message: Any, seconds: float) -> Reply:
    if message.stop_reason is None:
        raise CallFailed("truncated", "the stream ended without a reason", retryable=True)
    usage = message.usage
    text = "".join(b.text for b in message.content if b.type == "text")
    thinking = "".join(b.thinking for b in message.content if b.type == "thinking")
    # ``input_tokens`` leaves out the tokens that are read from the server's cache or written to it.
    cached = getattr(usage, "cache_read_input_tokens", 0) or 0
    cached += getattr(usage, "cache_creation_input_tokens", 0) or 0
    prompt_tokens, completion_tokens = (usage.input_tokens + cached, usage.output_tokens) if usage else (None, None)
    finish = _FINISH.get(str(message.stop_reason), Finish.STOP)
    return Reply(text, finish, thinking, prompt_tokens, completion_tokens, None, message.model, seconds)
