"""A session whose runner answers what the test told it to answer."""

from __future__ import annotations

from typing import Any

from kbx_env.grading.runtime.session import RunnerSession
from kbx_env.spec.catalog import load_task

TASK = load_task("activation/gelu_fp16")


class Puppet:
    """Stands for zygote and runner: answers what it was told to answer."""

    folder = "/"

    pid = 1

    def __init__(self, reply: dict[str, Any], blobs: list[bytearray], log: list[Any] | None = None) -> None:
        self.reply, self.blobs = reply, blobs
        self.rows = [1] if log is None else log

    def spawn(self, **_: Any) -> Puppet:
        return self

    def ask(self, header: dict[str, Any], blobs: Any = None, *, deadline: float) -> Any:
        return self.reply, self.blobs

    def log(self) -> list[Any]:
        return self.rows

    def close(self) -> None:
        pass


def puppet_session(reply: dict[str, Any], blobs: list[bytearray] | None = None) -> RunnerSession:
    return RunnerSession(Puppet(reply, blobs or []), TASK, "cpu", b"secret", "eval", 30.0)  # type: ignore[arg-type]
