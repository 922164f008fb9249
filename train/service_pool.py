"""A worker pool whose gradings run in a grading service (``grader=URL``)."""

from __future__ import annotations

import contextlib
from typing import Any

from kbx_env.errors import KbxError, UsageError
from kbx_env.executor.pools.process import Request, WorkerLost
from kbx_env.outcome import Outcome

WIDTH = 64
"""Gradings that are asked for at a time, by default: the service queues what it has no worker for."""


class ServicePool:
    """Asks a grading service. One request has one submission, so that an outcome is known as soon as its grading has ended.

    Attributes:
        width: gradings at a time.
    """

    def __init__(self, url: str, workers: int | None = None) -> None:
        """Make the client. It connects with the first request.

        Args:
            url: address of the service.
            workers: gradings at a time; by default ``WIDTH``.

        Raises:
            UsageError: the client is not installed, or the address is none.
        """
        try:
            from kbx_env.client import Client  # type: ignore[import-not-found, unused-ignore]
        except ImportError as e:
            raise UsageError('grader=URL needs the client of the service: pip install "kbx_env[client]"') from e
        self.width = workers or WIDTH
        self._client: Any = Client(url, None)

    def grade(self, request: Request, deadline: float) -> Outcome:
        """Grade one submission.

        Args:
            request: the submission.
            deadline: not used: the service has its own deadlines.

        Returns:
            The outcome.

        Raises:
            WorkerLost: the service cannot be reached, or sent no outcome.
            UsageError: the service refuses the request.
        """
        options = {k: list(v) if isinstance(v, tuple) else v for k, v in request.options.items()}
        try:
            for _, outcome in self._client.grade_many([(request.task, request.source)], **options):
                return outcome  # type: ignore[no-any-return]
        except UsageError:
            raise
        except (KbxError, OSError) as e:
            raise WorkerLost(f"the grading service: {e}") from e
        raise WorkerLost("the grading service sent no outcome")

    def close(self) -> None:
        """Close the connection."""
        with contextlib.suppress(Exception):
            self._client.close()
