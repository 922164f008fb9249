"""Limits of the grading service: what one request, one client and all clients together may take."""

from __future__ import annotations

import contextlib
import resource
from dataclasses import dataclass

from kbx_env.errors import UsageError


@dataclass(frozen=True)
class Limits:
    """What the service accepts.

    Raises:
        UsageError: a limit is not above 0.
    """

    queue: int = 20_000
    """Gradings that wait or run at a time; then a request is answered with 429."""
    body: int = 16 << 20
    """Bytes of a request's body. A batch of 128 kernels has about 1 MB."""
    batch: int = 1024
    """Submissions of one batch."""
    body_seconds: float = 30.0
    """Seconds in which the body of a request must have arrived."""
    header_seconds: float = 10.0
    """Seconds in which the header of a request must have arrived, from the connection or its first byte on."""
    idle_seconds: float = 60.0
    """Seconds that a connection without a request stays open."""
    connections: int = 4096
    """Connections at a time. Beyond it, a new connection takes the place of the one that has been without a request longest."""
    wait: float = 60.0
    """Seconds for which a request may wait for an outcome."""
    deadline: float = 24 * 3600.0
    """Seconds from the submission to the outcome; then it is an infrastructure fault."""
    wall: float = 120.0
    """Seconds of wall time that a submission may ask for, over all stages but timing."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise UsageError(f"the limit {name} of the service is {value!r}; more than 0")


_OTHER_FILES = 512
"""File descriptors beside the connections: workers, stores, libraries."""


def make_room(connections: int) -> int:
    """Raise this process's limit on open files, so that so many connections fit.

    Args:
        connections: at a time.

    Returns:
        The number of connections that fit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return connections if soft == resource.RLIM_INFINITY else max(16, min(connections, soft - _OTHER_FILES))
