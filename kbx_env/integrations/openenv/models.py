"""What client and server exchange."""

from __future__ import annotations

from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field


class KernelAction(Action):
    """A submission."""

    source: str = Field(..., max_length=1 << 20, description="source of a module, or an answer with a fenced block")


class KernelObservation(Observation):
    """The task, and the verdict on the last submission. ``reward`` is ``None`` before the first one and where it is masked."""

    task: str = Field("", description="id of the task, category/name")
    prompt: str = Field("", description="what the model is asked")
    feedback: str = Field("", description="verdict on the last submission, and what to do next")
    verdict: str = Field("", description="correct, incorrect, compile_error, ...")
    turn: int = Field(0, ge=0, description="submissions so far")
    masked: bool = Field(False, description="the machine failed, not the submission: leave this step out of training")
    solved: bool = False
    terms: dict[str, float | None] = Field(default_factory=dict, description="terms of the reward by name, unweighted")


class KernelState(State):
    """The state of an episode."""

    task: str = ""
    max_turns: int = 0
    done: bool = False
