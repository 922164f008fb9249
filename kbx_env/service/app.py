"""The HTTP application of the grading service (FastAPI)."""

from __future__ import annotations

import asyncio
import functools
import json
import math
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import FastAPI, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException

from kbx_env.errors import UnknownName, UsageError
from kbx_env.service.queue import Conflict, Draining, Grading, JournalFailed, QueueFull
from kbx_env.service.schema import (
    ID,
    Batch,
    GradingReply,
    HealthReply,
    Problem,
    PromptReply,
    ReadyReply,
    ServiceReply,
    StatusReply,
    Submission,
    TaskReply,
    WaitingSubmission,
)

if TYPE_CHECKING:
    from kbx_env.executor import Request as GradeRequest
    from kbx_env.service.service import Service

BEAT = 10.0
"""Seconds between two lines of a stream at most; an empty line shows that the connection lives."""
_TEXT = "text/html; charset=utf-8"
_LINES = "application/x-ndjson"
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "form-action 'none'; frame-ancestors 'none'"
)
_SECURE = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "X-Frame-Options": "DENY", "Cache-Control": "no-store",
}  # fmt: skip
"""Headers of the live page: it loads nothing, and no other page shows it in a frame."""
_DESCRIPTION = """
Grades Triton kernels for the tasks of kbx_env. All paths below `/v1` and `/metrics` need the bearer token, if the
service has one. Every refusal has a JSON body with `detail`.
"""
_BATCHES = """
Grade many sources: a line of JSON for each grading, in the order in which they end. An empty line shows that the
connection lives. If the connection is cut, the gradings go on: send what is left again, with the same ids. All are
accepted, or none.
"""


def _problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    text = {
        400: "the request is no HTTP or no JSON", 401: "no valid token", 404: "not known", 408: "the body came too slowly",
        409: "the id belongs to another request", 413: "the body or the batch is too large", 421: "a foreign host",
        422: "the request is not accepted", 429: "the queue is full; see Retry-After", 503: "the service starts or ends",
    }  # fmt: skip
    return {s: {"model": Problem, "description": text[s]} for s in (400, 401, 408, 413, 421, *statuses)}


IdPath = Annotated[str, Path(pattern=ID, description="id of a grading")]
Wait = Annotated[float, Query(ge=0, le=1e6, allow_inf_nan=False, description="seconds to wait for the outcome")]


def create_app(service: Service) -> FastAPI:
    """Make the application.

    Args:
        service: what it serves; its queue is opened and closed with the application.

    Returns:
        The application.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.start()
        try:
            yield
        finally:
            await service.stop()

    app = FastAPI(
        title="kbx_env grading service", version=service.version, description=_DESCRIPTION, lifespan=lifespan,
        redoc_url=None, responses=_problems(),
    )  # fmt: skip
    _add_errors(app)
    _add_gradings(app, service)
    _add_catalogue(app, service)
    _add_state(app, service)
    return app


def _add_gradings(app: FastAPI, service: Service) -> None:
    """Add the paths of gradings and batches."""
    limits = service.limits

    @app.post(
        "/v1/gradings", response_model=GradingReply, tags=["gradings"], responses={
            202: {"model": GradingReply, "description": "accepted, no outcome yet"}, **_problems(409, 422, 429, 503)
        },
    )  # fmt: skip
    async def grade(body: WaitingSubmission) -> Response:
        """Grade a source: waits for the outcome, or answers 202 with the id."""
        asked = await _requested(service, [body])
        (grading,) = await service.open_queue.submit(asked)
        await service.open_queue.wait(grading, min(body.wait, limits.wait))
        return _reply(service, grading, 200 if grading.outcome is not None else 202)

    @app.get("/v1/gradings/{id}", response_model=GradingReply, tags=["gradings"], responses=_problems(404, 422, 503))
    async def find(id: IdPath, wait: Wait = 0.0) -> Response:
        """Return a grading; waits for its outcome as long as asked for."""
        grading = await _found(service, id)
        await service.open_queue.wait(grading, min(wait, limits.wait))
        return _reply(service, grading, 200)

    @app.delete("/v1/gradings/{id}", response_model=GradingReply, tags=["gradings"], responses=_problems(404, 422, 503))
    async def cancel(id: IdPath) -> Response:
        """Withdraw a grading; one that has ended stays as it is."""
        grading = await _found(service, id)
        service.open_queue.cancel(grading)
        return _reply(service, grading, 200)

    about = "one line for each grading that ended: a GradingReply with index, the number of the submission in the batch"
    lines = {"content": {_LINES: {"schema": {"type": "string"}}}, "description": about}

    @app.post(
        "/v1/batches", response_class=StreamingResponse, tags=["gradings"], description=_BATCHES,
        responses={200: lines, **_problems(409, 422, 429, 503)},
    )  # fmt: skip
    async def batch(body: Batch) -> Response:
        """Grade many sources: a line of JSON for each grading, in the order in which they end."""
        if len(body.gradings) > (most := min(limits.batch, limits.queue)):
            raise HTTPException(413, f"{len(body.gradings)} gradings; at most {most} in a batch")
        gradings = await service.open_queue.submit(await _requested(service, body.gradings))
        return StreamingResponse(_stream(service, gradings), media_type=_LINES, headers={"X-Accel-Buffering": "no"})


async def _requested(service: Service, submissions: list[Any]) -> list[tuple[str, GradeRequest]]:
    """Check submissions, and give an id to each that has none."""
    found: list[tuple[str, GradeRequest]] = []
    for number, s in enumerate(submissions):
        assert isinstance(s, Submission)
        options = s.options.model_dump(exclude_unset=True)
        try:
            request = service.open_queue.request(s.task, s.data(), options, s.priority, s.deadline)
        except UsageError as e:
            raise HTTPException(422, f"{e}" if len(submissions) == 1 else f"grading {number}: {e}") from e
        found.append((s.id or uuid.uuid4().hex, request))
        if number % 50 == 49:
            await asyncio.sleep(0)  # others are served meanwhile
    if len({id for id, _ in found}) < len(found):
        raise HTTPException(422, "two gradings of the batch have the same id; choose different ones")
    return found


async def _found(service: Service, id: str) -> Grading:
    grading = await service.open_queue.find(id)
    if grading is None:
        raise HTTPException(404, f"no grading {id}; it was never accepted here, or it ended long ago")
    return grading


async def _stream(service: Service, gradings: list[Grading]) -> AsyncIterator[bytes]:
    """Yield a line for each grading that ends; ends early when the service is about to end."""
    ended: asyncio.Queue[tuple[int, Grading] | None] = asyncio.Queue()
    for number, grading in enumerate(gradings):
        if grading.ended.is_set():
            ended.put_nowait((number, grading))
        else:
            grading.listeners.append(functools.partial(_tell, ended, number))
    left = len(gradings)
    draining = asyncio.ensure_future(service.open_queue.draining.wait())
    draining.add_done_callback(lambda _: ended.put_nowait(None))
    yield b"\n"  # the headers go out at once
    try:
        while left:
            try:
                async with asyncio.timeout(BEAT):
                    got = await ended.get()
            except TimeoutError:
                yield b"\n"
                continue
            if got is None:
                return
            left -= 1
            yield _line(service, got[1], got[0]) + b"\n"
    finally:
        draining.cancel()


def _tell(ended: asyncio.Queue[tuple[int, Grading] | None], number: int, grading: Grading) -> None:
    ended.put_nowait((number, grading))


def _line(service: Service, grading: Grading, index: int | None = None) -> bytes:
    """Return a grading as JSON; its outcome is JSON already."""
    about: dict[str, Any] = {} if index is None else {"index": index}
    about |= {"id": grading.id, "task": grading.task, "state": service.open_queue.state(grading)}
    return f'{json.dumps(about)[:-1]}, "outcome": {grading.outcome or "null"}}}'.encode()


def _reply(service: Service, grading: Grading, status: int) -> Response:
    headers = {"Location": f"/v1/gradings/{grading.id}"} if status == 202 else None
    return Response(_line(service, grading), status, headers, "application/json")


def _add_catalogue(app: FastAPI, service: Service) -> None:
    """Add the paths of tasks."""

    @app.get("/v1/tasks", response_model=list[TaskReply], tags=["tasks"])
    async def tasks() -> Response:
        """List the tasks."""
        return JSONResponse(list(service.tasks.values()))

    @app.get("/v1/tasks/{task:path}", response_model=PromptReply, tags=["tasks"], responses=_problems(404, 422))
    async def task(task: str) -> Response:
        """Return a task, with what a model is asked."""
        if task not in service.tasks:
            raise HTTPException(404, str(UnknownName("task", task[:200], service.tasks, "GET /v1/tasks lists them")))
        return JSONResponse(await asyncio.to_thread(service.prompt, task))

    @app.get("/v1/service", response_model=ServiceReply, tags=["service"])
    async def about() -> Response:
        """Return what the service grades on, and its limits."""
        return JSONResponse(service.about())


def _add_state(app: FastAPI, service: Service) -> None:
    """Add the paths of health, metrics and the live page."""
    page = FilePath(__file__).with_name("page.html").read_text(encoding="utf-8")

    @app.get("/healthz", response_model=HealthReply, tags=["service"])
    async def healthz() -> dict[str, str]:
        """Answer as long as the process lives."""
        return {"status": "ok"}

    @app.get("/readyz", response_model=ReadyReply, tags=["service"], responses=_problems(503))
    async def readyz() -> dict[str, Any]:
        """Answer 200 if gradings are accepted."""
        queue = service.open_queue
        if queue.draining.is_set():
            raise Draining("the service is about to end")
        return {"status": "ready", "waiting": queue.waiting, "running": queue.running}

    @app.get("/metrics", response_class=Response, tags=["service"], responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        """Return the metrics for Prometheus."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1/status", response_model=StatusReply, tags=["service"], responses=_problems(503))
    async def status() -> Response:
        """Return what the live page shows."""
        return JSONResponse(service.status())

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def live() -> Response:
        return Response(page, media_type=_TEXT, headers=_SECURE)


def _add_errors(app: FastAPI) -> None:
    """Answer every error with a JSON body that has ``detail``."""

    def on(kind: type[Exception], answer: Callable[[Any], tuple[int, str, dict[str, str]]]) -> None:
        async def handle(_: Request, e: Exception) -> Response:
            status, text, headers = answer(e)
            # A message may quote lone surrogates of a request.
            plain = text.encode("utf-8", "backslashreplace").decode()
            return JSONResponse({"detail": plain[:2000]}, status, headers)

        app.add_exception_handler(kind, handle)

    def later(e: QueueFull) -> tuple[int, str, dict[str, str]]:
        return 429, str(e), {"Retry-After": str(math.ceil(e.retry_after))}

    on(HTTPException, lambda e: (e.status_code, str(e.detail), dict(e.headers or {})))
    on(RequestValidationError, lambda e: (422, _validation(e), {}))
    on(QueueFull, later)
    on(Draining, lambda e: (503, str(e), {"Retry-After": "5"}))
    on(JournalFailed, lambda e: (503, str(e), {"Retry-After": "30"}))
    on(Conflict, lambda e: (409, str(e), {}))


def _validation(error: RequestValidationError) -> str:
    """Return the first three faults of a request in words."""
    found = []
    for fault in error.errors()[:3]:
        place = ".".join(str(p) for p in fault["loc"] if p != "body")
        found.append(f"{place}: {fault['msg']}" if place else str(fault["msg"]))
    return "; ".join(found)


