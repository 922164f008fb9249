"""NeMo Gym: a resources server with ``/verify``, by NeMo Gym's published schema.

    uvicorn kbx_env.integrations.nemo_gym:app --port 8001

serves ``/seed_session`` and ``/verify`` without NeMo Gym. ``resources_server`` makes the class that ``ng_run`` starts, where
NeMo Gym is installed; it has the other routes too. A row of data has ``responses_create_params`` and ``task``: see ``table``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from kbx_env.errors import UsageError
from kbx_env.integrations import rows
from kbx_env.integrations.settings import grader_of
from kbx_env.train.warm_grader import WarmGrader

AGENT = "kbx_env_simple_agent"
"""Name of the agent in rows of data."""
LOST = "verifier_error"
"""NeMo Gym's name of the failure where a grading was lost (``nemo_gym.failure_kinds``)."""


def answer_of(response: Mapping[str, Any]) -> str:
    """Return the text of the last message of a response.

    Args:
        response: JSON of OpenAI's Responses API: ``output`` is a list of items; messages of the assistant have ``content``.

    Returns:
        The text; empty where there is no message.
    """
    for item in reversed(response.get("output") or []):
        if item.get("type") == "message" and item.get("role") == "assistant":
            content = item.get("content") or ""
            return content if isinstance(content, str) else "".join(str(part.get("text") or "") for part in content)
    return ""


async def verified(body: Mapping[str, Any], grader: WarmGrader) -> dict[str, Any]:
    """Grade the answer of a request.

    Args:
        body: JSON of the request: ``responses_create_params``, ``response`` and ``task``, which may stand in
            ``verifier_metadata``.
        grader: grades the answer.

    Returns:
        The JSON of the reply: the request, and ``reward``, ``mask_sample``, ``failure_kind``, ``failure_reason``, ``verdict``,
        ``compiled``, ``correct``, ``solved`` and ``terms``. Where the grading was lost ``mask_sample`` is true and
        ``reward``, which the schema demands, is 0.0.

    Raises:
        UsageError: the request names no task, or an unknown one.
    """
    from kbx_env.spec.catalog import load_task

    task = body.get("task") or (body.get("verifier_metadata") or {}).get("task")
    if not isinstance(task, str) or not task:
        raise UsageError("the request has no 'task'; rows of data have it: kbx_env.integrations.nemo_gym.table")
    if not isinstance(body.get("response"), Mapping):
        raise UsageError("the request has no 'response'")
    (graded,) = await grader.agrade([(load_task(task).id, answer_of(body["response"]))])
    masked = graded.reward is None
    return {
        **body, "reward": 0.0 if graded.reward is None else graded.reward, "mask_sample": masked,
        "failure_kind": LOST if masked else None, "failure_reason": graded.outcome.message[:2000] if masked else None,
        "verdict": str(graded.outcome.verdict), "compiled": graded.compiled, "correct": graded.outcome.correct,
        "solved": graded.solved, "terms": dict(graded.terms),
    }  # fmt: skip


def make_app(grader: WarmGrader | None = None) -> Any:
    """Make a server app with ``/verify`` and ``/seed_session`` that needs no NeMo Gym.

    Args:
        grader: grades the answers; by default one by environment variables (``kbx_env.integrations.settings``).

    Returns:
        A FastAPI app.
    """
    from kbx_env.integrations.settings import json_app

    chosen = grader or grader_of(os.environ)

    async def verify(body: dict[str, Any]) -> dict[str, Any]:
        return await verified(body, chosen)

    async def seed_session(body: dict[str, Any]) -> dict[str, Any]:
        return {}

    return json_app("kbx_env for NeMo Gym", {"/verify": verify, "/seed_session": seed_session})


def resources_server(grader: WarmGrader | None = None) -> Any:
    """Return NeMo Gym's server class with our ``/verify``; needs NeMo Gym.

    ``resources_servers/kbx_env/app.py``: ``Server = resources_server()``, and ``Server.run_webserver()`` where it is the main
    program.

    Args:
        grader: grades the answers; by default one by environment variables.

    Returns:
        A subclass of ``SimpleResourcesServer``.
    """
    from nemo_gym.base_resources_server import BaseVerifyRequest, BaseVerifyResponse, SimpleResourcesServer
    from pydantic import ConfigDict

    chosen = grader or grader_of(os.environ)

    class Request(BaseVerifyRequest):
        model_config = ConfigDict(extra="allow")

    class Response(BaseVerifyResponse):
        model_config = ConfigDict(extra="allow")

    class KernelResourcesServer(SimpleResourcesServer):  # type: ignore[misc, valid-type]
        async def verify(self, body: Request) -> Response:
            return Response(**await verified(body.model_dump(mode="json"), chosen))

    # FastAPI reads the annotations of the method, which are texts in this module.
    KernelResourcesServer.verify.__annotations__.update({"body": Request, "return": Response})
    return KernelResourcesServer


def table(split: str = "train", category: str | None = None, backend: str = "auto", **more: Any) -> Iterator[dict[str, Any]]:
    """Yield rows of NeMo Gym: ``responses_create_params``, ``task``, ``agent_ref``. Write them with ``rows.write`` as ``.jsonl``.

    Args:
        split: ``train``, or ``eval`` to evaluate.
        category: category of the tasks; ``None`` for all.
        backend: ``cpu``, ``cuda`` or ``auto``: the text says whether kernels are timed.
        **more: ``system`` and ``template``, as ``kbx_env.trl.prompts`` takes them.

    Yields:
        One row for each task.
    """
    for row in rows.plain(split, category, backend, **more):
        yield {"responses_create_params": {"input": row["prompt"]}, "task": row["task"],
               "agent_ref": {"type": "responses_api_agents", "name": AGENT}}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Make ``app`` when a server asks for it."""
    if name == "app":
        globals()["app"] = made = make_app()
        return made
    raise AttributeError(name)
