"""Two tiers as a schedule: the CPU tier screens every submission, and only survivors take a worker of the GPU tier."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kbx_env.executor.pools.process import Request, WorkerLost, WorkerPool
from kbx_env.outcome import FaultKind, Outcome, Verdict

SCREENED = {"backend": "cpu", "targets": (), "timing": False, "estimate": None, "compiled": False, "sizes": "published"}
"""Options of a screening: those of the proof with which a grading on CUDA begins
(``kbx_env.grading.pipeline.on_cpu_tier``)."""


class TieredPool:
    """Grades on CUDA in two steps: the proof on the CPU tier, in workers without a GPU, then the rest on a GPU.

    A submission that fails on the CPU tier has its verdict, as it has in a grading on one machine
    (``docs/decisions/0006-proof-before-gpu.md``), and takes no worker of the GPU. A survivor takes its proof along, so that
    the worker of the GPU does not make it again. A submission that the CPU tier lost, or whose options ask for no proof,
    goes to the GPU as it is.

    Attributes:
        width: gradings at a time, on both tiers: while every worker of the GPU is busy, screening goes on.
        screened: submissions screened so far.
        survived: how many of them went on to the GPU.
    """

    def __init__(self, screen: WorkerPool, final: WorkerPool) -> None:
        """Combine two pools; ``close`` closes both.

        Args:
            screen: grades on the CPU tier, on this machine or another.
            final: grades on CUDA.
        """
        self._screen, self._final, self.width = screen, final, screen.width + final.width
        self.screened = self.survived = 0
        self._lock = threading.Lock()
        self._rooms = {id(p): threading.BoundedSemaphore(p.width) for p in (screen, final)}

    def grade(self, request: Request, deadline: float) -> Outcome:
        """Grade on the CPU tier, and go on to the GPU with what survives.

        Args:
            request: the submission, with the options of a grading on CUDA.
            deadline: seconds for each tier, from the moment one of its workers is free.

        Returns:
            The outcome.

        Raises:
            WorkerLost: the worker of the GPU died, or the deadline passed.
            UsageError: the grader refuses the request.
        """
        if request.proof is None and is_proven(request.options):
            start = time.perf_counter()
            with self._rooms[id(self._screen)]:
                proof = screen(self._screen, request, deadline)
            with self._lock:
                self.screened += proof is not None
            if ended := outcome_if_failed(proof, time.perf_counter() - start):
                return ended
            with self._lock:
                self.survived += proof is not None
            request = replace(request, proof=proof)
        with self._rooms[id(self._final)]:
            return self._final.grade(request, deadline)

    def close(self) -> None:
        """Close both pools."""
        try:
            self._screen.close()
        finally:
            self._final.close()


def is_proven(options: Mapping[str, Any]) -> bool:
    """Return whether a grading with these options begins with a proof on the CPU tier."""
    return options.get("backend") == "cuda" and options.get("grading", "contract") != "paper"


def screen(pool: WorkerPool, request: Request, deadline: float) -> Outcome | None:
    """Grade a submission on the CPU tier.

    Args:
        pool: the workers that do it.
        request: the submission, with the options of a grading on CUDA.
        deadline: seconds, from the moment a worker is free.

    Returns:
        The proof for the grading on CUDA; ``None`` where the machine lost it.

    Raises:
        UsageError: the grader refuses the request.
    """
    try:
        proof = pool.grade(replace(request, options={**request.options, **SCREENED}), deadline)
    except WorkerLost:
        return None
    lost = proof.verdict is Verdict.INFRA_FAULT and proof.fault_kind is not FaultKind.UNSUPPORTED
    return None if lost else proof


def outcome_if_failed(proof: Outcome | None, seconds: float) -> Outcome | None:
    """Return the outcome of a grading on CUDA whose proof has failed, which ends it.

    Args:
        proof: from ``screen``.
        seconds: how long the proof took, its wait for a worker included.

    Returns:
        The outcome; ``None`` where the grading goes on: the submission is correct, or the CPU tier cannot execute it or lost it.
    """
    if proof is None or proof.correct or proof.verdict is Verdict.INFRA_FAULT:
        return None
    message = f"executed on the CPU tier: {proof.message}"
    return replace(proof, backend="cuda", message=message, seconds={**proof.seconds, "proof": round(seconds, 4)})
