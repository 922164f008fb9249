"""Grades the answers of a training step, all at once: verdict, reward, terms and feedback of each.

A grading that could not be done (``infra_fault``) has no reward: it is masked, never counted as 0, and never ends a run.
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
from kbx_env.outcome import GRADER_FAILED, Fault, Outcome, Stage, Verdict
from kbx_env.spec.catalog import load_task
from kbx_env.store import Store

EXECUTORS = ("process", "ray")
STORE = "gradings.sqlite"
POLICY = "training"
"""Under this name gradings are kept."""


@dataclass(frozen=True)
class Judged:
    """One graded submission.

    ``reward`` is the preset's own, of an episode of one turn; ``base`` is it without shaping, ``potential`` the shaping's Phi:
    over several turns these two count. All are ``None`` where the grading is masked. ``solved``: correct, and where kernels are
    timed at least ``target`` times as fast as eager.
    """

    outcome: Outcome
    reward: float | None
    base: float | None
    potential: float | None
    terms: Mapping[str, float | None]
    feedback: str
    compiled: bool
    solved: bool


class Judge:
    """Grades over worker processes or a Ray cluster. ``gradings`` and ``seconds`` are what it has done so far."""

    def __init__(
        self, preset: str = "default", backend: str = "auto", *, workers: int | None = None, executor: str = "process",
        ray_address: str | None = None, per_gpu: int | None = None, timing: bool = True, grading: str = "contract",
        torch_ops: str = "strict", targets: Sequence[str] = ("sm_90",), target: float = 1.0, wall: float = 30.0,
        grading_seed: int | None = None, split: str = "train", sizes: str = "published", out: str | Path | None = None,
        store: str | Path | None = None, grade: Callable[..., Outcome] | None = None,
    ) -> None:  # fmt: skip
        """A judge; its workers start at once.

        Args:
            preset: name of the reward.
            backend: cpu, cuda, or auto.
            workers: gradings at a time; by default ``workers_here``. On Ray what there is room for.
            executor: process or ray.
            ray_address: of the cluster: local, auto, or HOST:PORT.
            per_gpu: gradings that share a GPU of the cluster; by default what its cores allow.
            timing: time correct kernels on a GPU.
            grading: contract or paper.
            torch_ops: strict or allow.
            targets: of compilation ahead of time.
            target: speedup from which a task is solved, where kernels are timed.
            wall: seconds for the stages of one grading but timing.
            grading_seed: fixes the inputs; ``None``: secret and fresh for each grading.
            split: train, or eval: the held-out shapes too, for evaluation.
            sizes: which are timed or estimated: published, or held-out, for evaluation.
            out: folder that keeps the gradings: equal sources are then graded once, also after a kill.
            store: file that keeps them instead, and may be several runs' own: what one has graded the others know.
            grade: stands in for the real grader in tests.

        Raises:
            UnknownName: no such preset, backend, executor, grading, sizes or target.
            UsageError: no Ray or no GPU where one is asked for.
        """
        from kbx_env.rewards.compose import load_preset, load_term

        from kbx_env.grading.grader import BACKENDS, GRADINGS, TARGETS, TORCH_OPS, resolve_backend
        from kbx_env.grading.sizes import SIZES

        self.preset = load_preset(preset)
        for kind, name, known in (
            ("executor", executor, EXECUTORS), ("backend", backend, BACKENDS), ("grading", grading, GRADINGS),
            ("torch policy", torch_ops, TORCH_OPS), ("sizes", sizes, SIZES), *(("target", t, TARGETS) for t in targets),
        ):  # fmt: skip
            if name not in known:
                raise UnknownName(kind, name, known)
        for name, value in (("ray_address", ray_address), ("per_gpu", per_gpu)):
            if value is not None and executor != "ray":
                raise UsageError(f"{name} is for executor=ray; set that, or leave {name} out")
        if workers is not None and workers < 1:
            raise UsageError(f"workers is {workers}; at least 1")
        if not 0 <= target < math.inf or not 0 < wall < math.inf:
            raise UsageError(f"target is {target}, wall is {wall}; a speedup, and seconds above 0")
        self._compiles, self._target, self._told = load_term("compiles"), target, False
        self.gradings, self.seconds = 0, 0.0
        self._stack = contextlib.ExitStack()
        try:
            lane: WorkerPool
            if executor == "ray" and grade is None:
                from kbx_env.executor.pools.ray_pool import open_ray

                lane, device = open_ray(backend, ray_address, workers, per_gpu, timing)
                self._stack.callback(lane.close)
                self.backend = "cpu" if device == "cpu" else "cuda"
                self._about = versions.environment("cpu") | {"device": device}
                timed = self.backend == "cuda" and timing
            else:
                self.backend = resolve_backend(backend)
                timed = self.backend == "cuda" and timing
                self._about = versions.environment(self.backend)
                many = workers or workers_here(self.backend)
                lane = InlinePool(grade, many) if grade else ProcessPool(many, env=_own_gpu())
            self.timed = timed
            self._options: dict[str, Any] = {
                "backend": self.backend, "targets": tuple(targets), "grading": grading, "timing": timing, "split": split,
                "wall": wall, "seed": grading_seed, "estimate": self.preset.estimate, "torch_ops": torch_ops,
                **({} if sizes == "published" else {"sizes": sizes}),  # absent: gradings of earlier runs keep their keys
            }  # fmt: skip
            file = Path(store) if store is not None else Path(out) / STORE if out is not None else None
            if file is not None:
                try:
                    file.parent.mkdir(parents=True, exist_ok=True)
                except OSError as e:
                    asked = f"out={out}" if store is None else f"store={store}"
                    raise UsageError(f"cannot write to {asked}: {e.strerror}; give a folder that can be written") from e
            kept = None if file is None else self._stack.enter_context(contextlib.closing(Store(file)))
            deadline = deadline_of(timed, wall)
            self._executor = self._stack.enter_context(Executor(lane, store=kept, deadline=deadline, capacity=sys.maxsize))
        except BaseException:
            self._stack.close()
            raise

    def __call__(self, answers: Sequence[tuple[str, str]]) -> list[Judged]:
        """Grade (task, answer) pairs in parallel, in their order. An answer may be prose around a fenced block."""
        start = time.monotonic()
        if self.backend == "cuda":
            _make_room()
        asked = [(task, strip_fences(text).encode("utf-8", "surrogatepass")) for task, text in answers]
        futures: dict[tuple[str, bytes], Future[Outcome] | Exception] = {}  # equal answers of a batch are one grading
        for task, source in asked:
            if (task, source) in futures:
                continue
            try:
                about = self._about | {"fingerprint": load_task(task).fingerprint}
                futures[task, source] = self._executor.submit(Request(task, source, self._options, about, POLICY))
            except Exception as e:
                futures[task, source] = e
        found = {key: self._outcome(key[0], future) for key, future in futures.items()}
        outcomes = [found[key] for key in asked]
        self.gradings += len(outcomes)
        self.seconds += time.monotonic() - start
        faults = [o for o in outcomes if o.fault is Fault.INFRA]
        if faults and not self._told:
            self._told = True
            print(f"{len(faults)} of {len(outcomes)} gradings are masked: {faults[0].message[:300]}", file=sys.stderr)
        return [self._judged(o) for o in outcomes]

    def _outcome(self, task: str, future: Future[Outcome] | Exception) -> Outcome:
        try:
            if isinstance(future, Exception):
                raise future
            return future.result()
        except Exception as e:  # of the grader, the store, the disk: nobody's kernel is to blame, and training goes on
            text = f"{GRADER_FAILED}: {type(e).__name__}: {e}"
            grading = str(self._options["grading"])
            return Outcome(task, Verdict.INFRA_FAULT, Stage.SCREEN, self.backend, grading, Fault.INFRA, text)

    def _judged(self, outcome: Outcome) -> Judged:
        fast = not self.timed or (outcome.speedup or 0.0) >= self._target
        return Judged(
            outcome, self.preset(outcome), self.preset.base(outcome), self.preset.potential(outcome), self.preset.terms(outcome),
            prompt.feedback(outcome), self._compiles(outcome) == 1.0, outcome.correct and fast,
        )  # fmt: skip

    def close(self) -> None:
        """End the workers; what has ended is in the store."""
        self._stack.close()

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def workers_here(backend: str) -> int:
    """Gradings at a time on this machine: on the CPU backend the cores. On a GPU they share it through its lease, timing has it
    alone; two cores are left to the kernels that are timed, and what remains is divided among the processes that train here."""
    cores = os.cpu_count() or 1
    return cores if backend == "cpu" else max(1, (cores - 2) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _make_room() -> None:
    """Give back what this process only keeps for later: kernels are graded on the same GPU, in other processes."""
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _own_gpu() -> dict[str, str]:
    """Where several processes train on a GPU each, kernels of one are timed on its own."""
    rank = os.environ.get("LOCAL_RANK")
    if rank is None or int(os.environ.get("LOCAL_WORLD_SIZE", "1")) < 2:
        return {}
    seen = [d for d in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if d]
    return {"CUDA_VISIBLE_DEVICES": seen[int(rank)] if int(rank) < len(seen) else rank}
