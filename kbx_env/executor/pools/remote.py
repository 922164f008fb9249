"""A worker pool that grades on another machine, by its grading service (``kbx serve``)."""

from __future__ import annotations

from typing import Any

from kbx_env.errors import UsageError
from kbx_env.executor.pools.process import Request, WorkerLost
from kbx_env.outcome import Outcome

WIDTH = 64
"""Default number of requests at a time. The service queues what its workers cannot take at once, so more is not faster."""


class RemotePool:
    """Sends each grading to a service through ``kbx_env.client.Client``, which repeats what the network lost.

    The service has its own deadlines, attempts and store, so the deadline of a request is not used here: a request also
    waits in the queue of the service.

    Attributes:
        url: of the service.
        width: requests at a time.
        info: what the service says about itself: ``backend``, ``environment`` (device and versions).
    """

    def __init__(self, url: str, token: str | None = None, width: int = WIDTH, client: Any = None) -> None:
        """Connect to a service.

        Args:
            url: address of the service, ``http://HOST:PORT`` or ``https://...``.
            token: bearer token of the service; ``None`` for a service without one.
            width: requests at a time.
            client: replaces ``kbx_env.client.Client`` in tests.

        Raises:
            UsageError: the service does not answer, or refuses the token.
        """
        if width < 1:
            raise UsageError(f"{width} requests at a time; at least 1")
        if client is None:
            client = _connect(url, token)
        self.url, self.width, self._client = url, width, client
        try:
            # Needs the network and the token: both would otherwise fail at every grading.
            self.info: dict[str, Any] = client.info()
        except Exception as e:
            client.close()
            raise UsageError(f"the grading service at {url} cannot be used: {str(e) or type(e).__name__}; start one with: "
                             "kbx serve, and give its address and token") from e  # fmt: skip

    def grade(self, request: Request, deadline: float) -> Outcome:
        """Grade by the service.

        Args:
            request: the submission.
            deadline: not used.

        Returns:
            The outcome.

        Raises:
            WorkerLost: no answer, although the client tried again.
            UsageError: the service refuses the request.
        """
        try:
            outcome: Outcome = self._client.grade(request.task, request.source, **request.options)
        except UsageError:
            raise
        except Exception as e:
            raise WorkerLost(f"the grading service at {self.url}: {type(e).__name__}: {e}") from e
        return outcome

    def backend(self, wish: str) -> str:
        """Return the backend on which the service grades.

        Args:
            wish: ``cpu``, ``cuda``, or ``auto``: what the service says.

        Returns:
            ``cpu`` or ``cuda``.

        Raises:
            UsageError: ``auto``, and the service does not say.
        """
        if wish != "auto":
            return wish
        found = self.info.get("backend")
        if found not in ("cpu", "cuda"):
            raise UsageError(f"the grading service at {self.url} does not say on which backend it grades; give backend")
        return str(found)

    def close(self) -> None:
        """Close the connections. The service goes on with what it has begun."""
        self._client.close()


def _connect(url: str, token: str | None) -> Any:
    from kbx_env.client import Client

    return Client(url, token=token)
