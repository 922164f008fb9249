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
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kbx_env import versions
from kbx_env.deadlines import deadline_of
from kbx_env.envs import prompt
from kbx_env.envs.answer import REASONING, strip_fences
from kbx_env.errors import UnknownName, UsageError
from kbx_env.executor import Executor, InlinePool, ProcessPool, Request, WorkerPool
from kbx_env.executor.direct import ATTEMPTS
from kbx_env.executor.pools.early_proofs import EarlyProofPool
from kbx_env.executor.worker_count import MAX_PER_GPU, default_workers
from kbx_env.options import BACKENDS, GRADINGS, PRECISIONS, SIZES, TARGETS, TORCH_OPS, resolve_backend
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


class BatchGrader:
    """Grades on worker processes, a Ray cluster or a grading service.

    ``gradings`` and ``seconds`` count the gradings and their time so far.
    """

    def __init__(
        self, preset: str = "default", backend: str = "auto", *, workers: int | None = None, executor: str = "process",
        ray_address: str | None = None, per_gpu: int | None = None, timing: bool = True, grading: str = "contract",
        torch_ops: str = "strict", targets: Sequence[str] = ("sm_90",), target: float = 1.0, wall: float = 30.0,
        grading_seed: int | None = None, split: str = "train", sizes: str = "published",
        precision: str = "report", out: str | Path | None = None,
        store: str | Path | None = None, grade: Callable[..., Outcome] | None = None,
        gpus: Sequence[int | str] | None = None, url: str | None = None, token: str | None = None,
        reasoning: Sequence[str] = REASONING,
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
            out: folder for the file of gradings, so that equal sources are graded once, also in a resumed run.
            store: another file of gradings, which several runs may share.
            grade: replaces the real grader in tests.
            gpus: GPUs that grade, as ``nvidia-smi`` shows them, which this process need not see; by default its own. Of
                several training processes on this machine each takes its part of them.
            url: address of a grading service (``kbx serve``) that grades instead of this machine. ``workers`` is then the
                number of requests at a time.
            token: bearer token of the service; by default the environment variable ``KBX_TOKEN``.
            reasoning: tags around reasoning, which is not graded; empty for none.

        Raises:
            UnknownName: no such preset, backend, executor, grading, sizes, precision or target.
            UsageError: an option out of its range, or Ray, a GPU or the service is needed and missing.
        """
        check_options(locals())
        from kbx_env.rewards.compose import load_preset, load_term

        self.preset = load_preset(preset)
        self._compiles, self._target, self._fault_printed = load_term("compiles"), target, False
        self._reasoning, self._ahead = tuple(reasoning), dict[tuple[str, bytes], Future[Outcome]]()
        self._by_service = url is not None
        self.gradings, self.seconds = 0, 0.0
        self._stack = contextlib.ExitStack()
        try:
            pool, self.backend, self._about = _open(
                backend, workers, executor, ray_address, per_gpu, timing, gpus, url, token, grade
            )
            self._stack.callback(pool.close)
            timed = self.timed = self.backend == "cuda" and timing
            self.shares_gpu = self.backend == "cuda" and executor != "ray" and url is None and gpus is None
            # A model that generates on the GPU of the graders would disturb their timing: only proofs begin early there.
            self._early = EarlyProofPool(pool) if timed and self.shares_gpu else None
            self._options: dict[str, Any] = {
                "backend": self.backend, "targets": tuple(targets), "grading": grading, "timing": timing, "split": split,
                "wall": wall, "seed": grading_seed, "estimate": self.preset.estimate, "torch_ops": torch_ops,
                # Absent: earlier gradings keep their keys.
                **({} if sizes == "published" else {"sizes": sizes}),
                **({} if precision == "report" else {"precision": precision}),
                **({"compiled": True} if self.preset.compiled and timed else {}),
            }  # fmt: skip
            file = Path(store) if store is not None else Path(out) / STORE if out is not None else None
            if file is not None:
                try:
                    file.parent.mkdir(parents=True, exist_ok=True)
                except OSError as e:
                    setting = f"out={out}" if store is None else f"store={store}"
                    raise UsageError(f"cannot write to {setting}: {e.strerror}; give a folder that can be written") from e
            gradings = None if file is None else self._stack.enter_context(contextlib.closing(Store(file)))
            attempts, deadline = ATTEMPTS, deadline_of(timed, wall, self.preset.compiled and timed)
            if url is not None:
                from kbx_env.executor.pools.remote import DEADLINE

                attempts, deadline = 1, DEADLINE  # the service repeats a lost grading, its client a lost request
            self._executor = self._stack.enter_context(
                Executor(self._early or pool, attempts, gradings, deadline=deadline, capacity=sys.maxsize)
            )
        except BaseException:
            self._stack.close()
            raise

    def __call__(self, answers: Sequence[tuple[str, str]]) -> list[GradedAnswer]:
        """Grade answers in parallel.

        Args:
            answers: pairs of a task's id and an answer, which may be prose around a fenced block.

        Returns:
            The graded answers, in the same order.
        """
        start = time.monotonic()
        if self._early is not None:
            self._early.cancel_pending()
        futures = self.submit(answers)
        for future in self._ahead.values():  # answers that were not handed in after all
            future.cancel()
        self._ahead.clear()
        graded = [f.result() for f in futures]
        if self._early is not None:
            self._early.clear()
        self.seconds += time.monotonic() - start
        faults = [j.outcome for j in graded if j.outcome.fault is Fault.INFRA]
        if faults and not self._fault_printed:
            self._fault_printed = True
            print(f"{len(faults)} of {len(graded)} gradings are masked: {faults[0].message[:300]}", file=sys.stderr)
        return graded

    def submit(self, answers: Sequence[tuple[str, str]]) -> list[Future[GradedAnswer]]:
        """Begin to grade answers, and return at once. Thread-safe.

        Args:
            answers: pairs of a task's id and an answer, which may be prose around a fenced block.

        Returns:
            The future graded answers, in the same order. After an error of the grader, the store or the disk, which is not the
            kernel's, an answer is masked. A future raises an error of a reward term, and a ``UsageError`` of the service, which
            would refuse every other answer too.
        """
        if self.shares_gpu:
            _make_room()
        submissions = [(task, self._source(task, text)) for task, text in answers]
        futures: dict[tuple[str, bytes], Future[GradedAnswer]] = {}  # equal answers of a batch are graded once
        for task, source in submissions:
            if (task, source) not in futures:
                futures[task, source] = self._submit(task, source)
        self.gradings += len(submissions)
        return [futures[key] for key in submissions]

    def _submit(self, task: str, source: bytes) -> Future[GradedAnswer]:
        graded: Future[GradedAnswer] = Future()
        graded.set_running_or_notify_cancel()  # equal answers share it: one that is given up must not take it from the others

        def ended(future: Future[Outcome]) -> None:
            try:
                graded.set_result(self._graded(self._outcome(task, future)))
            except Exception as e:  # a reward term of the user's own may fail in any way
                graded.set_exception(e)

        begun = self._ahead.pop((task, source), None)
        (begun if begun is not None else self._begin(task, source)).add_done_callback(ended)
        return graded

    def begin(self, task: str, text: str) -> None:
        """Begin to grade an answer that the next call will have, while other answers are still generated.

        Where kernels are timed on the GPU that generates, only the proof on the CPU tier begins, and the rest of the grading waits
        for the call. With fixed inputs nothing begins there: they would depend on whether the proof began in time.

        Args:
            task: the task's id.
            text: the answer.
        """
        key = (task, self._source(task, text))
        if self._early is None:
            if key not in self._ahead:
                self._ahead[key] = self._begin(*key)
        elif self._options["seed"] is None:
            with contextlib.suppress(Exception):  # of the store or the disk: the grading has it too, and is masked
                request = self._request(*key)
                if not self._executor.has_outcome(request):
                    self._early.begin(request, deadline_of(False, self._options["wall"]))

    def _source(self, task: str, text: str) -> bytes:
        try:
            entry = load_task(task).entry
        except UnknownName:  # the grading says so, and is masked
            entry = None
        return strip_fences(text, entry, self._reasoning).encode("utf-8", "surrogatepass")

    def _begin(self, task: str, source: bytes) -> Future[Outcome]:
        try:
            return self._executor.submit(self._request(task, source))
        except Exception as e:
            failed: Future[Outcome] = Future()
            failed.set_exception(e)
            return failed

    def _request(self, task: str, source: bytes) -> Request:
        return Request(task, source, self._options, self._about | {"fingerprint": load_task(task).fingerprint}, POLICY)

    def _outcome(self, task: str, future: Future[Outcome]) -> Outcome:
        try:
            return future.result()
        except (Exception, CancelledError) as e:  # an error of the grader, the store or the disk is not the kernel's
            if self._by_service and isinstance(e, UsageError):
                raise  # a service that refuses an option refuses it for every answer
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


def check_options(options: Mapping[str, Any]) -> None:
    """Check the options of a ``BatchGrader`` without starting a worker.

    Args:
        options: all arguments of ``BatchGrader``, by name; other keys are ignored.

    Raises:
        UnknownName: no such preset, backend, executor, grading, sizes, precision or target.
        UsageError: an option out of its range, or options that exclude each other.
    """
    from kbx_env.rewards.compose import load_preset

    load_preset(options["preset"])
    for kind, key, known in (
        ("executor", "executor", EXECUTORS), ("backend", "backend", BACKENDS), ("grading", "grading", GRADINGS),
        ("torch policy", "torch_ops", TORCH_OPS), ("sizes", "sizes", SIZES), ("precision", "precision", PRECISIONS),
    ):  # fmt: skip
        if options[key] not in known:
            raise UnknownName(kind, options[key], known)
    for target in options["targets"]:
        if target not in TARGETS:
            raise UnknownName("target", target, TARGETS)
    for key in ("ray_address", "per_gpu"):
        if options[key] is not None and options["executor"] != "ray":
            raise UsageError(f"{key} is for executor=ray; set that, or leave {key} out")
    workers, target, wall = options["workers"], options["target"], options["wall"]
    if workers is not None and workers < 1:
        raise UsageError(f"workers is {workers}; at least 1")
    if not 0 <= target < math.inf or not 0 < wall < math.inf:
        raise UsageError(f"target is {target}, wall is {wall}; a speedup, and seconds above 0")
    _check_place(options)


def _check_place(options: Mapping[str, Any]) -> None:
    """Check the options that say where gradings run: at most one of Ray, named GPUs and a service."""
    gpus, url = options["gpus"], options["url"]
    given = {"executor=ray": options["executor"] == "ray", "gpus": gpus is not None, "url": url is not None}
    places = [name for name, is_given in given.items() if is_given]
    if len(places) > 1:
        raise UsageError(f"{' and '.join(places)}: each says where gradings run; give one of them")
    if gpus is not None and (options["backend"] == "cpu" or not gpus):
        raise UsageError(f"gpus is {list(gpus)!r}, backend is {options['backend']!r}; at least one GPU, and cuda or auto")
    if options["token"] is not None and url is None:
        raise UsageError("token is for a grading service; give its url too")


def _open(
    backend: str, workers: int | None, executor: str, ray_address: str | None, per_gpu: int | None, timing: bool,
    gpus: Sequence[int | str] | None, url: str | None, token: str | None, grade: Callable[..., Outcome] | None,
) -> tuple[WorkerPool, str, dict[str, str]]:  # fmt: skip
    """Start workers; return them, the backend, and the fields of a stored record that say where gradings ran."""
    if grade is not None:
        chosen = resolve_backend(backend)
        return InlinePool(grade, workers or workers_here(chosen)), chosen, versions.environment(chosen)
    if url is not None:
        from kbx_env.executor.pools.remote import WIDTH, RemotePool

        pool = RemotePool(url, token, workers or WIDTH)
        return pool, pool.backend(backend), pool.info["environment"]
    if executor == "ray":
        from kbx_env.executor.pools.ray_pool import open_ray

        actors, device = open_ray(backend, ray_address, workers, per_gpu, timing)
        try:
            actors.width = own_share(actors.width)
        except UsageError:
            actors.close()
            raise
        return actors, "cpu" if device == "cpu" else "cuda", versions.environment("cpu") | {"device": device}
    if gpus is not None:
        from kbx_env.executor.pools.gpu import pool_on

        mine = own_gpus(gpus)
        named, device = pool_on(mine, max(1, (workers or workers_here("cuda", gpus)) // len(mine)))
        return named, "cuda", versions.environment("cpu") | {"device": device}
    chosen = resolve_backend(backend)
    return ProcessPool(workers or workers_here(chosen), env=_own_gpu()), chosen, versions.environment(chosen)


def workers_here(backend: str, gpus: Sequence[int | str] | None = None) -> int:
    """Return the default number of workers of this process on this machine.

    The training processes of a machine divide its cores, and those that share a GPU for grading divide its workers.

    Args:
        backend: ``cpu`` or ``cuda``.
        gpus: GPUs that only grade, for all processes; ``None``: each process grades on its own.

    Returns:
        Workers, at least 1; with ``gpus`` at least 1 for each GPU on which this process grades.
    """
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if backend == "cpu" or gpus is None:
        return default_workers(backend, processes, processes)
    sharers = math.ceil(processes / len(gpus))
    each = min(default_workers(backend, max(processes, len(gpus))), max(1, MAX_PER_GPU // sharers))
    return each * len(own_gpus(gpus))


def own_share(slots: int) -> int:
    """Return how many of the workers of a cluster this process of a distributed run uses, so that its processes do not compete.

    A worker that a process has started stays with it; a process that found none would wait for it in vain.

    Args:
        slots: workers of the whole run.

    Returns:
        At least 1.

    Raises:
        UsageError: there are fewer workers than processes.
    """
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if slots < world:
        raise UsageError(
            f"{slots} worker(s) on Ray for {world} training processes: each needs one of its own; raise workers, add nodes, or "
            "train with fewer processes"
        )
    return slots // world + (rank < slots % world)


def check_trains_elsewhere(gpus: Sequence[int]) -> None:
    """Check that this process trains on none of the GPUs that only grade.

    Args:
        gpus: numbers of the GPUs that only grade.

    Raises:
        UsageError: a GPU that this process trains on, or numbers that name no GPUs.
    """
    if min(gpus) < 0 or len(set(gpus)) < len(gpus):
        raise UsageError(f"grade_gpus is {list(gpus)}; numbers of GPUs as nvidia-smi counts them, each once, such as [6,7]")
    own = _device_of(int(os.environ.get("LOCAL_RANK", "0")))
    if own in map(str, gpus):
        raise UsageError(
            f"grade_gpus={list(gpus)}: this process trains on GPU {own}; start fewer processes, or choose the GPUs for "
            "training with CUDA_VISIBLE_DEVICES"
        )


def _device_of(rank: int) -> str:
    """Return the name of the GPU that a process of this machine trains on."""
    devices = [d for d in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if d]
    return devices[rank] if rank < len(devices) else str(rank)


def own_gpus(gpus: Sequence[int | str]) -> list[int | str]:
    """Return the part of the GPUs that only grade on which this process of a distributed run grades; at least one."""
    rank, ranks = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return list(gpus)[rank::ranks] or [gpus[rank % len(gpus)]]


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
    import torch

    from kbx_env.executor.pools.gpu import environment, uuid_of

    return environment(_device_of(int(rank)), uuid_of(int(rank)) if torch.cuda.device_count() > int(rank) else "")
