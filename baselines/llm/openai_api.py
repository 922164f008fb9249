"""Any server that speaks OpenAI's protocol: vLLM, SGLang, ``transformers serve``, DeepSeek, OpenRouter, OpenAI."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

from kbx_env.baselines.llm.chat import Ask, CallFailed, Finish, Reply
from kbx_env.baselines.llm.failures import failed

from kbx_env.errors import UsageError

_FINISH = {"length": Finish.LENGTH, "max_tokens": Finish.LENGTH, "content_filter": Finish.REFUSAL}


class OpenAIServer:
    """Streams every answer, so that a server which stalls is told from one that works long."""

    def __init__(
        self, model: str, base_url: str | None, key: str | None, *, stall: float, wall: float, completions: bool = False,
        seeded: bool = True,
    ) -> None:  # fmt: skip
        """A client.

        Args:
            model: the name that the server knows.
            base_url: ends in ``/v1`` with most servers; ``None`` for OpenAI's own.
            key: sent as the bearer token; local servers want none.
            stall: seconds without a byte after which a call has failed.
            wall: seconds for one call.
            completions: render the prompt here and use the plain completion interface.
            seeded: send the seed; some servers refuse the parameter.

        Raises:
            UsageError: the package is missing, or the address is none.
        """
        try:
            import openai
        except ImportError as e:
            raise UsageError('model servers need the openai package: pip install "kbx_env[llm]"') from e
        self.model, self._wall, self._completions, self._seeded = model, wall, completions, seeded
        self._own = base_url is None
        try:
            # No retries of its own: each attempt is counted and recorded where budgets and limits are kept.
            self._client = openai.OpenAI(
                api_key=key or "none", base_url=base_url, max_retries=0, timeout=openai.Timeout(stall, connect=min(stall, 10.0))
            )
        except Exception as e:
            raise UsageError(f"--base-url {base_url!r}: {e}; give an address such as http://127.0.0.1:8000/v1") from e

    def complete(self, ask: Ask) -> Reply:
        """One answer, read to its end."""
        start = time.monotonic()
        with failed():
            stream = self._completion(ask) if self._completions else self._chat(ask)
            with stream:
                return _read(stream, self._completions, lambda: time.monotonic() - start, self._wall)

    def _common(self, ask: Ask) -> dict[str, Any]:
        given: dict[str, Any] = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        for name, value in (("temperature", ask.temperature), ("top_p", ask.top_p), ("stop", list(ask.stop) or None)):
            if value is not None:
                given[name] = value
        if ask.seed is not None and self._seeded:
            given["seed"] = ask.seed
        return given

    def _chat(self, ask: Ask) -> Any:
        limit = {"max_completion_tokens" if self._own else "max_tokens": ask.max_tokens}
        create: Any = self._client.chat.completions.create
        return create(messages=[dict(m) for m in ask.messages], **limit, **self._common(ask))

    def _completion(self, ask: Ask) -> Any:
        if ask.raw is None:
            raise UsageError("this method has no prompt of its own for --api completions; use --api chat")
        create: Any = self._client.completions.create
        return create(prompt=ask.raw, max_tokens=ask.max_tokens, **self._common(ask))

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


def _read(stream: Iterator[Any], completions: bool, elapsed: Callable[[], float], wall: float) -> Reply:
    text, thinking, refusal = [], [], False
    finish, usage, model = None, None, None
    for chunk in stream:
        if elapsed() > wall:
            raise CallFailed("timeout", f"no end after {wall:g} s", again=True)
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
        # A connection that was closed in between looks like an end; only the reason tells a whole answer.
        raise CallFailed("truncated", f"the stream ended after {sum(map(len, text))} characters without a reason", again=True)
    return Reply(
        "".join(map(str, text)), Finish.REFUSAL if refusal else _FINISH.get(str(finish), Finish.STOP), "".join(map(str, thinking)),
        _count(usage, "prompt_tokens"), _count(usage, "completion_tokens"), _dollars(usage), model, elapsed(),
    )  # fmt: skip


def _count(usage: Any, name: str) -> int | None:
    value = getattr(usage, name, None)
    return value if type(value) is int and value >= 0 else None


def _dollars(usage: Any) -> float | None:
    """OpenRouter and some gateways tell the cost; nobody else does."""
    value = getattr(usage, "cost", None)
    try:
        return float(value) if value is not None and float(value) >= 0 else None
    except (TypeError, ValueError, json.JSONDecodeError):
        return None
