"""The two clients against a server that answers, and against every way in which one fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from kbx_env.baselines.llm.anthropic_api import AnthropicServer
from kbx_env.baselines.llm.chat import CallFailed, ChatRequest, Finish, Server
from kbx_env.baselines.llm.openai_api import OpenAIServer
from scripted import Failure, Reply, Script, ScriptedServer

from kbx_env.errors import UsageError

Make = Callable[[ScriptedServer], Server]
ASK = ChatRequest(({"role": "system", "content": "Be short."}, {"role": "user", "content": "Hello?"}), 100, 0.5, 0.9, ("END",), 7)
KEY = "sk-secret-0123456789"


def _chat(server: ScriptedServer, **more: object) -> Server:
    return OpenAIServer("m", server.base_url, KEY, **{"stall": 10, "wall": 20, **more})  # type: ignore[arg-type]


def _completions(server: ScriptedServer, **more: object) -> Server:
    return _chat(server, completions=True, **more)


def _anthropic(server: ScriptedServer, **more: object) -> Server:
    return AnthropicServer("m", server.anthropic_url, KEY, **{"stall": 10, "wall": 20, **more})  # type: ignore[arg-type]


ALL = pytest.mark.parametrize("make", [_chat, _completions, _anthropic])


def _ask(make: Make, script: Script, ask: ChatRequest = ASK, **more: object) -> tuple[object, ScriptedServer]:
    with ScriptedServer(script) as server:
        client = make(server, **more)  # type: ignore[call-arg]
        try:
            return client.complete(replace(ask, raw="Hello?") if make is _completions else ask), server
        finally:
            client.close()


@ALL
def test_an_answer_with_its_tokens(make: Make) -> None:
    reply, server = _ask(make, [Reply("a long answer " * 10, prompt_tokens=11, completion_tokens=22)])
    assert reply.text == "a long answer " * 10 and reply.finish is Finish.STOP  # type: ignore[attr-defined]
    assert (reply.prompt_tokens, reply.completion_tokens) == (11, 22)  # type: ignore[attr-defined]
    assert reply.dollars is None and reply.seconds > 0  # type: ignore[attr-defined]
    (asked,) = server.asked
    assert asked.model == "m" and asked.body["stream"] is True and asked.text == "Hello?"
    assert (asked.body["temperature"], asked.body["top_p"], asked.body["max_tokens"]) == (0.5, 0.9, 100)
    assert make is _anthropic or asked.body["seed"] == 7


def test_what_only_some_servers_tell() -> None:
    reply, _ = _ask(_chat, [Reply("x", reasoning="I think", cost=0.25)])
    assert reply.thinking == "I think" and reply.dollars == 0.25  # type: ignore[attr-defined]
    reply, server = _ask(_anthropic, [Reply("x", reasoning="I think")])
    assert reply.thinking == "I think" and reply.text == "x"  # type: ignore[attr-defined]
    assert server.asked[0].body["system"] == "Be short." and server.asked[0].body["stop_sequences"] == ["END"]
    reply, _ = _ask(_chat, [Reply("x", tokens=False)])
    assert reply.prompt_tokens is None and reply.completion_tokens is None  # type: ignore[attr-defined]
    _, server = _ask(_chat, [Reply("x")], seeded=False)
    assert "seed" not in server.asked[0].body


def test_settings_that_a_method_leaves_open_are_not_sent() -> None:
    for make in (_chat, _anthropic):
        _, server = _ask(make, [Reply("x")], ChatRequest(({"role": "user", "content": "Hello?"},), 100))
        assert not {"temperature", "top_p", "stop", "stop_sequences", "seed", "system"} & set(server.asked[0].body)


@ALL
@pytest.mark.parametrize(("finish", "seen"), [("length", Finish.LENGTH), ("refusal", Finish.REFUSAL)])
def test_why_it_stopped(make: Make, finish: str, seen: Finish) -> None:
    reply, _ = _ask(make, [Reply("I had more to", finish=finish)])
    assert reply.finish is seen and reply.text == "I had more to"  # type: ignore[attr-defined]


@ALL
@pytest.mark.parametrize(
    ("failure", "kind", "again"),
    [
        (Failure("status", 500), "server_error", True), (Failure("status", 503), "server_error", True),
        (Failure("status", 529), "overloaded", True), (Failure("status", 429, retry_after=3), "rate_limit", True),
        (Failure("status", 408), "timeout", True), (Failure("status", 400), "bad_request", False),
        (Failure("status", 422), "bad_request", False), (Failure("status", 413), "too_long", False),
        (Failure("invalid_json"), "invalid", True), (Failure("html"), None, True), (Failure("html", 502), "server_error", True),
        (Failure("hang_up"), "connection", True), (Failure("truncate"), "connection", True),
        (Failure("truncate", clean=True), "truncated", True), (Failure("stall"), "timeout", True),
        (Failure("slow_headers"), "timeout", True), (Failure("error_event"), None, True),
    ],
    ids=lambda v: f"{v.kind}-{v.status}-{v.clean}" if isinstance(v, Failure) else str(v),
)  # fmt: skip
def test_every_failure_is_told_and_says_whether_to_try_again(make: Make, failure: Failure, kind: str | None, again: bool) -> None:
    with pytest.raises(CallFailed) as caught:
        # Only who is to wait too long waits half a second: the first answer of a client can take as long on a busy machine.
        _ask(make, [failure], stall=0.5 if failure.kind in ("stall", "slow_headers") else 10)
    assert caught.value.retryable is again and not caught.value.fatal and caught.value.text
    assert kind is None or caught.value.kind == kind
    assert caught.value.retry_after == (3 if failure.retry_after else None)


@ALL
@pytest.mark.parametrize("status", [401, 402, 403, 404])
def test_what_no_request_will_mend_is_fatal(make: Make, status: int) -> None:
    with pytest.raises(CallFailed) as caught:
        _ask(make, [Failure("status", status)])
    assert caught.value.fatal and not caught.value.retryable


@ALL
def test_a_missing_end_mark_and_a_null_content_are_forgiven(make: Make) -> None:
    reply, _ = _ask(make, [Failure("no_done", reply=Reply("whole"))])
    assert reply.text == "whole"  # type: ignore[attr-defined]
    if make is not _anthropic:
        reply, _ = _ask(make, [Failure("null_content")])
        assert reply.text == ""  # type: ignore[attr-defined]


@pytest.mark.parametrize("make", [_chat, _anthropic])
def test_a_call_that_never_ends_is_ended(make: Callable[..., Server]) -> None:
    slow = Failure("stall", seconds=0.3, reply=Reply("word " * 40))
    with pytest.raises(CallFailed, match=r"no end after 0\.1 s") as caught:
        _ask(make, [slow], wall=0.1)
    assert caught.value.retryable


def test_nobody_listens() -> None:
    client = OpenAIServer("m", "http://127.0.0.1:1/v1", None, stall=1, wall=5)
    with pytest.raises(CallFailed) as caught:
        client.complete(ASK)
    assert caught.value.kind == "connection" and caught.value.retryable


def test_a_method_without_a_prompt_of_its_own_cannot_use_plain_completions() -> None:
    with ScriptedServer([Reply("x")]) as server, pytest.raises(UsageError, match="--api openai"):
        _completions(server).complete(ASK)
