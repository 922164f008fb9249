"""The JSON of the grading service, as pydantic models: they check requests and make the OpenAPI document."""

from __future__ import annotations

import base64
import binascii
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

ID = r"^[0-9a-f]{32}$"
"""Pattern of an id: a UUID without dashes. A client that chooses it may repeat a request."""
_WHOLE = 2**53
"""Bound of whole numbers: JSON of other languages holds no larger ones."""

Id = Annotated[str, Field(pattern=ID, description="32 hexadecimal digits; the service chooses one if it is left out")]


class State(StrEnum):
    """Where a grading is."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    CANCELLED = "cancelled"


class Options(BaseModel):
    """How a source is graded: fields of ``kbx_env.options.GradeOptions``; what is left out has its default."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    backend: Literal["auto", "cpu", "cuda"] = Field("auto", description="the backend of the service, or auto")
    targets: list[str] | None = Field(None, max_length=16, description="targets of ahead-of-time compilation; null: all")
    grading: str = Field("contract", description="contract or paper")
    seed: Annotated[int, Field(ge=-_WHOLE, le=_WHOLE)] | None = Field(
        None, description="fixes the inputs; null: secret and new for every grading"
    )
    timing: bool = Field(True, description="time correct kernels (CUDA)")
    split: str = Field("eval", description="eval adds the held-out shapes, train leaves them out")
    wall: float = Field(30.0, gt=0, description="seconds for the submission, over all stages but timing")
    estimate: str | None = Field(None, description="name of a GPU whose device time is estimated (CPU)")
    torch_ops: str = Field("strict", description="strict or allow")
    compiled: bool = Field(False, description="also measure the speedup over torch.compile (CUDA)")
    sizes: str = Field("published", description="published or held-out")
    precision: str = Field("report", description="report or training")


class Submission(BaseModel):
    """One source to grade."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    task: str = Field(max_length=200, description="category/name, see /v1/tasks")
    source: str | None = Field(None, description="the text of the module")
    source_base64: str | None = Field(None, description="its bytes in base64, in place of source")
    options: Options = Field(default_factory=Options)  # type: ignore[arg-type]
    priority: int = Field(0, ge=-1000, le=1000, description="higher goes first")
    deadline: float | None = Field(None, gt=0, le=1e9, description="seconds from submission to outcome; null: the service's limit")
    id: Id | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Submission:
        if (self.source is None) == (self.source_base64 is None):
            raise ValueError("give source or source_base64, and not both")
        self.data()
        return self

    def data(self) -> bytes:
        """Return the bytes of the source."""
        if self.source is not None:
            return self.source.encode("utf-8", "surrogatepass")
        try:
            return base64.b64decode(self.source_base64 or "", validate=True)
        except (binascii.Error, ValueError) as e:
            raise ValueError(f"source_base64 is no base64 ({e})") from e


class WaitingSubmission(Submission):
    """One source to grade, and how long the request waits for it."""

    wait: float = Field(30.0, ge=0, le=1e6, description="seconds to wait for the outcome; the service has a limit")


class Batch(BaseModel):
    """Many sources to grade."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    gradings: list[Submission] = Field(min_length=1)


class GradingReply(BaseModel):
    """A grading: its state, and its outcome once there is one."""

    id: str
    task: str
    state: State
    outcome: dict[str, Any] | None = Field(None, description="as kbx grade --json prints it, without the reward")


class TaskReply(BaseModel):
    """A task."""

    task: str
    entry: str
    split: str | None
    difficulty: int
    judge: str
    cases: int


class PromptReply(TaskReply):
    """A task, and what a model is asked."""

    prompt: str = Field(description="the instruction for the backend of the service")
    fingerprint: str


class ServiceReply(BaseModel):
    """What the service grades on, and its limits."""

    version: str
    backend: str
    environment: dict[str, str]
    workers: int
    gpus: list[str]
    tiers: list[str]
    limits: dict[str, float]


class ReadyReply(BaseModel):
    """The load of the service."""

    status: Literal["ready"]
    waiting: int
    running: int


class HealthReply(BaseModel):
    """The service answers."""

    status: Literal["ok"]


class Recent(BaseModel):
    """A grading that has ended."""

    id: str
    task: str
    verdict: str
    seconds: float | None
    ended: float


class StatusReply(BaseModel):
    """What the live page shows."""

    backend: str
    device: str
    waiting: int
    running: int
    workers: int
    draining: bool
    uptime: float
    ended: int
    reused: int
    rate: float = Field(description="gradings a second, over the last minute")
    verdicts: dict[str, int]
    gpus: list[dict[str, Any]]
    screened: int | None
    survived: int | None
    recent: list[Recent]


class Problem(BaseModel):
    """Why a request is refused."""

    detail: str
