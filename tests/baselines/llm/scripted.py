"""A scripted model server on loopback: OpenAI-compatible and Anthropic APIs, right and failing, for tests of clients.

    with ScriptedServer([Failure("status", status=429, retry_after=1), Reply("yes")]) as server:
        client = openai.OpenAI(base_url=server.base_url, api_key="sk-test")

A script is a list used up in order (its last entry is then repeated) or a function that is called for every request.
An exception in that function answers 500 and is raised again when the ``with`` block ends.
"""

from __future__ import annotations

import contextlib
import json
import math
import select
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal, cast, get_args
from urllib.parse import urlsplit

from kbx_env.baselines.llm.caller import PROBE

Api = Literal["openai-chat", "openai-completions", "anthropic"]
Kind = Literal["status", "invalid_json", "html", "hang_up", "truncate", "stall", "slow_headers", "empty_choices",
               "null_content", "no_done", "error_event"]  # fmt: skip
KINDS: tuple[Kind, ...] = get_args(Kind)
PATHS: dict[str, Api] = dict(zip(("/v1/chat/completions", "/v1/completions", "/v1/messages"), get_args(Api)))
HTML = b"<html>\n<head><title>502 Bad Gateway</title></head>\n<body><h1>502 Bad Gateway</h1>nginx</body>\n</html>\n"
ANTHROPIC_ENDS = {"stop": "end_turn", "length": "max_tokens", "content_filter": "refusal"}
ANTHROPIC_ERRORS = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error",
                    404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error", 529: "overloaded_error"}  # fmt: skip
OPENAI_CODES = {401: "invalid_api_key", 404: "model_not_found", 429: "rate_limit_exceeded"}


@dataclass(frozen=True)
class Asked:
    """One request, as the server read it. Message contents are plain text; ``body`` has the parts as they came."""

    path: str
    api: Api
    body: dict[str, Any]
    headers: dict[str, str]
    messages: list[dict[str, str]]
    text: str
    number: int
    model: str


@dataclass(frozen=True)
class Reply:
    """A right answer. ``finish``: stop, length, content_filter, refusal (the text is then the refusal), or any word.

    ``delay`` passes before the headers; ``chunk`` is in characters; ``tokens=False`` sends no usage.
    """

    text: str
    finish: str = "stop"
    reasoning: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cost: float | None = None
    delay: float = 0.0
    chunk: int = 20
    tokens: bool = True


@dataclass(frozen=True)
class Failure:
    """A failing answer.

    ``status`` is for status (default 500), html (default 200) and error_event (the error's type); ``message`` and
    ``code`` for status and error_event. After ``seconds``, stall and slow_headers go on with ``reply`` as if nothing
    were. ``clean`` ends a truncated body as HTTP wants it (a proxy in between does that), else the connection breaks.
    """

    kind: Kind
    status: int | None = None
    message: str | None = None
    code: str | None = None
    retry_after: float | str | None = None
    seconds: float = 30.0
    clean: bool = False
    reply: Reply = Reply("The server set out to say this whole sentence, and whether it did is for the client to find out.")

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"no failure {self.kind!r}: one of {', '.join(KINDS)}")


Script = Callable[[Asked], Reply | Failure] | Sequence[Reply | Failure]
Event = tuple[str, Any]  # the event's name ("" for none) and its data (a str is sent as it is)


@dataclass
class _Plan:
    """What to send: bytes, and floats for silences. Status 0: no answer; no ``length``: chunked; ``cut`` breaks off."""

    pieces: list[bytes | float] = field(default_factory=list)
    status: int = 200
    mime: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)
    length: int | None = None
    before: float = 0.0
    cut: bool = False


def _plain(content: Any) -> str:
    """The text of a message, whose content may be a list of parts."""
    if isinstance(content, list):
        return "".join(_plain(part.get("text")) if isinstance(part, dict) else str(part) for part in content)
    return content if isinstance(content, str) else ""


def _messages(api: Api, body: dict[str, Any]) -> list[dict[str, str]]:
    if api == "openai-completions":
        return [{"role": "user", "content": _plain(body.get("prompt"))}]
    system = [{"role": "system", "content": body["system"]}] if api == "anthropic" and body.get("system") else []
    return [{"role": m["role"], "content": _plain(m.get("content"))} for m in [*system, *body.get("messages", [])]]


def _error(asked: Asked, failure: Failure) -> dict[str, Any]:
    """An error body in the API's own shape; that of a 401 repeats the key that came."""
    status, message, code = failure.status or 500, failure.message, failure.code
    if message is None:
        key = asked.headers.get("x-api-key") or asked.headers.get("authorization", "").removeprefix("Bearer ")
        message = f"Incorrect API key provided: {key}." if status == 401 else f"Scripted error {status}."
    if asked.api == "anthropic":
        error = {"type": code or ANTHROPIC_ERRORS.get(status, "api_error"), "message": message}
        return {"type": "error", "error": error, "request_id": f"req_{asked.number}"}
    kind = "server_error" if status >= 500 else "requests" if status == 429 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code or OPENAI_CODES.get(status)}}


def _usage(asked: Asked, reply: Reply) -> dict[str, Any] | None:
    if not reply.tokens:
        return None
    first = sum(len(m["content"].split()) for m in asked.messages) if reply.prompt_tokens is None else reply.prompt_tokens
    words = len(f"{reply.reasoning or ''} {reply.text}".split())
    second = words if reply.completion_tokens is None else reply.completion_tokens
    usage = {"prompt_tokens": first, "completion_tokens": second, "total_tokens": first + second}
    usage = {"input_tokens": first, "output_tokens": second} if asked.api == "anthropic" else usage
    return usage if reply.cost is None else {**usage, "cost": reply.cost}


def _openai(asked: Asked, reply: Reply, kind: str) -> tuple[dict[str, Any], list[list[Event]]]:
    chat, usage = asked.api == "openai-chat", _usage(asked, reply)
    what = "chat.completion" if chat else "text_completion"
    common = {"id": f"cmpl-{asked.number}", "created": int(time.time()), "model": asked.model}
    refused, finish = chat and reply.finish == "refusal", reply.finish.replace("refusal", "content_filter")
    text = None if kind == "null_content" else reply.text

    def full(inner: dict[str, Any], end: str | None) -> dict[str, Any]:
        choices = [{"index": 0, **inner, "logprobs": None, "finish_reason": end}]
        return {**common, "object": what, "choices": [] if kind == "empty_choices" else choices}

    def chunk(delta: dict[str, Any], end: str | None = None) -> Event:
        inner = {"delta": delta} if chat else {"text": delta.get("content", "")}
        return "", {**full(inner, end), "object": what + ".chunk" * chat}

    message = {"role": "assistant", "content": None if refused else text, "refusal": text if refused else None}
    message |= {} if reply.reasoning is None else {"reasoning_content": reply.reasoning}
    whole = full({"message": message} if chat else {"text": text}, finish) | ({"usage": usage} if usage else {})
    body = [chunk({"reasoning_content": piece}) for piece in _pieces((reply.reasoning or "") * chat, reply.chunk)]
    body += [chunk({"refusal" if refused else "content": piece}) for piece in _pieces(text, reply.chunk)]
    tail = [chunk({}, finish)]
    if usage and (asked.body.get("stream_options") or {}).get("include_usage"):
        tail.append(("", {**tail[0][1], "choices": [], "usage": usage}))
    return whole, [[chunk({"role": "assistant", "content": ""})] if chat else [], body, [*tail, ("", "[DONE]")]]


def _anthropic(asked: Asked, reply: Reply, kind: str) -> tuple[dict[str, Any], list[list[Event]]]:
    usage, end = _usage(asked, reply), ANTHROPIC_ENDS.get(reply.finish, reply.finish)
    blocks: list[dict[str, Any]] = [{"type": "text", "text": None if kind == "null_content" else reply.text}]
    if reply.reasoning is not None:
        blocks.insert(0, {"type": "thinking", "thinking": reply.reasoning, "signature": "signed"})
    whole: dict[str, Any] = {"id": f"msg_{asked.number}", "type": "message", "role": "assistant", "model": asked.model}
    start = {**whole, "content": [], "stop_reason": None, "stop_sequence": None}
    start |= {"usage": {**usage, "output_tokens": 1}} if usage else {}
    body: list[dict[str, Any]] = []
    blocks = [] if kind == "empty_choices" else blocks
    for index, block in enumerate(blocks):
        name = block["type"]  # and the key of its words
        deltas = [{"type": f"{name}_delta", name: piece} for piece in _pieces(block[name], reply.chunk)]
        empty = {key: value if key == "type" else "" for key, value in block.items()}
        if name == "thinking":
            deltas.append({"type": "signature_delta", "signature": block["signature"]})
        body.append({"type": "content_block_start", "index": index, "content_block": empty})
        body.extend({"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas)
        body.append({"type": "content_block_stop", "index": index})
    ended = {"stop_reason": end, "stop_sequence": None}
    counted = {"usage": usage} if usage else {}
    head: list[dict[str, Any]] = [{"type": "message_start", "message": start}, {"type": "ping"}]
    tail: list[dict[str, Any]] = [{"type": "message_delta", "delta": ended, **counted}, {"type": "message_stop"}]
    events: list[list[Event]] = [[(event["type"], event) for event in part] for part in (head, body, tail)]
    return {**whole, "content": None if kind == "null_content" else blocks, **ended, **counted}, events


def _pieces(text: str | None, size: int) -> list[str | None]:
    """A null stays one piece."""
    return [None] if text is None else [text[i : i + size] for i in range(0, len(text), size)]


def _sse(event: Event) -> bytes:
    said = event[1] if isinstance(event[1], str) else json.dumps(event[1])
    return (f"event: {event[0]}\n" * bool(event[0]) + f"data: {said}\n\n").encode()


def _json(data: dict[str, Any], status: int, headers: dict[str, str] | None = None) -> _Plan:
    raw = json.dumps(data).encode()
    return _Plan([raw], status, headers=headers or {}, length=len(raw))


def _plan(asked: Asked, answer: Reply | Failure) -> _Plan:
    """What an answer means on the wire."""
    failure = answer if isinstance(answer, Failure) else None
    reply = answer.reply if isinstance(answer, Failure) else answer
    kind = failure.kind if failure else ""
    if kind == "hang_up":
        return _Plan(status=0)
    if failure and kind == "html":
        return _Plan([HTML], failure.status or 200, "text/html", length=len(HTML))
    if failure and (kind == "status" or (kind == "error_event" and not asked.body.get("stream"))):
        extra = {} if failure.retry_after is None else {"Retry-After": str(failure.retry_after)}
        return _json(_error(asked, failure), (failure.status or 500) if kind == "status" else 200, extra)
    whole, (head, body, tail) = (_anthropic if asked.api == "anthropic" else _openai)(asked, reply, kind)
    before = reply.delay + (failure.seconds if failure and kind == "slow_headers" else 0)
    if not asked.body.get("stream"):
        data = json.dumps(whole).encode()
        first, second = data[: len(data) // 2], data[len(data) // 2 :]
        if failure and kind in ("truncate", "invalid_json"):
            cut = kind == "truncate" and not failure.clean
            return _Plan([first], length=len(data if cut else first), before=before, cut=cut)
        silence: list[bytes | float] = [failure.seconds] if failure and kind == "stall" else []
        return _Plan([first, *silence, second], length=len(data), before=before)
    half = max(1, len(body) // 2)
    begun, rest = list(map(_sse, head + body[:half])), list(map(_sse, body[half:] + tail))
    plan = _Plan([*begun, *rest], mime="text/event-stream; charset=utf-8", before=before)
    if kind == "no_done":
        plan.pieces = [*begun, *rest[:-1]]
    elif failure and kind == "truncate":
        plan.pieces, plan.cut = [*begun], not failure.clean
    elif kind == "invalid_json":
        plan.pieces = [*begun, _sse((tail[0][0], '{"id": "half of a li')), *rest]
    elif failure and kind == "stall":
        plan.pieces = [*begun, failure.seconds, *rest]
    elif failure and kind == "error_event":
        plan.pieces = [*begun, _sse(("error" if asked.api == "anthropic" else "", _error(asked, failure)))]
    return plan


def _quiet(connection: socket.socket, seconds: float = 0.0) -> bool:
    """Whether the other end stayed, and so did the server, for so long."""
    try:
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        return not poll.poll(math.ceil(seconds * 1000))
    except (OSError, ValueError):
        return False


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        facts = {"object": "model", "created": 1, "owned_by": "test", "type": "model", "created_at": "2025-01-01T00:00:00Z"}
        models = [{"id": name, "display_name": name, **facts} for name in cast(_Server, self.server).owner.models]
        known = urlsplit(self.path).path == "/v1/models"
        found = {"object": "list", "data": models, "has_more": False} if known else {"error": {"message": "no such path"}}
        self._send(_json(found, 200 if known else 404))

    def do_POST(self) -> None:
        owner = cast(_Server, self.server).owner
        path, raw = urlsplit(self.path).path, self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            api, body = PATHS[path], json.loads(raw)
            if PROBE.encode() in raw:
                owner.probes += 1
                messages = _messages(api, body)
                asked = Asked(path, api, body, {k.lower(): v for k, v in self.headers.items()}, messages, PROBE, -1, body["model"])
                return self._send(_plan(asked, owner.probe))
            asked = owner._begin(self.connection, path, api, body, {k.lower(): v for k, v in self.headers.items()})
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            found = {"error": {"message": f"no request for {path}: {error!r}"}}
            return self._send(_json(found, 400 if path in PATHS else 404))
        try:
            self._send(_plan(asked, owner._answer(asked)))
        finally:
            owner._land(self.connection)

    def _send(self, plan: _Plan) -> None:
        self.close_connection |= plan.cut
        if not plan.status or (plan.before and not _quiet(self.connection, plan.before)):
            self.close_connection = True
            return
        self.send_response(plan.status)
        self.send_header("Content-Type", plan.mime)
        for name, value in plan.headers.items():
            self.send_header(name, value)
        self.send_header(*(("Transfer-Encoding", "chunked") if plan.length is None else ("Content-Length", str(plan.length))))
        self.end_headers()
        for i, piece in enumerate(plan.pieces):
            if isinstance(piece, float | int):
                if _quiet(self.connection, piece):
                    continue
                self.close_connection = True
                return
            if last := i == len(plan.pieces) - 1:  # before the client has all of it and asks again: that is not two at once
                cast(_Server, self.server).owner._land(self.connection)
            if plan.length is None:
                piece = b"%x\r\n%s\r\n" % (len(piece), piece) + b"0\r\n\r\n" * (last and not plan.cut)
            self.wfile.write(piece)


class _Server(ThreadingHTTPServer):
    request_queue_size = 1024
    daemon_threads = True
    owner: ScriptedServer

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # HTTPServer's asks the resolver for a name, which can take seconds
        self.server_name, self.server_port = "127.0.0.1", self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        thread = threading.Thread(target=self.process_request_thread, args=(request, client_address), daemon=True)
        self.owner._served.append((thread, request))
        thread.start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exc_info()[1]
        if isinstance(error, Exception) and not isinstance(error, OSError):  # a client that went away is no error
            self.owner.errors.append(error)


class ScriptedServer:
    """Serves the script from its making until ``close``. ``closing`` is set then: a script that waits can wait for it."""

    def __init__(
        self, answer: Script, models: Sequence[str] = ("scripted",), probe: Reply | Failure = Reply("ready")
    ) -> None:
        if not callable(answer) and not answer:
            raise ValueError("an empty script")
        self.probe = probe  # answers the probe before a run, which is counted in ``probes`` and is not in ``asked``
        self.probes = 0
        self.script, self.models = answer, tuple(models)
        self.asked: list[Asked] = []
        self.errors: list[Exception] = []
        self.most_at_once = 0
        self.closing, self._lock = threading.Event(), threading.Lock()
        self._served: list[tuple[threading.Thread, socket.socket]] = []
        self._flying: set[socket.socket] = set()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.owner = self
        self.anthropic_url = f"http://127.0.0.1:{self._server.server_port}"
        self.base_url = f"{self.anthropic_url}/v1"
        self._loop = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._loop.start()

    def close(self) -> None:
        """Break every connection and wait for every thread (for a second, should a script hang)."""
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._loop.join()
        for _, connection in self._served:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        until = time.monotonic() + 1.0
        for thread, _ in self._served:
            thread.join(max(0.0, until - time.monotonic()))

    def __enter__(self) -> ScriptedServer:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()
        if self.errors and error is None:
            raise self.errors[0]

    def _begin(self, connection: socket.socket, path: str, api: Api, body: Any, headers: dict[str, str]) -> Asked:
        messages = _messages(api, body)
        text = next((m["content"] for m in reversed(messages) if m["role"] == "user"), "")
        with self._lock:
            asked = Asked(path, api, body, headers, messages, text, len(self.asked), str(body.get("model", "")))
            self.asked.append(asked)
            self._flying.add(connection)
            if len(self._flying) > self.most_at_once:  # a request that its client gave up is no longer in flight
                self.most_at_once = max(self.most_at_once, sum(map(_quiet, self._flying)))
        return asked

    def _answer(self, asked: Asked) -> Reply | Failure:
        try:
            if callable(self.script):
                return self.script(asked)
            return self.script[min(asked.number, len(self.script) - 1)]
        except Exception as error:
            self.errors.append(error)
            return Failure("status", message=f"the script failed: {error!r}")

    def _land(self, connection: socket.socket) -> None:
        with self._lock:
            self._flying.discard(connection)
