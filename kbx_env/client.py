"""Clients of the grading service (``kbx serve``): ``Client`` and ``AsyncClient``, with the same ``Outcome`` as ``kbx_env.grade``.

    with Client("http://127.0.0.1:8300", token=TOKEN) as client:
        outcome = client.grade("math/softmax", source, split="train")

Both repeat what a broken connection or a busy service lost. A request has an id that the client chooses, so that a repeated
request is never graded twice. Needs the extra ``client``.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import queue
import ssl
import threading
import time
import uuid
from collections.abc import AsyncIterable, AsyncIterator, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kbx_env.errors import KbxError, UsageError
from kbx_env.extras import install_hint
from kbx_env.outcome import Fault, FaultKind, Outcome, Stage, Verdict

if TYPE_CHECKING:
    import httpx
    import tenacity

__all__ = ["AsyncClient", "Client", "ServiceError"]

TIMEOUT = 1800.0
"""Default of ``timeout_s``, in seconds: a step of training may wait behind the gradings of other trainers."""
BATCH = 128
"""Submissions of one request for a batch. Smaller ones are repeated sooner after a cut, larger ones cost fewer requests."""
STREAMS = 4
"""Requests for batches at a time: the service always has the next one before the last one ends."""
_WAIT = 10.0
"""Seconds for which one request asks the service to wait for an outcome; then the client asks again. ``close`` in another
thread has to wait so long for a thread that is asking."""
_SILENCE = 25.0
"""Seconds without a byte after which a connection counts as cut, beyond a wait that was asked for. A stream has a line at
least every 10 s (``kbx_env.service.app.BEAT``)."""
_CONNECT = 10.0
"""Seconds for making a connection."""
_ASK = 15.0
"""Seconds for a request that waits for no outcome, repetitions included."""
_BUSY = (429, 502, 503, 504)
"""Statuses that say: try again later. 502 and 504 are a reverse proxy's."""
_REFUSED = (400, 401, 403, 404, 405, 409, 413, 422)
"""Statuses that say: the request is wrong, and will be the next time."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0
"""First and longest pause before a repetition, in seconds, where the service asks for none."""

Pair = tuple[str, str | bytes]
"""(task, source)."""
_Put = Callable[[tuple[int, Outcome]], None]
"""Takes an outcome of a batch, with the number of its pair."""


class ServiceError(KbxError):
    """The grading service cannot be reached, or failed."""


@dataclass(frozen=True)
class _Call:
    """One HTTP request of a flow: method, path, query and JSON body."""

    method: str
    path: str
    params: Mapping[str, Any] = field(default_factory=dict)
    body: Any = None
    missing: bool = False
    """Whether the flow itself handles status 404."""
    seconds: float | None = None
    """Longest silence of the connection; ``None`` for the usual one."""

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of httpx's ``request``."""
        limit = {} if self.seconds is None else {"timeout": self.seconds}
        return {"method": self.method, "url": self.path, "params": dict(self.params), "json": self.body, **limit}


_Flow = Generator[_Call, Any, Any]
"""Yields calls, is sent their JSON replies (``None`` for 404), and returns the result."""


class _Busy(Exception):
    """The service asks to try again.

    Args:
        text: why.
        pause: seconds that the service asks for; ``None`` if it does not say.
    """

    def __init__(self, text: str, pause: float | None) -> None:
        super().__init__(text)
        self.pause = pause


def _package() -> Any:
    try:
        import httpx
        import tenacity  # noqa: F401
    except ImportError as e:
        raise UsageError(f"the client of the grading service needs {e.name}; {install_hint('client')}") from e
    return httpx


class _Base:
    """What both clients share: settings, the requests that they make, and how they read replies."""

    def __init__(self, url: str, token: str | None = None, timeout_s: float = TIMEOUT) -> None:
        """Make a client. It connects with the first request.

        Args:
            url: of the service, such as ``http://127.0.0.1:8300``; a path is kept, for reverse proxies.
            token: bearer token; by default the environment variable ``KBX_TOKEN``, if it is set.
            timeout_s: seconds for one outcome, waits and repetitions included; for a batch, seconds without any outcome.

        Raises:
            UsageError: no HTTP address, no time, a token that cannot be one, or httpx or tenacity is not installed.
        """
        _package()
        if not isinstance(url, str) or not url.startswith(("http://", "https://")):
            raise UsageError(f"the address of the grading service is {url!r}; such as http://127.0.0.1:8300")
        if not isinstance(timeout_s, int | float) or not timeout_s > 0:
            raise UsageError(f"timeout_s is {timeout_s!r}; seconds, more than 0")
        token = token or os.environ.get("KBX_TOKEN") or None
        if token is not None and not (isinstance(token, str) and token.isascii() and token.isprintable() and " " not in token):
            raise UsageError("the token of the grading service has characters that no token has; give it without line break")
        self.url, self.token, self.timeout_s = url.rstrip("/"), token, timeout_s
        self._unconnected()

    def _unconnected(self) -> None:
        """Set what belongs to the connections of one process to none."""
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        return {"url": self.url, "token": self.token, "timeout_s": self.timeout_s}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state)
        self._unconnected()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r}, timeout_s={self.timeout_s:g})"  # never the token

    def _settings(self) -> dict[str, Any]:
        httpx = _package()
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        return {
            "base_url": self.url, "headers": headers, "timeout": httpx.Timeout(_SILENCE + _WAIT, connect=_CONNECT),
            "limits": httpx.Limits(max_connections=None, max_keepalive_connections=100, keepalive_expiry=30.0),
        }  # fmt: skip

    def _reply(self, response: httpx.Response, missing: bool = False) -> Any:
        """Read a reply whose body was read.

        Args:
            response: of the service.
            missing: return ``None`` for status 404.

        Returns:
            The JSON value.

        Raises:
            UsageError: the service refuses the request.
            _Busy: it may accept the request later.
            ServiceError: it failed.
        """
        status = response.status_code
        if status == 404 and missing:
            return None
        if status < 400:
            try:
                return response.json()
            except ValueError as e:
                raise ServiceError(f"{self.url} is no grading service: its reply is no JSON ({e})") from e
        text = _detail(response)
        if status in _BUSY:
            raise _Busy(f"{self.url}: {text}", _pause_of(response))
        if status in _REFUSED:
            raise UsageError(f"{self.url}: {text}")
        raise ServiceError(f"{self.url}: status {status}: {text}")

    def _repeating(self, until: Callable[[], float]) -> dict[str, Any]:
        """Return the arguments of a tenacity retrying object.

        Args:
            until: returns the time of ``time.monotonic`` after which nothing is tried again.

        Returns:
            Keyword arguments.
        """
        import tenacity

        usual = tenacity.wait_random_exponential(multiplier=_FIRST_PAUSE, max=_LONGEST_PAUSE)

        def wait(state: tenacity.RetryCallState) -> float:
            error = state.outcome.exception() if state.outcome else None
            asked = error.pause if isinstance(error, _Busy) else None
            # Spread over a second: many clients that were sent away must not come back at once.
            pause = usual(state) if asked is None else asked + usual(state) / _LONGEST_PAUSE
            return max(0.0, min(pause, until() - time.monotonic()))

        return {
            "retry": tenacity.retry_if_exception(self._passes), "wait": wait,
            "stop": lambda _: time.monotonic() >= until(), "reraise": True,
        }  # fmt: skip

    def _passes(self, error: BaseException) -> bool:
        """Return whether an error may be gone when the request is made again.

        Raises:
            UsageError: the service's certificate is not trusted, which no repetition changes.
        """
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, ssl.SSLCertVerificationError):
            cause = cause.__cause__ or cause.__context__
        if cause is not None:
            raise UsageError(
                f"{self.url}: its certificate is not trusted ({cause.verify_message}); SSL_CERT_FILE=FILE names the certificates "
                "of the authority that made it"
            ) from error
        return isinstance(error, _interruptions())

    # -- the requests ----------------------------------------------------------------------

    def _grade(self, number: str, body: Mapping[str, Any], until: float) -> _Flow:
        """Submit and ask until there is an outcome; a service that forgot the request is asked from the start."""
        while True:
            reply = yield _Call("POST", "/v1/gradings", body={**body, "id": number, "wait": _waiting(until)})
            while reply is not None and reply.get("outcome") is None and reply["state"] in ("waiting", "running"):
                if time.monotonic() >= until:
                    raise _Busy("no verdict yet", None)
                reply = yield _Call("GET", f"/v1/gradings/{number}", {"wait": _waiting(until)}, missing=True)
            if reply is not None:
                return _outcome(reply)

    def _late(self, task: str, options: Mapping[str, Any], seconds: float, error: BaseException) -> Outcome:
        """Return the outcome of a grading that did not end in time: unknown, and no fault of the policy."""
        why = str(error) or type(error).__name__
        text = f"no verdict from {self.url} within {seconds:g} s: {why}"
        backend, grading = str(options.get("backend", "auto")), str(options.get("grading", "contract"))
        return Outcome(
            task, Verdict.INFRA_FAULT, Stage.COMPILE, backend, grading, Fault.INFRA, text, fault_kind=FaultKind.DEADLINE
        )


def _detail(response: httpx.Response) -> str:
    with contextlib.suppress(ValueError, AttributeError):
        found = response.json().get("detail")
        if found:
            return str(found)
    return f"status {response.status_code}"


def _pause_of(response: httpx.Response) -> float | None:
    try:
        return min(60.0, max(0.0, float(response.headers["Retry-After"])))
    except (KeyError, ValueError):
        return None


def _waiting(until: float) -> float:
    return round(max(0.0, min(_WAIT, until - time.monotonic())), 3)


def _submission(task: str, source: str | bytes, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON of one submission: its text, or its bytes in base64 where they are no UTF-8."""
    if not isinstance(task, str) or not isinstance(source, str | bytes):
        raise UsageError(f"cannot grade {str((task, source))[:80]!r}; give a task's id, and the source as str or bytes")
    chosen = dict(options)
    first: dict[str, Any] = {name: chosen.pop(name) for name in ("priority", "deadline") if name in chosen}
    data = source.encode("utf-8", "surrogatepass") if isinstance(source, str) else source
    try:
        text = {"source": data.decode()}
    except UnicodeDecodeError:
        text = {"source_base64": base64.b64encode(data).decode()}
    return {"task": task, **text, "options": {k: v for k, v in chosen.items() if v is not None}, **first}


def _outcome(reply: Mapping[str, Any]) -> Outcome:
    if reply.get("outcome") is None:
        raise ServiceError(f"grading {reply.get('id')} has no outcome: it is {reply.get('state')}")
    return Outcome.from_dict(reply["outcome"])


@dataclass
class _Batch:
    """Part of a batch: the submissions without an outcome, by number, and their ids. Ids stay when a request is repeated."""

    left: dict[str, int]
    bodies: dict[str, dict[str, Any]]

    @classmethod
    def of(cls, numbered: Sequence[tuple[int, Pair]], options: Mapping[str, Any]) -> _Batch:
        """Give an id to each submission."""
        ids = {uuid.uuid4().hex: n for n, _ in numbered}
        made = zip(ids, (_submission(task, source, options) for _, (task, source) in numbered), strict=True)
        return cls(ids, {number: {**body, "id": number} for number, body in made})

    def body(self) -> dict[str, Any]:
        """Return the JSON of a request for what is left."""
        return {"gradings": [self.bodies[number] for number in self.left]}

    def take(self, line: str, put: _Put, last: list[float], patience: float) -> None:
        """Read a line of the stream; a blank one only shows that the connection lives.

        Args:
            line: of the stream.
            put: gets the outcome, if there is one.
            last: holds the time of the last outcome, in seconds of ``time.monotonic``.
            patience: seconds without an outcome after which the stream is given up.

        Raises:
            _Busy: there was no outcome for so long.
        """
        if not line.strip():
            if time.monotonic() - last[0] > patience:
                raise _Busy("no outcome", None)
            return
        try:
            reply = json.loads(line)
        except ValueError as e:
            raise _Busy("the stream was cut", None) from e
        number = self.left.get(reply["id"])
        if number is None:  # was read before the connection was cut
            return
        outcome = _outcome(reply)
        del self.left[reply["id"]], self.bodies[reply["id"]]
        last[0] = time.monotonic()
        put((number, outcome))

    def late(self, client: _Base, error: BaseException, options: Mapping[str, Any], put: _Put) -> None:
        """Hand over what is left as infrastructure faults."""
        for number, n in self.left.items():
            put((n, client._late(self.bodies[number]["task"], options, client.timeout_s, error)))


def _chunks(pairs: Iterable[Pair]) -> Iterator[list[tuple[int, Pair]]]:
    numbered = iter(enumerate(pairs))
    while chunk := list(itertools.islice(numbered, BATCH)):
        for _, pair in chunk:
            if not (isinstance(pair, Sequence) and len(pair) == 2):
                raise UsageError(f"cannot grade {str(pair)[:80]!r}; give (task, source)")
        yield chunk


class Client(_Base):
    """A client of the grading service. Thread-safe; can be pickled, and used after a fork: each process connects anew.

    Attributes:
        url: of the service.
        token: bearer token; ``None`` for none.
        timeout_s: seconds for one outcome, or for a batch without any outcome.
    """

    def _unconnected(self) -> None:
        self._http: httpx.Client | None = None
        self._process, self._lock, self._closings = 0, threading.Lock(), 0

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections. Requests in progress are not repeated; a later request opens new connections."""
        with self._lock:
            self._closings += 1
            if self._http is not None and self._process == os.getpid():
                self._http.close()
            self._http = None

    def grade(self, task: str, source: str | bytes, **options: Any) -> Outcome:
        """Grade one source.

        Args:
            task: ``category/name``.
            source: the submission, text or raw bytes.
            **options: fields of ``kbx_env.options.GradeOptions``; also ``priority`` (higher goes first) and ``deadline``
                (seconds from submission to outcome, on the service).

        Returns:
            The outcome: an infrastructure fault where ``timeout_s`` passed without one.

        Raises:
            UsageError: an unknown task or option, or the service refuses the token.
            ServiceError: it is no grading service, or it failed.
        """
        return self.grade_within(self.timeout_s, task, source, **options)

    def grade_within(self, seconds: float, task: str, source: str | bytes, **options: Any) -> Outcome:
        """Do ``grade`` with another limit of time than ``timeout_s``.

        Args:
            seconds: for the outcome, waits and repetitions included.
            task: ``category/name``.
            source: the submission.
            **options: as for ``grade``.

        Returns:
            The outcome.

        Raises:
            UsageError: as ``grade``.
            ServiceError: as ``grade``.
        """
        number, until = uuid.uuid4().hex, time.monotonic() + seconds
        body = _submission(task, source, options)
        try:
            outcome: Outcome = self._run(self._grade(number, body, until), until)
            return outcome
        except UsageError:
            raise
        except BaseException as e:
            self._withdraw([number])  # nobody waits for it any more
            if isinstance(e, _interruptions()):
                return self._late(task, options, seconds, e)
            raise

    def grade_many(self, pairs: Iterable[Pair], **options: Any) -> Iterator[tuple[int, Outcome]]:
        """Grade many sources; outcomes come as they end.

        Args:
            pairs: (task, source); read as far as the service has room.
            **options: as for ``grade``, the same for all.

        Yields:
            (number of the pair, from 0; outcome). An outcome is an infrastructure fault where ``timeout_s`` passed without
            any outcome of its part of the batch.

        Raises:
            UsageError: an unknown task or option, or the service refuses the token.
            ServiceError: it is no grading service, or it failed.
        """
        found: queue.SimpleQueue[tuple[int, Outcome] | BaseException | None] = queue.SimpleQueue()
        stop = threading.Event()
        chunks, running = _chunks(pairs), 0

        def work(batch: _Batch) -> None:
            try:
                self._stream(batch, options, found.put, stop)
                found.put(None)
            except BaseException as e:
                found.put(e)

        try:
            while True:
                for chunk in itertools.islice(chunks, STREAMS - running):
                    batch = _Batch.of(chunk, options)
                    threading.Thread(target=work, args=(batch,), name="batch", daemon=True).start()
                    running += 1
                if not running:
                    return
                got = found.get()
                if isinstance(got, BaseException):
                    raise got
                if got is None:
                    running -= 1
                else:
                    yield got
        finally:
            stop.set()

    def _stream(self, batch: _Batch, options: Mapping[str, Any], put: _Put, stop: threading.Event) -> None:
        """Hand over the outcomes of one part of a batch; ask again for what is left after a cut."""
        import tenacity

        last = [time.monotonic()]

        def once() -> None:
            with self._client().stream("POST", "/v1/batches", json=batch.body(), timeout=_patience()) as response:
                if response.status_code >= 400:
                    response.read()
                    self._reply(response)
                for line in response.iter_lines():
                    if stop.is_set():
                        return
                    batch.take(line, put, last, self.timeout_s)
            if batch.left:
                raise _Busy("the stream ended early", None)

        try:
            tenacity.Retrying(**self._repeating(lambda: last[0] + self.timeout_s))(once)
        except _interruptions() as e:
            batch.late(self, e, options, put)
        finally:
            if batch.left:
                self._withdraw(batch.left)

    def _withdraw(self, ids: Iterable[str]) -> None:
        for number in ids:
            try:
                self._run(_once(_withdrawal(number)), time.monotonic())
            except Exception:  # the service is away: it keeps them, and nobody can change that
                return

    def submit(self, task: str, source: str | bytes, **options: Any) -> str:
        """Hand in a source without waiting.

        Args:
            task: ``category/name``.
            source: the submission.
            **options: as for ``grade``.

        Returns:
            The id, for ``result`` and ``cancel``.

        Raises:
            UsageError: an unknown task or option, or the service refuses the token.
            ServiceError: the service cannot be reached, or failed.
        """
        number = uuid.uuid4().hex
        self._ask(_Call("POST", "/v1/gradings", body={**_submission(task, source, options), "id": number, "wait": 0}))
        return number

    def result(self, id: str, wait: float = 0.0) -> Outcome | None:
        """Return the outcome of a submitted source.

        Args:
            id: from ``submit``.
            wait: seconds to wait for it, at most 10.

        Returns:
            The outcome; ``None`` if there is none yet.

        Raises:
            UsageError: no such id.
            ServiceError: the grading was cancelled, or the service cannot be reached or failed.
        """
        reply = self._ask(_Call("GET", f"/v1/gradings/{id}", {"wait": min(wait, _WAIT)}))
        return None if reply["state"] in ("waiting", "running") else _outcome(reply)

    def cancel(self, id: str) -> bool:
        """Withdraw a submitted source.

        Args:
            id: from ``submit``.

        Returns:
            Whether it was withdrawn; false if it had its outcome already.

        Raises:
            UsageError: no such id.
            ServiceError: the service cannot be reached, or failed.
        """
        return bool(self._ask(_Call("DELETE", f"/v1/gradings/{id}"))["state"] == "cancelled")

    def tasks(self) -> list[dict[str, Any]]:
        """Return the service's tasks: id, entry, split, difficulty, judge, number of cases.

        Returns:
            A dictionary for each task.

        Raises:
            UsageError: the service refuses the token.
            ServiceError: it cannot be reached, or failed.
        """
        found: list[dict[str, Any]] = self._ask(_Call("GET", "/v1/tasks"))
        return found

    def prompt(self, task: str) -> str:
        """Return what a model is asked for a task, on the backend of the service.

        Args:
            task: ``category/name``.

        Returns:
            The text.

        Raises:
            UsageError: no such task, or the service refuses the token.
            ServiceError: it cannot be reached, or failed.
        """
        return str(self._ask(_Call("GET", f"/v1/tasks/{_quoted(task)}"))["prompt"])

    def info(self) -> dict[str, Any]:
        """Return what the service grades on: ``backend``, ``environment`` (device and versions), ``workers`` and limits.

        Returns:
            The JSON object.

        Raises:
            UsageError: the service refuses the token.
            ServiceError: it cannot be reached, or failed.
        """
        found: dict[str, Any] = self._ask(_Call("GET", "/v1/service"))
        return found

    def health(self) -> dict[str, Any]:
        """Return the state of the service: ``status``, gradings that wait and that run. It is not repeated after an error.

        Returns:
            The JSON object.

        Raises:
            ServiceError: the service cannot be reached, or is not ready.
        """
        found: dict[str, Any] = self._ask(_Call("GET", "/readyz"), time.monotonic())
        return found

    def _ask(self, call: _Call, until: float | None = None) -> Any:
        until = time.monotonic() + min(self.timeout_s, _ASK) if until is None else until
        try:
            return self._run(_once(call), until)
        except _interruptions() as e:
            raise ServiceError(_unreachable(self.url, e)) from e

    def _run(self, flow: _Flow, until: float) -> Any:
        import tenacity

        reply: Any = None
        closings = self._closings
        while True:
            try:
                call = flow.send(reply)
            except StopIteration as e:
                return e.value
            repeating = self._repeating(lambda: until if closings == self._closings else 0.0)
            reply = tenacity.Retrying(**repeating)(self._send, call)

    def _send(self, call: _Call) -> Any:
        response = self._client().request(**call.arguments())
        return self._reply(response, call.missing)

    def _client(self) -> httpx.Client:
        with self._lock:
            if self._http is None or self._process != os.getpid():
                self._http, self._process = _package().Client(**self._settings()), os.getpid()
            return self._http


class AsyncClient(_Base):
    """The same client with async and await. May be used from several event loops, one after the other; can be pickled.

    Attributes:
        url: of the service.
        token: bearer token; ``None`` for none.
        timeout_s: seconds for one outcome, or for a batch without any outcome.
    """

    def _unconnected(self) -> None:
        self._http: httpx.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections. A later request opens new ones."""
        if self._http is not None and self._loop is asyncio.get_running_loop():
            await self._http.aclose()
        self._http = None

    async def grade(self, task: str, source: str | bytes, **options: Any) -> Outcome:
        """Grade one source; see ``Client.grade``. Cancelling the task withdraws the submission.

        Args:
            task: ``category/name``.
            source: the submission, text or raw bytes.
            **options: as for ``Client.grade``.

        Returns:
            The outcome: an infrastructure fault where ``timeout_s`` passed without one.

        Raises:
            UsageError: an unknown task or option, or the service refuses the token.
            ServiceError: it is no grading service, or it failed.
        """
        number, until = uuid.uuid4().hex, time.monotonic() + self.timeout_s
        body = _submission(task, source, options)
        try:
            outcome: Outcome = await self._run(self._grade(number, body, until), until)
            return outcome
        except UsageError:
            raise
        except BaseException as e:
            await self._withdraw([number])
            if isinstance(e, _interruptions()):
                return self._late(task, options, self.timeout_s, e)
            raise

    async def grade_many(
        self, pairs: Iterable[Pair] | AsyncIterable[Pair], **options: Any
    ) -> AsyncIterator[tuple[int, Outcome]]:
        """Grade many sources; outcomes come as they end. See ``Client.grade_many``.

        Args:
            pairs: (task, source); an asynchronous iterable is read to its end first.
            **options: as for ``grade``, the same for all.

        Yields:
            (number of the pair, from 0; outcome).

        Raises:
            UsageError: an unknown task or option, or the service refuses the token.
            ServiceError: it is no grading service, or it failed.
        """
        if isinstance(pairs, AsyncIterable):
            pairs = [pair async for pair in pairs]
        found: asyncio.Queue[tuple[int, Outcome] | BaseException | None] = asyncio.Queue()
        chunks, running = _chunks(pairs), set[asyncio.Task[None]]()

        async def work(batch: _Batch) -> None:
            try:
                await self._stream(batch, options, found.put_nowait)
                found.put_nowait(None)
            except Exception as e:
                found.put_nowait(e)

        open_streams = 0
        try:
            while True:
                for chunk in itertools.islice(chunks, STREAMS - open_streams):
                    running.add(asyncio.create_task(work(_Batch.of(chunk, options))))
                    open_streams += 1
                if not open_streams:
                    return
                got = await found.get()
                if isinstance(got, BaseException):
                    raise got
                if got is None:
                    open_streams -= 1
                else:
                    yield got
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _stream(self, batch: _Batch, options: Mapping[str, Any], put: _Put) -> None:
        import tenacity

        last = [time.monotonic()]

        async def once() -> None:
            asked = self._client().stream("POST", "/v1/batches", json=batch.body(), timeout=_patience())
            async with asked as response:
                if response.status_code >= 400:
                    await response.aread()
                    self._reply(response)
                async for line in response.aiter_lines():
                    batch.take(line, put, last, self.timeout_s)
            if batch.left:
                raise _Busy("the stream ended early", None)

        try:
            await tenacity.AsyncRetrying(**self._repeating(lambda: last[0] + self.timeout_s))(once)
        except _interruptions() as e:
            batch.late(self, e, options, put)
        finally:
            if batch.left:
                await self._withdraw(batch.left)

    async def _withdraw(self, ids: Iterable[str]) -> None:
        async def withdraw() -> None:
            for number in ids:
                await self._run(_once(_withdrawal(number)), time.monotonic())

        with contextlib.suppress(Exception, asyncio.CancelledError):
            await asyncio.wait_for(withdraw(), _CONNECT)

    async def submit(self, task: str, source: str | bytes, **options: Any) -> str:
        """Hand in a source without waiting; see ``Client.submit``.

        Args:
            task: ``category/name``.
            source: the submission.
            **options: as for ``grade``.

        Returns:
            The id, for ``result`` and ``cancel``.

        Raises:
            UsageError: an unknown task or option, or the service refuses the token.
            ServiceError: the service cannot be reached, or failed.
        """
        number = uuid.uuid4().hex
        body = {**_submission(task, source, options), "id": number, "wait": 0}
        await self._ask(_Call("POST", "/v1/gradings", body=body))
        return number

    async def result(self, id: str, wait: float = 0.0) -> Outcome | None:
        """Return the outcome of a submitted source; see ``Client.result``.

        Args:
            id: from ``submit``.
            wait: seconds to wait for it, at most 10.

        Returns:
            The outcome; ``None`` if there is none yet.

        Raises:
            UsageError: no such id.
            ServiceError: the grading was cancelled, or the service cannot be reached or failed.
        """
        reply = await self._ask(_Call("GET", f"/v1/gradings/{id}", {"wait": min(wait, _WAIT)}))
        return None if reply["state"] in ("waiting", "running") else _outcome(reply)

    async def cancel(self, id: str) -> bool:
        """Withdraw a submitted source; see ``Client.cancel``.

        Args:
            id: from ``submit``.

        Returns:
            Whether it was withdrawn; false if it had its outcome already.

        Raises:
            UsageError: no such id.
            ServiceError: the service cannot be reached, or failed.
        """
        return bool((await self._ask(_Call("DELETE", f"/v1/gradings/{id}")))["state"] == "cancelled")

    async def tasks(self) -> list[dict[str, Any]]:
        """Return the service's tasks; see ``Client.tasks``.

        Returns:
            A dictionary for each task.

        Raises:
            UsageError: the service refuses the token.
            ServiceError: it cannot be reached, or failed.
        """
        found: list[dict[str, Any]] = await self._ask(_Call("GET", "/v1/tasks"))
        return found

    async def prompt(self, task: str) -> str:
        """Return what a model is asked for a task, on the backend of the service.

        Args:
            task: ``category/name``.

        Returns:
            The text.

        Raises:
            UsageError: no such task, or the service refuses the token.
            ServiceError: it cannot be reached, or failed.
        """
        return str((await self._ask(_Call("GET", f"/v1/tasks/{_quoted(task)}")))["prompt"])

    async def info(self) -> dict[str, Any]:
        """Return what the service grades on; see ``Client.info``.

        Returns:
            The JSON object.

        Raises:
            UsageError: the service refuses the token.
            ServiceError: it cannot be reached, or failed.
        """
        found: dict[str, Any] = await self._ask(_Call("GET", "/v1/service"))
        return found

    async def health(self) -> dict[str, Any]:
        """Return the state of the service; see ``Client.health``.

        Returns:
            The JSON object.

        Raises:
            ServiceError: the service cannot be reached, or is not ready.
        """
        found: dict[str, Any] = await self._ask(_Call("GET", "/readyz"), time.monotonic())
        return found

    async def _ask(self, call: _Call, until: float | None = None) -> Any:
        until = time.monotonic() + min(self.timeout_s, _ASK) if until is None else until
        try:
            return await self._run(_once(call), until)
        except _interruptions() as e:
            raise ServiceError(_unreachable(self.url, e)) from e

    async def _run(self, flow: _Flow, until: float) -> Any:
        import tenacity

        reply: Any = None
        while True:
            try:
                call = flow.send(reply)
            except StopIteration as e:
                return e.value
            reply = await tenacity.AsyncRetrying(**self._repeating(lambda: until))(self._send, call)

    async def _send(self, call: _Call) -> Any:
        response = await self._client().request(**call.arguments())
        return self._reply(response, call.missing)

    def _client(self) -> httpx.AsyncClient:
        loop = asyncio.get_running_loop()
        if self._http is None or self._loop is not loop:  # connections of another loop cannot be used in this one
            self._http, self._loop = _package().AsyncClient(**self._settings()), loop
        return self._http


def _once(call: _Call) -> _Flow:
    return (yield call)


def _withdrawal(number: str) -> _Call:
    return _Call("DELETE", f"/v1/gradings/{number}", missing=True, seconds=_CONNECT)


def _quoted(task: str) -> str:
    from urllib.parse import quote

    return quote(task, safe="/")


def _interruptions() -> tuple[type[Exception], ...]:
    """Return the exceptions after which a request is repeated, until the time is over."""
    httpx = _package()
    return (_Busy, httpx.NetworkError, httpx.TimeoutException, httpx.RemoteProtocolError, httpx.StreamError)


def _patience() -> Any:
    return _package().Timeout(_SILENCE, connect=_CONNECT)


def _unreachable(url: str, error: BaseException) -> str:
    text = str(error) or type(error).__name__
    return text if isinstance(error, _Busy) else f"no grading service at {url}: {text}; start one with kbx serve"
