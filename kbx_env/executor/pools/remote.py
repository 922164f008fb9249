"""A worker pool whose workers are those of a grading service on another machine (``kbx serve``)."""

from __future__ import annotations

from typing import Any

from kbx_env import versions
from kbx_env.client import Client, ServiceError
from kbx_env.errors import UsageError
from kbx_env.executor.pools.process import Request, WorkerLost
from kbx_env.outcome import Outcome

DEADLINE = 6 * 3600.0
"""Seconds for one grading, in which a request may wait behind those of other clients, or for the service to come back."""
WIDTH = 64
"""Requests at a time. The service has its own queue; more threads than its workers only keep that queue filled."""


class RemotePool:
    """Grades by a service. Give its executor ``attempts=1``: the service itself tries again after an infrastructure fault.

    Attributes:
        width: requests at a time.
        client: of the service.
        info: what the service grades on, see ``Client.info``.
    """

    def __init__(self, url: str, token: str | None = None, width: int = WIDTH, same_code: bool = False) -> None:
        """Connect to a service.

        Args:
            url: of the service.
            token: bearer token; by default ``KBX_TOKEN`` of the environment.
            width: requests at a time.
            same_code: refuse a service whose grader's code is not this one, so that its outcomes may serve as proofs.

        Raises:
            UsageError: no service there, it refuses the token, or its code differs.
        """
        self.client = Client(url, token)
        self.width, self._closed = width, False
        try:
            self.info: dict[str, Any] = self.client.info()
        except ServiceError as e:
            raise UsageError(str(e)) from e
        theirs, ours = self.info["environment"].get("grader"), versions.code_digest()
        if same_code and theirs != ours:
            both = f"{url} grades with other code ({theirs}) than this machine ({ours})"
            raise UsageError(f"{both}; install the same version on both")

    def backend(self, asked: str) -> str:
        """Return the backend of the service.

        Args:
            asked: ``auto``, or what it must be.

        Returns:
            ``cpu`` or ``cuda``.

        Raises:
            UsageError: the service has the other one.
        """
        found = str(self.info["backend"])
        if asked not in ("auto", found):
            raise UsageError(f"the service at {self.client.url} grades on backend {found!r}, not on {asked!r}; ask for 'auto'")
        return found

    def grade(self, request: Request, deadline: float) -> Outcome:
        """Grade on the service.

        Args:
            request: the submission; its proof is not sent.
            deadline: seconds, the queue of the service included.

        Returns:
            The outcome; an infrastructure fault if the service did not answer in time.

        Raises:
            WorkerLost: the service failed, or the pool is closed.
            UsageError: the service refuses the request.
        """
        if self._closed:
            raise WorkerLost("the worker pool is closed")
        options = {**request.options, "priority": request.priority}
        try:
            return self.client.grade_within(deadline, request.task, request.source, **options)
        except ServiceError as e:
            raise WorkerLost(str(e)) from e

    def close(self) -> None:
        """Close the connections: requests in progress are withdrawn."""
        self._closed = True
        self.client.close()
