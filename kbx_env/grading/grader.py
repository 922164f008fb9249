"""One verdict: the stages in order, cheapest first; the first that fails ends the grading."""

from __future__ import annotations

import hashlib
import os
import platform
import secrets
import threading
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from kbx_env.backends import cost
from kbx_env.errors import SandboxError, UnknownName, UsageError
from kbx_env.grading.ablations import DefenceLayer, chosen
from kbx_env.grading.pipeline import GradingPipeline, OutcomeBuilder
from kbx_env.grading.runtime.runner_pool import RunnerPool
from kbx_env.grading.runtime.zygote_client import Zygote
from kbx_env.grading.sizes import SIZES
from kbx_env.outcome import GRADER_FAILED, Fault, Outcome, Stage, Verdict
from kbx_env.spec.catalog import load_task
from kbx_env.spec.task import Task

# A process that was forked after torch had started its OpenMP threads would wait for them forever: they are not there.
os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))

BACKENDS = ("auto", "cpu", "cuda")
GRADINGS = ("contract", "paper")
TORCH_OPS = ("strict", "allow")
NEEDS_TIMES = "{} compares times with torch.compile's: it needs a GPU that times kernels (backend 'cuda', with timing)"
TARGETS = ("sm_80", "sm_90", "sm_100", "sm_120", "gfx942")


def resolve_backend(name: str) -> str:
    """``auto`` becomes ``cuda`` where there is a GPU.

    Raises:
        UnknownName: not a backend.
        UsageError: ``cuda`` without a GPU.
    """
    if name not in BACKENDS:
        raise UnknownName("backend", name, BACKENDS)
    if name == "cpu":
        return name
    if torch.cuda.is_available():
        return "cuda"
    if name == "cuda":
        raise UsageError("backend 'cuda': torch finds no CUDA device on this machine; use --backend cpu (no timing)")
    return "cpu"


class Grader:
    """Keeps a warm zygote between gradings. Use as a context manager, or ``close`` it."""

    def __init__(self, *, attempts: int = 2, without: Iterable[str] = ()) -> None:
        """A grader that starts its processes when they are first needed.

        Args:
            attempts: gradings of one source before an infrastructure fault is final.
            without: layers of defence to leave out (``kbx_env.grading.ablations``), to see what they are worth. Such
                outcomes say so and are never paid.
        """
        self._zygote: Zygote | None = None
        self._lock = threading.Lock()
        self._attempts = attempts
        self.without = chosen(without)
        self.places = RunnerPool()

    def __enter__(self) -> Grader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the zygote."""
        with self._lock:
            zygote, self._zygote = self._zygote, None
            places, self.places = self.places, RunnerPool()
        places.close()
        if zygote is not None:
            zygote.close()

    def zygote(self) -> Zygote:
        """The warm zygote, started on first use and again when it died.

        Raises:
            SandboxError: it does not start.
        """
        with self._lock:  # gradings in other threads share it
            if self._zygote is not None and not self._zygote.alive:
                self._zygote.close()
                self._zygote = None
            if self._zygote is None:
                self._zygote = Zygote()
            return self._zygote

    def grade(
        self,
        task_id: str,
        source: str | bytes,
        *,
        backend: str = "auto",
        targets: Sequence[str] | None = None,
        grading: str = "contract",
        seed: int | None = None,
        timing: bool = True,
        split: str = "eval",
        wall: float = 30.0,
        estimate: str | None = None,
        torch_ops: str = "strict",
        compiled: bool = False,
        sizes: str = "published",
    ) -> Outcome:
        """Grade one source.

        Args:
            task_id: ``category/name``.
            source: the submission, text or raw bytes.
            backend: ``auto``, ``cpu`` or ``cuda``.
            targets: ahead-of-time targets, default all of ``TARGETS``; empty for none.
            grading: ``contract`` (ours) or ``paper`` (the paper's tolerances).
            seed: fixes the inputs; by default they are secret and fresh.
            timing: time correct kernels (CUDA only).
            split: ``eval`` adds the held-out shapes, ``train`` leaves them out.
            wall: seconds of wall time for the submission, over all stages but timing; on CUDA 60 more for compiling what its
                calls launch, and 20 for the first use of the GPU.
            estimate: name of a GPU (``h200``, ...) whose device time a cost model estimates for correct kernels, on
                the CPU backend only; never mixed with measured time.
            torch_ops: ``strict`` lets torch allocate, view, copy, fill and convert floats, nothing else; ``allow`` lets
                the wrapper compute in torch, but some launch must matter. Never compare or mix the two.
            compiled: also tell the speedup over torch.compile of the baseline (``timing.compiled_speedup``); it changes
                neither ``speedup`` nor a reward. The first grading of a task compiles for seconds to minutes.
            sizes: what is timed or estimated: the ``published`` sizes, or ``held-out`` ones for evaluation
                (``grading.sizes``). Verdicts are the same, times never compare.

        Raises:
            UsageError: unknown task, backend, target, grading, split, torch policy, sizes or device to estimate for;
                ``compiled`` where nothing is timed.
        """
        task = load_task(task_id)
        backend = resolve_backend(backend)
        if grading not in GRADINGS:
            raise UnknownName("grading", grading, GRADINGS)
        if torch_ops not in TORCH_OPS:
            raise UnknownName("torch policy", torch_ops, TORCH_OPS)
        if sizes not in SIZES:
            raise UnknownName("sizes", sizes, SIZES)
        if split not in ("train", "eval"):
            raise UnknownName("split", split, ("train", "eval"))
        chosen = tuple(TARGETS if targets is None else targets)
        for t in chosen:
            if t not in TARGETS:
                raise UnknownName("target", t, TARGETS)
        if estimate is not None:
            cost.load(estimate)
        if compiled and (backend != "cuda" or not timing):
            raise UsageError(NEEDS_TIMES.format("compiled=True"))
        data = source.encode("utf-8", "surrogatepass") if isinstance(source, str) else source
        secret = secrets.token_bytes(32) if seed is None else b"fixed:%d" % seed
        if DefenceLayer.SECRET in self.without:
            secret = b"fixed:0"
        start = time.perf_counter()
        outcome: Outcome | None = None
        faults: list[str] = []
        for attempt in range(1, self._attempts + 1):
            record = OutcomeBuilder(
                task, backend, grading, hashlib.sha256(data).hexdigest(), _manifest(task, backend, seed, split)
            )
            record.manifest |= {"attempt": attempt, "torch_ops": torch_ops, "sizes": sizes}
            if faults:
                record.manifest["faults"] = list(faults)  # what earlier attempts were lost to
            if self.without:
                record.manifest["without"] = sorted(self.without)
            try:
                outcome = GradingPipeline(
                    self, record, chosen, split, secret, timing, wall, estimate, torch_ops, compiled, sizes
                ).run(data)
            except SandboxError as e:
                outcome = record.end(Verdict.INFRA_FAULT, Stage.COMPILE, str(e))
            except UsageError:
                raise
            except Exception as e:  # a dead GPU, no memory, a bug of ours: never held against a submission
                where = traceback.extract_tb(e.__traceback__)[-1]
                text = f"{type(e).__name__}: {e} ({os.path.basename(where.filename)}:{where.lineno})"
                outcome = record.end(Verdict.INFRA_FAULT, Stage.COMPILE, f"{GRADER_FAILED}: {text}"[:1000])
            finally:
                if backend == "cuda":
                    # What torch keeps for this process's next grading, the other processes' gradings need now.
                    torch.cuda.empty_cache()
            if outcome.fault is not Fault.INFRA or outcome.message.startswith("unsupported"):
                break
            faults.append(outcome.message[:300])
        assert outcome is not None
        return replace(outcome, seconds={**outcome.seconds, "total": round(time.perf_counter() - start, 4)})


def _manifest(task: Task, backend: str, seed: int | None, split: str) -> dict[str, Any]:
    import triton

    import kbx_env

    device = "cpu"
    if backend == "cuda":
        device = torch.cuda.get_device_name(0)
    return {
        "kbx_env": kbx_env.__version__, "python": platform.python_version(), "torch": torch.__version__,
        "triton": triton.__version__, "device": device, "machine": platform.machine(),
        "cores": os.cpu_count(), "task_fingerprint": task.fingerprint, "split": split,
        "seed_policy": "secret, fresh for every grading" if seed is None else f"fixed: {seed}",
    }  # fmt: skip


_shared: Grader | None = None


def grade(task_id: str, source: str | bytes, **options: Any) -> Outcome:
    """Grade one source with a warm grader shared by this process; see ``Grader.grade`` for the options."""
    global _shared
    if _shared is None:
        import atexit

        _shared = Grader()
        atexit.register(_shared.close)
    return _shared.grade(task_id, source, **options)
