"""What is asked of a model and what it answers, whichever server stands behind it."""

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
class Ask:
    """One request. ``None`` leaves a parameter to the server; ``max_tokens`` bounds the answer, thinking included.

    ``raw`` is a prompt that is already rendered: it goes to a completion server as it is, in place of the messages. ``ids`` is
    one in tokens, for a checkpoint on this machine.
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
        """Plain JSON types; without tokens where there are none: recorded calls are found by this."""
        data = asdict(self) | {"messages": [dict(m) for m in self.messages], "stop": list(self.stop)}
        ids = data.pop("ids")
        return data if ids is None else data | {"ids": list(ids)}


@dataclass(frozen=True)
class Reply:
    """A whole answer. Tokens and dollars are the server's word, ``None`` where it does not tell; ``seconds`` is wall time
    of the call that succeeded; ``thinking`` is what the server keeps apart from the answer; ``ids`` are a local checkpoint's
    tokens, which no record keeps."""

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
    """One attempt of one call failed: nothing of it is an answer."""

    def __init__(self, kind: str, text: str, *, again: bool, after: float | None = None, hopeless: bool = False) -> None:
        """A failure.

        Args:
            kind: one word for the record: rate_limit, server_error, timeout, connection, invalid, truncated, refused, ...
            text: what the server or the client library said.
            again: whether the same request may succeed later.
            after: seconds to wait before, as the server asks.
            hopeless: no request can succeed: a wrong key, model or address.
        """
        super().__init__(f"{kind}: {text}")
        self.kind, self.text, self.again, self.after, self.hopeless = kind, text, again, after, hopeless


class Server(Protocol):
    """Answers requests; several threads may ask at once."""

    model: str

    def complete(self, ask: Ask) -> Reply:
        """One answer.

        Raises:
            CallFailed: no whole answer.
        """

    def close(self) -> None:
        """Let go of connections or memory."""
