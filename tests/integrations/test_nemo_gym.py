"""NeMo Gym's ``/verify`` by its published schema (nemo_gym/base_resources_server.py of NVIDIA-NeMo/Gym)."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
from fastapi.testclient import TestClient

from kbx_env.integrations import nemo_gym
from kbx_env.integrations.settings import MOST_BYTES

TASK, WRONG = "random/logspace", 0.1 + 0.3 * 0.5


def _request(text: str, **more: Any) -> dict[str, Any]:
    message = {"id": "m", "type": "message", "role": "assistant", "status": "completed",
               "content": [{"type": "output_text", "text": text, "annotations": []}]}  # fmt: skip
    response = {"id": "r", "object": "response", "created_at": 1.0, "model": "m", "output": [{"type": "reasoning"}, message],
                "parallel_tool_calls": False, "tool_choice": "none", "tools": []}  # fmt: skip
    return {"responses_create_params": {"input": [{"role": "user", "content": "?"}]}, "response": response, "task": TASK} | more


@pytest.fixture
def client(grader: Any) -> TestClient:
    return TestClient(nemo_gym.make_app(grader))


def test_rewards_and_masked_samples(client: TestClient) -> None:
    good, bad, lost = (client.post("/verify", json=_request(word)).json() for word in ("```python\n# GOOD\n```", "BAD", "LOST"))
    assert good["reward"] == 1.0 and good["mask_sample"] is False and good["verdict"] == "correct" and good["failure_kind"] is None
    assert bad["reward"] == WRONG and bad["terms"]["cases"] == 0.5
    assert lost["mask_sample"] is True and lost["reward"] == 0.0
    assert lost["failure_kind"] == "verifier_error" and lost["failure_reason"]
    assert good["responses_create_params"] and good["response"]["id"] == "r", "the reply has the request"
    assert client.post("/verify", json=_request("GOOD", task=None, verifier_metadata={"task": TASK})).json()["reward"] == 1.0
    empty = client.post("/verify", json=_request("x") | {"response": {"output": []}}).json()
    assert empty["reward"] == WRONG and client.post("/seed_session", json={}).json() == {}


@pytest.mark.parametrize(
    "body, status, said",
    [
        (_request("x", task=None), 422, "no 'task'"), (_request("x", task="math/sofmax"), 422, "unknown task"),
        ({"task": TASK}, 422, "no 'response'"), ([], 422, "no JSON object"),
    ],
)  # fmt: skip
def test_bad_requests(client: TestClient, body: Any, status: int, said: str) -> None:
    reply = client.post("/verify", json=body)
    assert reply.status_code == status and said in reply.json()["detail"]


def test_bodies_that_are_no_json_or_too_long(client: TestClient) -> None:
    assert client.post("/verify", content=b"{").status_code == 422
    assert client.post("/verify", content=b"x" * (MOST_BYTES + 1)).status_code == 413
    assert client.get("/health").json() == {"status": "ok"}


def test_the_rows() -> None:
    (row,) = [r for r in nemo_gym.table(category="random", backend="cpu") if r["task"] == TASK]
    assert row["responses_create_params"]["input"][0]["role"] == "user" and row["agent_ref"]["type"] == "responses_api_agents"


def test_the_class_of_nemo_gym_itself(grader: Any) -> None:
    pytest.importorskip("nemo_gym", reason="NeMo Gym is installed from its repository, it is in no package index")
    assert nemo_gym.resources_server(grader).verify
