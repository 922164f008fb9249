"""A grader that can be made early, copied to other processes, and kept over calls: what trainers and adapters hold."""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from kbx_env.train.batch_grader import BatchGrader, GradedAnswer, check_options

from kbx_env.errors import UnknownName
from kbx_env.options import resolve_backend

_OWN = ("_grader", "_pid", "_lock", "_end")
"""Attributes that belong to one process."""
SelfT = TypeVar("SelfT", bound="WarmGrader")


class WarmGrader:
    """A ``BatchGrader`` that starts with its first use, and whose workers stay warm between calls.

    It can be pickled: a copy has the options, and starts workers of its own. Workers end with ``close`` or with the object.
    """

    def __init__(self, preset: str = "default", backend: str = "auto", **options: Any) -> None:
        """Check the options; no worker starts yet.

        Args:
            preset: name of the preset, or ``python:module:attribute``.
            backend: ``cpu``, ``cuda``, or ``auto``: CUDA where there is a GPU; with ``url`` what the service has.
            **options: of ``kbx_env.train.batch_grader.BatchGrader``, such as ``url=`` and ``token=`` of a grading service,
                ``gpus=[...]`` that grade, ``workers``, ``timing``, ``target``, ``wall``, ``store``, ``executor``.

        Raises:
            UnknownName: no such preset, backend or option.
            UsageError: an option out of its range, options that exclude each other, or ``cuda`` without a GPU.
        """
        accepted = inspect.signature(BatchGrader).parameters
        for name in options:
            if name not in accepted:
                raise UnknownName("option of the grader", name, accepted)
        whole = {k: p.default for k, p in accepted.items()} | {"preset": preset, "backend": backend, **options}
        check_options(whole)
        if whole["url"] is None and whole["gpus"] is None and whole["executor"] != "ray":
            backend = resolve_backend(backend)  # here: an asynchronous trainer hides the GPUs from the process that grades
        self._options: dict[str, Any] = {"preset": preset, "backend": backend, **options}
        self._forget()

    def _forget(self) -> None:
        self._grader: BatchGrader | None = None
        self._pid, self._lock = os.getpid(), threading.Lock()
        self._end: Callable[[], object] = lambda: None

    def __getstate__(self) -> dict[str, Any]:
        """Return what a pickled copy has: the options."""
        return {k: v for k, v in vars(self).items() if k not in _OWN}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        """Make a copy without workers."""
        self.__dict__.update(state)
        self._forget()

    def start(self) -> BatchGrader:
        """Start the workers, or connect to the service, unless that is done.

        Returns:
            The grader.

        Raises:
            UsageError: the service does not answer, or a GPU is missing.
        """
        if self._pid != os.getpid():  # a fork: workers, threads and lock belong to the parent
            self._forget()
        with self._lock:
            if self._grader is None:
                self._grader = BatchGrader(**self._options)
                self._end = weakref.finalize(self, self._grader.close)
            return self._grader

    def close(self) -> None:
        """End the workers. A later call starts new ones."""
        if self._pid == os.getpid():
            self._end()
            self._forget()

    def __enter__(self: SelfT) -> SelfT:
        """Return the grader itself."""
        return self

    def __exit__(self, *exc: object) -> None:
        """End the workers."""
        self.close()

    def grade(self, answers: Sequence[tuple[str, str]]) -> list[GradedAnswer]:
        """Grade answers in parallel: reward, terms, verdict and feedback of each.

        Args:
            answers: pairs of a task's id and an answer, which may be prose around a fenced block.

        Returns:
            The graded answers, in the same order.
        """
        return self.start()(answers)

    async def agrade(self, answers: Sequence[tuple[str, str]]) -> list[GradedAnswer]:
        """Grade answers as ``grade``, without blocking the event loop.

        Args:
            answers: pairs of a task's id and an answer.

        Returns:
            The graded answers, in the same order.
        """
        grader = await asyncio.to_thread(self.start)
        return list(await asyncio.gather(*map(asyncio.wrap_future, grader.submit(answers))))


def shared(preset: str = "default", backend: str = "auto", **options: Any) -> WarmGrader:
    """Return the grader of this process for some options; equal options share one.

    Args:
        preset: name of the preset, or ``python:module:attribute``.
        backend: ``cpu``, ``cuda`` or ``auto``.
        **options: as for ``WarmGrader``.

    Returns:
        The grader. It ends with the process.
    """
    plain = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
    return _shared(os.getpid(), preset, backend, tuple(sorted(plain.items())))


@functools.cache
def _shared(pid: int, preset: str, backend: str, options: tuple[tuple[str, Any], ...]) -> WarmGrader:
    return WarmGrader(preset, backend, **dict(options))
