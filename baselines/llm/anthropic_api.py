"""Anthropic's Messages API, and gateways that speak it."""

from __future__ import annotations

import time

from kbx_env.baselines.llm.chat import Ask, CallFailed, Finish, Reply
from kbx_env.baselines.llm.failures import failed

from kbx_env.errors import UsageError

_FINISH = {
    "end_turn": Finish.STOP, "stop_sequence": Finish.STOP, "max_tokens": Finish.LENGTH,
    "model_context_window_exceeded": Finish.LENGTH, "refusal": Finish.REFUSAL,
}  # fmt: skip


class AnthropicServer:
    """Streams every answer. Sampling parameters are sent only where a method asks for them: newer models refuse them."""

    def __init__(self, model: str, base_url: str | None, key: str | None, *, stall: float, wall: float) -> None:
        """A client; ``stall`` and ``wall`` in seconds, as for `OpenAIServer`.

        Raises:
            UsageError: the package or the key is missing.
        """
        try:
            import anthropic
        except ImportError as e:
            raise UsageError('Claude needs the anthropic package: pip install "kbx_env[llm]"') from e
        if not key and base_url is None:
            raise UsageError("no key for Anthropic's API: set ANTHROPIC_API_KEY, or name the variable with --api-key-env")
        self.model, self._wall = model, wall
        try:
            self._client = anthropic.Anthropic(
                api_key=key or "none", base_url=base_url, max_retries=0,
                timeout=anthropic.Timeout(stall, connect=min(stall, 10.0)),
            )  # fmt: skip
        except Exception as e:
            raise UsageError(f"--base-url {base_url!r}: {e}; give an address such as http://127.0.0.1:8000") from e

    def complete(self, ask: Ask) -> Reply:
        """One answer, read to its end."""
        start = time.monotonic()
        system = "\n\n".join(m["content"] for m in ask.messages if m["role"] == "system")
        given: dict[str, object] = {"system": system} if system else {}
        if ask.stop:
            given["stop_sequences"] = list(ask.stop)
        sampling = {"temperature": ask.temperature, "top_p": ask.top_p}
        extra = {k: v for k, v in sampling.items() if v is not None}
        with failed():
            messages = [dict(m) for m in ask.messages if m["role"] != "system"]
            stream = self._client.messages.stream(
                model=self.model, max_tokens=ask.max_tokens, messages=messages,  # type: ignore[arg-type]
                extra_body=extra or None, **given,  # type: ignore[arg-type]
            )  # fmt: skip
            with stream as events:
                for _ in events:
                    if time.monotonic() - start > self._wall:
                        raise CallFailed("timeout", f"no end after {self._wall:g} s", again=True)
                whole = events.get_final_message()
        if whole.stop_reason is None:
            raise CallFailed("truncated", "the stream ended without a reason", again=True)
        usage = whole.usage
        text = "".join(b.text for b in whole.content if b.type == "text")
        thinking = "".join(b.thinking for b in whole.content if b.type == "thinking")
        cached = (getattr(usage, "cache_read_input_tokens", 0) or 0) + (getattr(usage, "cache_creation_input_tokens", 0) or 0)
        into, out = (usage.input_tokens + cached, usage.output_tokens) if usage else (None, None)
        finish = _FINISH.get(str(whole.stop_reason), Finish.STOP)
        return Reply(text, finish, thinking, into, out, None, whole.model, time.monotonic() - start)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()
