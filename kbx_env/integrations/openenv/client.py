"""A typed client of the environment server. It holds one session over a WebSocket."""

from __future__ import annotations

from typing import Any

from openenv.core import EnvClient
from openenv.core.client_types import StepResult

from kbx_env.integrations.openenv.models import KernelAction, KernelObservation, KernelState


class KernelClient(EnvClient[KernelAction, KernelObservation, KernelState]):
    """``async with KernelClient(base_url="http://127.0.0.1:8000") as env``, or ``with KernelClient(...).sync() as env``.

    Give ``message_timeout_s=1800`` where kernels are timed or many sessions wait for the grader; OpenEnv's default is 60.
    """

    def _step_payload(self, action: KernelAction) -> dict[str, Any]:
        return action.model_dump()

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[KernelObservation]:
        reward, done = payload.get("reward"), bool(payload.get("done", False))
        seen = KernelObservation(**{**payload.get("observation", {}), "reward": reward, "done": done})
        return StepResult(observation=seen, reward=reward, done=done)

    def _parse_state(self, payload: dict[str, Any]) -> KernelState:
        return KernelState(**payload)
