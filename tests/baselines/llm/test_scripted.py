"""The scripted server through the real SDKs: right answers, every failure, 200 at once, and a quick end."""

from __future__ import annotations

import json
import socket
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
from scripted import KINDS, Asked, Failure, Reply, ScriptedServer

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")
httpx2 = pytest.importorskip("httpx2")  # what these versions of the SDKs stand on; they let some of its exceptions through

APIS = ("openai-chat", "openai-completions", "anthropic")
KEY = "sk-secret-0123456789"
TLS = ssl.create_default_context()  # one for all: its making takes longer than most tests here
WORDS = "one two three four five six seven eight nine ten eleven twelve"
MESSAGES = [{"role": "user", "content": "first"}, {"role": "assistant", "content": "second"}, {"role": "user", "content": "third"}]


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "*")


@dataclass
class Got:
    """What a client made of an answer; ``text`` None means that there was none where a text belongs."""

    text: str | None = ""
    thought: str = ""
    refusal: str = ""
    end: str | None = None
    usage: Any = None
    raw: Any = None
    events: list[Any] = field(default_factory=list)


def client(server: ScriptedServer, api: str, timeout: float = 5.0) -> Any:
    common: dict[str, Any] = {"api_key": KEY, "max_retries": 0, "timeout": timeout}
    if api == "anthropic":
        http = anthropic.DefaultHttpxClient(verify=TLS)
        return anthropic.Anthropic(base_url=server.anthropic_url, http_client=http, **common)
    return openai.OpenAI(base_url=server.base_url, http_client=openai.DefaultHttpxClient(verify=TLS), **common)


def ask(server: ScriptedServer, api: str, stream: bool, got: Got | None = None, timeout: float = 5.0) -> Got:
    """Ask once; ``got`` is filled as the stream comes, so that it tells what came before an exception."""
    got = got or Got()
    with client(server, api, timeout) as c:
        if api == "anthropic":
            answer = c.messages.create(model="m", max_tokens=9, system="be brief", messages=MESSAGES, stream=stream)
        else:
            more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
            if api == "openai-chat":
                answer = c.chat.completions.create(model="m", messages=MESSAGES, **more)
            else:
                answer = c.completions.create(model="m", prompt="third", **more)
        if not stream:
            got.raw = answer
            if isinstance(answer, str):
                return got
            got.usage = answer.usage
        if api == "anthropic":
            return anthropic_stream(answer, got) if stream else anthropic_whole(answer, got)
        for event in answer if stream else [answer]:
            got.events.append(event)
            got.usage = event.usage or got.usage
            for choice in event.choices or []:
                got.end = choice.finish_reason or got.end
                part = choice if api == "openai-completions" else choice.delta if stream else choice.message
                text = part.text if api == "openai-completions" else part.content
                got.text = (got.text or "") + text if text is not None else got.text if stream else None
                got.thought += getattr(part, "reasoning_content", None) or ""
                got.refusal += getattr(part, "refusal", None) or ""
        return got


def anthropic_whole(answer: Any, got: Got) -> Got:
    got.end, got.text = answer.stop_reason, None if answer.content is None else ""
    for block in answer.content or []:
        got.text = (got.text or "") + getattr(block, "text", "")
        got.thought += getattr(block, "thinking", "")
    return got


def anthropic_stream(answer: Any, got: Got) -> Got:
    for event in answer:
        got.events.append(event)
        if event.type == "content_block_delta":
            got.text = (got.text or "") + (getattr(event.delta, "text", "") or "")
            got.thought += getattr(event.delta, "thinking", "")
        if event.type == "message_delta":
            got.end, got.usage = event.delta.stop_reason, event.usage
    return got


both = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
every_api = pytest.mark.parametrize("api", APIS)


@every_api
@both
def test_a_right_answer(api: str, stream: bool) -> None:
    with ScriptedServer([Reply(WORDS, reasoning="hm hm hm", cost=0.25)]) as server:
        got = ask(server, api, stream)
        [asked] = server.asked
    assert got.text == WORDS and got.end == ("end_turn" if api == "anthropic" else "stop")
    assert got.thought == ("" if api == "openai-completions" else "hm hm hm")
    assert got.usage.cost == 0.25
    assert (got.usage.output_tokens if api == "anthropic" else got.usage.completion_tokens) == 15
    if api != "anthropic":
        assert got.usage.prompt_tokens == (3 if api == "openai-chat" else 1)
    system = [{"role": "system", "content": "be brief"}] if api == "anthropic" else []
    assert asked.messages == (system + MESSAGES if api != "openai-completions" else [{"role": "user", "content": "third"}])
    assert (asked.api, asked.text, asked.model, asked.number, server.most_at_once) == (api, "third", "m", 0, 1)
    assert asked.headers["authorization"] == f"Bearer {KEY}"  # anthropic's as well: 2.12 sends no x-api-key any more
    if stream:
        assert len(got.events) >= 4


@every_api
@both
@pytest.mark.parametrize("finish", ["length", "refusal", "content_filter"])
def test_the_words_for_an_end(api: str, stream: bool, finish: str) -> None:
    with ScriptedServer([Reply(WORDS, finish, prompt_tokens=7, completion_tokens=8)]) as server:
        got = ask(server, api, stream)
    if api == "anthropic":
        assert got.end == {"length": "max_tokens"}.get(finish, "refusal")
        assert got.usage.output_tokens == 8
    else:
        assert got.end == {"refusal": "content_filter"}.get(finish, finish)
        assert (got.usage.prompt_tokens, got.usage.completion_tokens, got.usage.total_tokens) == (7, 8, 15)
    refused = api == "openai-chat" and finish == "refusal"
    assert (got.text or "", got.refusal) == (("", WORDS) if refused else (WORDS, ""))


@every_api
@both
def test_no_tokens(api: str, stream: bool) -> None:
    with ScriptedServer([Reply(WORDS, tokens=False)]) as server:
        got = ask(server, api, stream)
    assert got.text == WORDS and got.usage is None


def test_the_anthropic_stream_helper_and_models() -> None:
    with ScriptedServer([Reply(WORDS, reasoning="hm")], models=("a", "b")) as server:
        with client(server, "anthropic") as c, c.messages.stream(model="m", max_tokens=9, messages=MESSAGES) as stream:
            assert [block.type for block in stream.get_final_message().content] == ["thinking", "text"]
        with client(server, "openai-chat") as c:
            assert [model.id for model in c.models.list()] == ["a", "b"]
        with client(server, "anthropic") as c:
            assert [model.id for model in c.models.list()] == ["a", "b"]
            with pytest.raises(anthropic.NotFoundError):
                c.post("/v1/other", body={}, cast_to=object)


# What openai 3.54.0 and anthropic 2.12.0 (on httpx2 2.16.2) were seen to raise with max_retries=0. chat and completions
# do the same. "-" means that nothing was raised; what came instead is said at the right.
#
# failure             openai whole         openai streamed          anthropic whole      anthropic streamed
# status              see STATUSES below, at the call, streamed or not
# invalid_json        json.decoder.JSONDecodeError, all four (bare: no class of an SDK; streamed: after the chunks before it)
# html, status 200    -  (a str)           -  (no chunk)            -  (a str)           -  (no event)
# html, status 502    openai.InternalServerError, twice             anthropic.InternalServerError, twice
# hang_up             openai.APIConnectionError, twice              anthropic.APIConnectionError, twice
# truncate            openai.APIConnectionError, twice              APIConnectionError   httpx2.RemoteProtocolError (bare)
# truncate, clean     JSONDecodeError      -  (end None)            JSONDecodeError      -  (end None)
# stall > timeout     openai.APITimeoutError, twice                 APITimeoutError      httpx2.ReadTimeout (bare)
# slow_headers        openai.APITimeoutError, twice                 anthropic.APITimeoutError, twice
# empty_choices       -  (choices [])      -  (choices [])          -  (content [])      -  (no block)
# null_content        -  (content None)    -  (delta.content None)  -  (content None)    -  (delta.text None)
# no_done             -                    -                        -                    -  (no message_stop)
# error_event         -  (choices None)    openai.APIError          -  (content None)    anthropic.APIStatusError (status 200)
#
# anthropic's messages.stream() does as its create(stream=True), but html: AssertionError; null_content: TypeError; and
# after a clean truncation get_final_message() gives the half text with stop_reason None.
OPENAI_LOST, OPENAI_LATE = openai.APIConnectionError, openai.APITimeoutError
LOST, LATE, BAD = anthropic.APIConnectionError, anthropic.APITimeoutError, json.JSONDecodeError
RAISED: list[tuple[Failure, tuple[type[Exception] | None, ...]]] = [
    (Failure("invalid_json"), (BAD, BAD, BAD, BAD)),
    (Failure("html"), (None, None, None, None)),
    (Failure("html", status=502), (openai.InternalServerError,) * 2 + (anthropic.InternalServerError,) * 2),
    (Failure("hang_up"), (OPENAI_LOST, OPENAI_LOST, LOST, LOST)),
    (Failure("truncate"), (OPENAI_LOST, OPENAI_LOST, LOST, httpx2.RemoteProtocolError)),
    (Failure("truncate", clean=True), (BAD, None, BAD, None)),
    (Failure("stall"), (OPENAI_LATE, OPENAI_LATE, LATE, httpx2.ReadTimeout)),
    (Failure("slow_headers"), (OPENAI_LATE, OPENAI_LATE, LATE, LATE)),
    (Failure("empty_choices"), (None, None, None, None)),
    (Failure("null_content"), (None, None, None, None)),
    (Failure("no_done"), (None, None, None, None)),
    (Failure("error_event", status=529), (None, openai.APIError, None, anthropic.APIStatusError)),
]
STATUSES: list[tuple[int, type[Exception], type[Exception]]] = [
    (400, openai.BadRequestError, anthropic.BadRequestError),
    (401, openai.AuthenticationError, anthropic.AuthenticationError),
    (402, openai.APIStatusError, anthropic.PaymentRequiredError),
    (403, openai.PermissionDeniedError, anthropic.PermissionDeniedError),
    (404, openai.NotFoundError, anthropic.NotFoundError),
    (408, openai.APIStatusError, anthropic.RequestTimeoutError),
    (409, openai.ConflictError, anthropic.ConflictError),
    (413, openai.APIStatusError, anthropic.ContentTooLargeError),
    (422, openai.UnprocessableEntityError, anthropic.UnprocessableEntityError),
    (429, openai.RateLimitError, anthropic.RateLimitError),
    (500, openai.InternalServerError, anthropic.InternalServerError),
    (502, openai.InternalServerError, anthropic.InternalServerError),
    (503, openai.InternalServerError, anthropic.ServiceUnavailableError),
    (504, openai.InternalServerError, anthropic.GatewayTimeoutError),
    (529, openai.InternalServerError, anthropic.OverloadedError),
]


def test_no_kind_is_left_out() -> None:
    assert {"status", *(failure.kind for failure, _ in RAISED)} == set(KINDS)
    with pytest.raises(ValueError, match="no failure 'rain'"):
        Failure("rain")  # type: ignore[arg-type]


@every_api
@both
@pytest.mark.parametrize(("failure", "raised"), RAISED, ids=lambda v: v.kind + str(v.status or "") if hasattr(v, "kind") else "")
def test_a_failure(api: str, stream: bool, failure: Failure, raised: tuple[type[Exception] | None, ...]) -> None:
    expected, got = raised[2 * (api == "anthropic") + stream], Got()
    late = failure.kind in ("stall", "slow_headers")
    began = time.monotonic()
    with ScriptedServer([failure]) as server:
        if expected:
            caught: Any
            with pytest.raises(expected) as caught:
                ask(server, api, stream, got, timeout=0.3 if late else 5.0)
            assert caught.type is expected
        else:
            ask(server, api, stream, got)
    assert time.monotonic() - began < 3
    if failure.kind == "error_event" and stream:
        assert "Scripted error 529." in str(caught.value)
        if api == "anthropic":
            assert (caught.value.status_code, caught.value.type) == (200, "overloaded_error")
    full = failure.reply.text
    if stream and failure.kind in ("truncate", "stall", "invalid_json", "error_event"):
        assert got.end is None and got.text and full.startswith(got.text) and 20 <= len(got.text) <= len(full) - 20
    elif failure.kind == "no_done":
        assert got.text == full and got.end in ("stop", "end_turn")
        assert not stream or api != "anthropic" or got.events[-1].type == "message_delta"
    elif failure.kind == "html" and not expected:
        assert got.raw is None if stream else "502 Bad Gateway" in got.raw
        assert not got.events
    elif failure.kind == "error_event":
        assert getattr(got.raw, "choices", None) is None and got.raw.id is None and got.raw.error["message"]
    elif failure.kind in ("null_content", "empty_choices"):
        assert not got.text and (api == "anthropic" or stream or bool(got.raw.choices) == (failure.kind == "null_content"))


@every_api
@both
def test_statuses(api: str, stream: bool) -> None:
    with ScriptedServer([Failure("status", status=status, retry_after=2) for status, *_ in STATUSES]) as server:
        for status, *expected in STATUSES:
            caught: Any
            with pytest.raises(expected[api == "anthropic"]) as caught:
                ask(server, api, stream)
            assert caught.type is expected[api == "anthropic"] and caught.value.status_code == status
            assert caught.value.response.headers["retry-after"] == "2"
            assert (KEY in str(caught.value)) == (status == 401)


@both
def test_what_is_only_late_goes_on(stream: bool) -> None:
    began = time.monotonic()
    with ScriptedServer([Failure("stall", seconds=0.1), Failure("slow_headers", seconds=0.1), Reply("x", delay=0.1)]) as server:
        assert [ask(server, "openai-chat", stream).text for _ in range(3)] == [Failure("stall").reply.text] * 2 + ["x"]
    assert time.monotonic() - began > 0.3


def test_two_hundred_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    gate = threading.Barrier(200)

    def answer(asked: Asked) -> Reply:
        gate.wait(15)
        return Reply(f"{asked.text} " * 30, delay=0.05)

    def one(c: Any, i: int) -> str:
        chunks = c.chat.completions.create(model="m", messages=[{"role": "user", "content": str(i)}], stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    with ScriptedServer(answer) as server, client(server, "openai-chat", 15) as c, ThreadPoolExecutor(200) as pool:
        texts = list(pool.map(lambda i: one(c, i), range(200)))
        assert texts == [f"{i} " * 30 for i in range(200)]
        assert server.most_at_once == 200
        assert sorted(asked.number for asked in server.asked) == list(range(200))
    assert capfd.readouterr().err == ""


def test_a_request_given_up_is_not_in_flight() -> None:
    with ScriptedServer([Failure("stall")] * 5 + [Reply("x")]) as server:
        for _ in range(5):
            with pytest.raises(openai.APITimeoutError):
                ask(server, "openai-chat", True, timeout=0.05)
        with client(server, "openai-chat") as c:
            for _ in range(50):
                c.completions.create(model="m", prompt="x")
        assert server.most_at_once == 1 and len(server.asked) == 55


@pytest.mark.parametrize("kind", ["stall", "slow_headers", "delay"])
def test_closing_ends_everything_at_once(kind: Any, capfd: pytest.CaptureFixture[str]) -> None:
    before = set(threading.enumerate())
    server = ScriptedServer([Reply("x", delay=30) if kind == "delay" else Failure(kind)])
    # It comes first: connections are accepted in order, so the server has it once it has the requests of the others. One
    # that is closed before it was accepted is reset instead of ended.
    idle = socket.create_connection(("127.0.0.1", int(server.anthropic_url.rsplit(":", 1)[1])))
    waiting = [threading.Thread(target=hung, args=(lambda: ask(server, "openai-chat", True, timeout=20),)) for _ in range(8)]
    for thread in waiting:
        thread.start()
    while len(server.asked) < 8:
        time.sleep(0.01)
    began = time.monotonic()
    server.close()
    assert time.monotonic() - began < 1
    for thread in waiting:
        thread.join(2)
    assert set(threading.enumerate()) <= before
    assert idle.recv(1) == b""
    idle.close()
    server.close()
    assert capfd.readouterr().err == ""


def hung(call: Callable[[], Any]) -> None:
    with pytest.raises(openai.APIConnectionError):
        call()


def test_a_client_that_goes_away_is_not_told_of(capfd: pytest.CaptureFixture[str]) -> None:
    with ScriptedServer([Reply("word " * 400_000, chunk=1000)]) as server, client(server, "openai-chat") as c:
        for _ in range(3):
            stream = c.chat.completions.create(model="m", messages=MESSAGES, stream=True)
            next(iter(stream))
            stream.close()
    assert capfd.readouterr().err == "" and not server.errors


def test_a_script_that_fails_is_heard_of() -> None:
    def answer(asked: Asked) -> Reply:
        raise KeyError("not in the script")

    heard, answered = pytest.raises(KeyError, match="not in the script"), pytest.raises(openai.InternalServerError)
    with heard, ScriptedServer(answer) as server, answered:
        ask(server, "openai-chat", False)
    with pytest.raises(ValueError, match="empty"):
        ScriptedServer([])


def test_a_request_that_is_none() -> None:
    with ScriptedServer([Reply("x")]) as server:
        for path, data, status in (("/chat/completions", b"{", 400), ("/chat/completions", b"[]", 400), ("/x", b"{}", 404)):
            with pytest.raises(urllib.error.HTTPError) as caught:
                urllib.request.urlopen(server.base_url + path, data)
            assert caught.value.code == status
            caught.value.close()
        assert not server.asked
