"""Types of requests to a language model and of its replies, the same for every kind of server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Protocol

from kbx_env.errors import KbxError

Message = Mapping[str, str]
"""``{"role": "system" | "user" | "assistant", "content": text}``."""


class Finish(StrEnum):
    """Why a model stopped."""

    STOP = "stop"
    LENGTH = "length"
    """Cut off at the token limit."""
    REFUSAL = "refusal"


@dataclass(frozen=True)
class ChatRequest:
    """One request to a model. The server decides on parameters that are ``None``.

    Attributes:
        messages: the conversation so far.
        max_tokens: the most tokens of the answer, thinking included.
        temperature: of sampling; 0 is greedy decoding.
        top_p: of nucleus sampling.
        stop: texts that end the answer; they do not belong to it.
        seed: of sampling.
        raw: the whole prompt as text, for a server of plain completions, which gets it in place of the messages.
        ids: the whole prompt as tokens, for a checkpoint on this machine, which gets them in place of the messages.
    """

    messages: tuple[Message, ...]
    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    raw: str | None = None
    ids: tuple[int, ...] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON types, from which the keys of recorded calls are computed.

        Returns:
            The fields by name. ``ids`` is left out where it is ``None``, so that old keys stay valid.
        """
        data = asdict(self) | {"messages": [dict(m) for m in self.messages], "stop": list(self.stop)}
        ids = data.pop("ids")
        return data if ids is None else data | {"ids": list(ids)}


@dataclass(frozen=True)
class Reply:
    """A complete answer of a model.

    Attributes:
        text: the answer.
        finish: why it ended.
        thinking: the model's thinking, where the server separates it from the answer.
        prompt_tokens: as the server reports it, else ``None``.
        completion_tokens: as the server reports it, thinking included, else ``None``.
        dollars: the cost, as the server reports it or from given prices, else ``None``.
        model: the name of the model that answered, as the server reports it.
        seconds: wall time of the successful attempt.
        ids: the tokens of the answer, from a local checkpoint only; they are not recorded.
    """

    text: str
    finish: Finish
    thinking: str = ""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    dollars: float | None = None
    model: str | None = None
    seconds: float | None = None
    ids: tuple[int, ...] | None = None


class CallFailed(KbxError):
    """One attempt at a call failed and yielded no answer."""

    def __init__(
        self, kind: str, text: str, *, retryable: bool, retry_after: float | None = None, fatal: bool = False
    ) -> None:
        """Describe a failure.

        Args:
            kind: one word for the record: rate_limit, server_error, timeout, connection, invalid, truncated, ...
            text: the message of the server or of the client library.
            retryable: whether the same request may succeed later.
            retry_after: seconds to wait before the next attempt, as the server asks for.
            fatal: whether no request can succeed, because the key, the model or the address is wrong.
        """
        super().__init__(f"{kind}: {text}")
        self.kind, self.text = kind, text
        self.retryable, self.retry_after, self.fatal = retryable, retry_after, fatal


class Server(Protocol):
    """A model that answers requests, from several threads at a time."""

    model: str

    def complete(self, request: ChatRequest) -> Reply:
        """Ask once.

        Args:
            request: the request.

        Returns:
            The complete answer.

        Raises:
            CallFailed: there is no complete answer.
        """

    def close(self) -> None:
        """Close connections, or free memory."""
