"""OpenEnv: the environment behind a real server, played over a WebSocket by the typed client."""

from __future__ import annotations

import asyncio
import importlib.resources
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("openenv.core", reason="needs the extra openenv")
import uvicorn
import yaml
from openenv.core.env_server.types import ServerMode

from kbx_env.envs.prompt import instruction
from kbx_env.errors import UsageError
from kbx_env.integrations.openenv import KernelAction, KernelClient
from kbx_env.integrations.openenv.environment import KernelEnvironment
from kbx_env.integrations.openenv.server import make_app
from kbx_env.spec.catalog import load_task

TASK, WRONG = "random/logspace", 0.1 + 0.3 * 0.5


@pytest.fixture
def url(grader: Any) -> Iterator[str]:
    app = make_app({"KBX_MAX_TURNS": "2", "KBX_SESSIONS": "4"}, grader)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        while not server.started and thread.is_alive():
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        server.should_exit = True
        thread.join(20)


def test_an_episode_over_a_websocket(url: str) -> None:
    assert ServerMode.SIMULATION
    with KernelClient(base_url=url).sync() as env:
        first = env.reset(task=TASK, episode_id="mine")
        assert first.observation.prompt == instruction(load_task(TASK), "cpu") and first.reward is None and not first.done
        wrong = env.step(KernelAction(source="BAD"))
        assert wrong.reward == WRONG and not wrong.done and "Verdict: incorrect" in wrong.observation.feedback
        assert wrong.observation.turn == 1 and wrong.observation.terms["cases"] == 0.5
        state = env.state()
        assert (state.episode_id, state.step_count, state.task, state.max_turns) == ("mine", 1, TASK, 2)
        right = env.step(KernelAction(source="Here:\n```python\n# GOOD\n```"))
        assert right.reward == 1.0 and right.done and right.observation.solved and right.observation.verdict == "correct"
        with pytest.raises(RuntimeError, match="is over"):
            env.step(KernelAction(source="GOOD"))
        lost = env.reset(task=TASK) and env.step(KernelAction(source="LOST"))
        assert lost.reward is None and lost.observation.masked
        assert env.reset(seed=3).observation.task == env.reset(seed=3).observation.task
        with pytest.raises(RuntimeError, match="unknown task"):
            env.reset(task="math/sofmax")


def test_sessions_at_the_same_time(url: str) -> None:
    async def play(word: str) -> float | None:
        async with KernelClient(base_url=url) as env:
            await env.reset(task=TASK)
            return (await env.step(KernelAction(source=word))).reward

    async def all_of_them() -> list[float | None]:
        return list(await asyncio.gather(*map(play, ["GOOD", "BAD", "LOST", "GOOD"])))

    assert asyncio.run(all_of_them()) == [1.0, WRONG, None, 1.0]


def test_what_is_refused(grader: Any) -> None:
    env = KernelEnvironment(grader)
    with pytest.raises(UsageError, match="before reset"):
        env.step(KernelAction(source="x"))
    with pytest.raises(UsageError, match="no argument 'tsk'"):
        env.reset(tsk=TASK)
    for name, value, said in (("MAX_TURNS", "0", "KBX_MAX_TURNS"), ("REWARD", "no", "preset"), ("SPLIT", "x", "split")):
        with pytest.raises(UsageError, match=said):
            make_app({"KBX_BACKEND": "cpu", f"KBX_{name}": value})


def test_the_manifest_names_the_app() -> None:
    manifest = yaml.safe_load((importlib.resources.files("kbx_env.integrations.openenv") / "openenv.yaml").read_text())
    module, _, name = manifest["app"].partition(":")
    assert manifest["spec_version"] == 1 and getattr(importlib.import_module(module), name).title
