"""Proofs that begin before their gradings, while the GPU is not to be disturbed."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from kbx_env.errors import UsageError
from kbx_env.executor.pools.process import Request, WorkerPool
from kbx_env.executor.pools.tiered import is_proven, outcome_if_failed, screen
from kbx_env.outcome import Outcome


class EarlyProofPool:
    """Grades on CUDA, and makes the proofs of some submissions ahead on the CPU tier, in the same workers.

    A model that generates on the GPU of the graders disturbs their timing. But a grading begins with a proof that needs no GPU,
    and most wrong submissions end there: proofs are made while the model generates, and the rest when it has ended.

    Attributes:
        width: gradings at a time.
    """

    def __init__(self, pool: WorkerPool) -> None:
        """Add early proofs to a pool; ``close`` closes it.

        Args:
            pool: grades on CUDA, and on the CPU tier where a request says so.
        """
        self._pool, self.width = pool, pool.width
        self._lock, self._room = threading.Lock(), threading.BoundedSemaphore(pool.width)
        self._proofs: dict[str, Future[tuple[Outcome | None, float]]] = {}
        self._threads = ThreadPoolExecutor(pool.width, thread_name_prefix="proof")

    def begin(self, request: Request, deadline: float) -> None:
        """Begin the proof of a submission, for ``grade``, as soon as a worker is free; do not wait for it.

        Args:
            request: the request that ``grade`` will have.
            deadline: seconds for the proof, from the moment a worker is free.
        """
        if not is_proven(request.options):
            return
        with self._lock:
            if request.content not in self._proofs:
                self._proofs[request.content] = self._threads.submit(self._prove, request, deadline)

    def _prove(self, request: Request, deadline: float) -> tuple[Outcome | None, float]:
        start = time.perf_counter()
        try:
            with self._room:
                return screen(self._pool, request, deadline), time.perf_counter() - start
        except UsageError:  # the grading is refused for the same reason, and says so
            return None, 0.0

    def cancel_pending(self) -> None:
        """Cancel the proofs that wait for a worker. Their gradings, which come now, make them."""
        with self._lock:
            self._proofs = {content: proof for content, proof in self._proofs.items() if not proof.cancel()}

    def clear(self) -> None:
        """Drop the proofs of submissions that were not graded after all. Those that run end by themselves."""
        self.cancel_pending()
        with self._lock:
            self._proofs = {}

    def grade(self, request: Request, deadline: float) -> Outcome:
        """Grade a submission, from its proof on where that has begun.

        Args:
            request: the submission, with the options of a grading on CUDA.
            deadline: seconds for the grading, from the moment a worker is free.

        Returns:
            The outcome.

        Raises:
            WorkerLost: the worker died, or the deadline passed.
            UsageError: the grader refuses the request.
        """
        with self._lock:
            begun = self._proofs.pop(request.content, None)
        if begun is not None and not begun.cancel():
            proof, seconds = begun.result()
            if ended := outcome_if_failed(proof, seconds):
                return ended
            request = replace(request, proof=proof)
        with self._room:
            return self._pool.grade(request, deadline)

    def close(self) -> None:
        """Close the pool, and end proofs that run."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._pool.close()
        self._threads.shutdown(wait=True)
