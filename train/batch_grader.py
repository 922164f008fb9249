"""Grade the answers of a training step in parallel: outcome, reward, terms and feedback of each.

A grading that the machine lost (``infra_fault``) has no reward: it is masked, never counted as 0, and never ends a run.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kbx_env import versions
from kbx_env.deadlines import deadline_of
from kbx_env.envs import prompt
from kbx_env.envs.answer import strip_fences
from kbx_env.errors import UnknownName, UsageError
from kbx_env.executor import Executor, InlinePool, ProcessPool, Request, WorkerPool
from kbx_env.executor.direct import ATTEMPTS
from kbx_env.executor.pools.remote import DEADLINE, WIDTH, RemotePool
from kbx_env.options import resolve_backend
from kbx_env.outcome import GRADER_FAILED, Fault, Outcome, Stage, Verdict
from kbx_env.spec.catalog import load_task
from kbx_env.store import Store

EXECUTORS = ("process", "ray")
"""Where gradings run: in processes of this machine, or on a Ray cluster."""
STORE = "gradings.sqlite"
"""File of gradings, in the folder of a run."""
POLICY = "training"
"""Name of the policy under which the store keeps gradings."""


@dataclass(frozen=True)
class GradedAnswer:
    """One graded submission. ``reward``, ``base`` and ``potential`` are ``None`` where the grading is masked."""

    outcome: Outcome
    reward: float | None
    """The preset's reward for an episode of one turn."""
    base: float | None
    """The preset's reward without shaping; for episodes of several turns."""
    potential: float | None
    """The potential Phi of the preset's shaping; for episodes of several turns."""
    terms: Mapping[str, float | None]
    """The terms of the reward, by name."""
    feedback: str
    """What the model is shown about the submission."""
    compiled: bool
    solved: bool
    """Correct and, where kernels are timed, at least ``target`` times as fast as eager."""


@dataclass(frozen=True)
class _Place:
    """Where the gradings of a run take place."""

    pool: WorkerPool
    backend: str
    about: dict[str, str]
    """Device and versions, for the keys of the store."""
    here: bool = True
    """Whether gradings may use a GPU of this machine."""
    attempts: int = ATTEMPTS
    deadline: float | None = None
    """Seconds for one attempt; ``None`` for the usual ones."""


class BatchGrader:
    """Grades on worker processes or a Ray cluster. ``gradings`` and ``seconds`` count the gradings and their time so far."""

    def __init__(
        self, preset: str = "default", backend: str = "auto", *, workers: int | None = None, executor: str = "process",
        ray_address: str | None = None, per_gpu: int | None = None, timing: bool = True, grading: str = "contract",
        torch_ops: str = "strict", targets: Sequence[str] = ("sm_90",), target: float = 1.0, wall: float = 30.0,
        grading_seed: int | None = None, split: str = "train", sizes: str = "published",
        precision: str = "report", grader: str | None = None, out: str | Path | None = None,
        store: str | Path | None = None, grade: Callable[..., Outcome] | None = None,
    ) -> None:  # fmt: skip
        """Start a grader and its workers.

        Args:
            preset: name of the reward preset.
            backend: cpu, cuda, or auto.
            workers: gradings at a time; by default ``workers_here``, on Ray as many as fit on the cluster.
            executor: process or ray.
            ray_address: address of the cluster: local, auto, or HOST:PORT.
            per_gpu: gradings that share a GPU of the cluster; by default what its cores allow.
            timing: time correct kernels on a GPU.
            grading: contract or paper.
            torch_ops: strict or allow.
            targets: ahead-of-time compilation targets.
            target: smallest speedup with which a task is solved, where kernels are timed.
            wall: seconds for one grading, without timing.
            grading_seed: fixes the inputs; ``None``: secret and new for each grading.
            split: train, or for evaluation eval, which has the held-out shapes too.
            sizes: sizes that are timed or estimated: published, or for evaluation held-out.
            precision: of times: report (1 %), or training (3 %, about half the time).
            grader: address of a grading service (``kbx serve``) that grades in place of this machine; its token is in the
                environment variable ``KBX_TOKEN``.
            out: folder for the file of gradings, so that equal sources are graded once, also in a resumed run.
            store: another file of gradings, which several runs may share.
            grade: replaces the real grader in tests.

        Raises:
            UnknownName: no such preset, backend, executor, grading, sizes, precision or target.
            UsageError: an option out of its range, or Ray or a GPU is needed and missing.
        """
        from kbx_env.rewards.compose import load_preset, load_term

        from kbx_env.options import BACKENDS, GRADINGS, PRECISIONS, SIZES, TARGETS, TORCH_OPS

        self.preset = load_preset(preset)
        for kind, name, known in (
            ("executor", executor, EXECUTORS), ("backend", backend, BACKENDS), ("grading", grading, GRADINGS),
            ("torch policy", torch_ops, TORCH_OPS), ("sizes", sizes, SIZES),
            ("precision", precision, PRECISIONS), *(("target", t, TARGETS) for t in targets),
        ):  # fmt: skip
            if name not in known:
                raise UnknownName(kind, name, known)
        for name, value in (("ray_address", ray_address), ("per_gpu", per_gpu)):
            if value is not None and executor != "ray":
                raise UsageError(f"{name} is for executor=ray; set that, or leave {name} out")
        if grader is not None and executor == "ray":
            raise UsageError("executor=ray and grader: the service has the machines; leave one of them out")
        if workers is not None and workers < 1:
            raise UsageError(f"workers is {workers}; at least 1")
        if not 0 <= target < math.inf or not 0 < wall < math.inf:
            raise UsageError(f"target is {target}, wall is {wall}; a speedup, and seconds above 0")
        self._compiles, self._target, self._fault_printed = load_term("compiles"), target, False
        self.gradings, self.seconds = 0, 0.0
        self._stack = contextlib.ExitStack()
        try:
            made = self._open(backend, workers, executor, ray_address, per_gpu, timing, grader, grade)
            self.backend, self._about, self._own_gpu = made.backend, made.about, made.backend == "cuda" and made.here
            timed = self.backend == "cuda" and timing
            self.timed = timed
            self._options: dict[str, Any] = {
                "backend": self.backend, "targets": tuple(targets), "grading": grading, "timing": timing, "split": split,
                "wall": wall, "seed": grading_seed, "estimate": self.preset.estimate, "torch_ops": torch_ops,
                # Absent: earlier gradings keep their keys.
                **({} if sizes == "published" else {"sizes": sizes}),
                **({} if precision == "report" else {"precision": precision}),
            }  # fmt: skip
            file = Path(store) if store is not None else Path(out) / STORE if out is not None else None
            if file is not None:
                try:
                    file.parent.mkdir(parents=True, exist_ok=True)
                except OSError as e:
                    setting = f"out={out}" if store is None else f"store={store}"
                    raise UsageError(f"cannot write to {setting}: {e.strerror}; give a folder that can be written") from e
            gradings = None if file is None else self._stack.enter_context(contextlib.closing(Store(file)))
            deadline = made.deadline or deadline_of(timed, wall)
            self._executor = self._stack.enter_context(
                Executor(made.pool, made.attempts, store=gradings, deadline=deadline, capacity=sys.maxsize)
            )
        except BaseException:
            self._stack.close()
            raise

    def _open(
        self, backend: str, workers: int | None, executor: str, ray_address: str | None, per_gpu: int | None, timing: bool,
        grader: str | None, grade: Callable[..., Outcome] | None,
    ) -> _Place:  # fmt: skip
        """Open the pool of a run; the arguments are those of ``__init__``."""
        if grade is None and grader is not None:
            remote = RemotePool(grader, width=workers or WIDTH)
            self._stack.callback(remote.close)
            about = remote.info["environment"]
            # The service itself tries again after an infrastructure fault.
            return _Place(remote, remote.backend(backend), about, here=False, attempts=1, deadline=DEADLINE)
        if grade is None and executor == "ray":
            from kbx_env.executor.pools.ray_pool import open_ray

            pool, device = open_ray(backend, ray_address, workers, per_gpu, timing)
            self._stack.callback(pool.close)
            return _Place(pool, "cpu" if device == "cpu" else "cuda", versions.environment("cpu") | {"device": device})
        found = resolve_backend(backend)
        many = workers or workers_here(found)
        own = InlinePool(grade, many) if grade else ProcessPool(many, env=_own_gpu())
        return _Place(own, found, versions.environment(found))

    def __call__(self, answers: Sequence[tuple[str, str]]) -> list[GradedAnswer]:
        """Grade answers in parallel.

        Args:
            answers: pairs of a task's id and an answer, which may be prose around a fenced block.

        Returns:
            The graded answers, in the same order.
        """
        start = time.monotonic()
        if self._own_gpu:
            _make_room()
        submissions = [(task, strip_fences(text).encode("utf-8", "surrogatepass")) for task, text in answers]
        futures: dict[tuple[str, bytes], Future[Outcome] | Exception] = {}  # equal answers of a batch are graded once
        for task, source in submissions:
            if (task, source) in futures:
                continue
            try:
                about = self._about | {"fingerprint": load_task(task).fingerprint}
                futures[task, source] = self._executor.submit(Request(task, source, self._options, about, POLICY))
            except Exception as e:
                futures[task, source] = e
        found = {key: self._outcome(key[0], future) for key, future in futures.items()}
        outcomes = [found[key] for key in submissions]
        self.gradings += len(outcomes)
        self.seconds += time.monotonic() - start
        faults = [o for o in outcomes if o.fault is Fault.INFRA]
        if faults and not self._fault_printed:
            self._fault_printed = True
            print(f"{len(faults)} of {len(outcomes)} gradings are masked: {faults[0].message[:300]}", file=sys.stderr)
        return [self._graded(o) for o in outcomes]

    def _outcome(self, task: str, future: Future[Outcome] | Exception) -> Outcome:
        try:
            if isinstance(future, Exception):
                raise future
            return future.result()
        except Exception as e:  # an error of the grader, the store or the disk is not the kernel's: training goes on
            text = f"{GRADER_FAILED}: {type(e).__name__}: {e}"
            grading = str(self._options["grading"])
            return Outcome(task, Verdict.INFRA_FAULT, Stage.SCREEN, self.backend, grading, Fault.INFRA, text)

    def _graded(self, outcome: Outcome) -> GradedAnswer:
        fast = not self.timed or (outcome.speedup or 0.0) >= self._target
        return GradedAnswer(
            outcome, self.preset(outcome), self.preset.base(outcome), self.preset.potential(outcome), self.preset.terms(outcome),
            prompt.feedback(outcome), self._compiles(outcome) == 1.0, outcome.correct and fast,
        )  # fmt: skip

    def close(self) -> None:
        """Stop the workers. Gradings that have ended are in the store."""
        self._stack.close()

    def __enter__(self) -> BatchGrader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def workers_here(backend: str) -> int:
    """Return how many gradings run at a time on this machine.

    On the CPU backend as many as cores. On CUDA two cores are left for the kernels that are timed, and the others are divided
    among the training processes of this machine.

    Args:
        backend: ``cpu`` or ``cuda``.

    Returns:
        Gradings at a time, at least 1.
    """
    cores = os.cpu_count() or 1
    return cores if backend == "cpu" else max(1, (cores - 2) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _make_room() -> None:
    """Free torch's cached GPU memory: other processes grade kernels on the same GPU."""
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _own_gpu() -> dict[str, str]:
    """Return the environment of workers: where several processes train, each on a GPU, its kernels are timed on its own GPU."""
    rank = os.environ.get("LOCAL_RANK")
    if rank is None or int(os.environ.get("LOCAL_WORLD_SIZE", "1")) < 2:
        return {}
    devices = [d for d in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if d]
    return {"CUDA_VISIBLE_DEVICES": devices[int(rank)] if int(rank) < len(devices) else rank}
