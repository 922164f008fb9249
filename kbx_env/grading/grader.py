"""The grader: grades one source at a time, with warm processes between gradings."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import platform
import secrets
import time
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from kbx_env import versions
from kbx_env.device.driver import KEPT_BYTES, give_back
from kbx_env.errors import SandboxError, UsageError
from kbx_env.grading.ablations import DefenceLayer, chosen
from kbx_env.grading.context import GradingContext
from kbx_env.grading.pipeline import run_pipeline
from kbx_env.grading.record import OutcomeBuilder
from kbx_env.grading.runtime.processes import SandboxProcesses
from kbx_env.grading.runtime.zygote_client import Zygote
from kbx_env.grading.runtime.zygote_process import ZygoteProcess
from kbx_env.grading.threads import single_threaded
from kbx_env.options import GradeOptions
from kbx_env.outcome import GRADER_FAILED, FaultKind, Outcome, Stage, Verdict
from kbx_env.spec.catalog import load_task
from kbx_env.spec.published import published_task
from kbx_env.spec.task import Task


class Grader:
    """Grades sources with a warm zygote. Use it as a context manager, or ``close`` it.

    Args:
        without: layers of defence to leave out (``kbx_env.grading.ablations``), to measure their worth. Such outcomes say so
            and are never paid.
        started: the process of a zygote that gets warm already; it is closed with the grader.
    """

    def __init__(self, *, without: Iterable[str] = (), started: ZygoteProcess | None = None) -> None:
        self.without = chosen(without)
        self.processes = SandboxProcesses(started)

    def __enter__(self) -> Grader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes."""
        self.processes.close()

    def zygote(self) -> Zygote:
        """Return the warm zygote, started on first use and again when it died.

        Returns:
            The zygote.

        Raises:
            SandboxError: it does not start.
        """
        return self.processes.zygote()

    def grade(self, task_id: str, source: str | bytes, *, proof: Outcome | None = None, **options: Any) -> Outcome:
        """Grade one source, once. The executor decides on another attempt after an infrastructure fault.

        Args:
            task_id: ``category/name``.
            source: the submission, text or raw bytes.
            proof: outcome of the same source on the CPU tier, from a worker of this project (CUDA only); ``None``: the
                grading makes it.
            **options: fields of ``GradeOptions``.

        Returns:
            The outcome.

        Raises:
            UsageError: an unknown task or option, a value that is refused, or a proof of something else.
        """
        task, chosen_options = load_task(task_id), GradeOptions.of(options).resolved()
        task = published_task(task.id) if chosen_options.grading == "paper" else task
        data = source.encode("utf-8", "surrogatepass") if isinstance(source, str) else source
        seed = chosen_options.seed
        secret = secrets.token_bytes(32) if seed is None else b"fixed:%d" % seed
        if DefenceLayer.SECRET in self.without:
            secret = b"fixed:0"
        start = time.perf_counter()
        builder = OutcomeBuilder(
            task, chosen_options.backend, chosen_options.grading, hashlib.sha256(data).hexdigest(), _manifest(task, chosen_options)
        )  # fmt: skip
        if self.without:
            builder.manifest["without"] = sorted(self.without)
        if proof is not None and not proves(proof, builder.manifest, builder.sha):
            raise UsageError(f"the proof of {task.id} is of another source, task or setting; grade the source on the CPU tier")
        try:
            context = GradingContext(
                task, data, chosen_options, secret, self.processes, self.without, builder, proof=proof
            )  # fmt: skip
            with single_threaded(chosen_options.backend == "cpu"):
                outcome = run_pipeline(context)
        except SandboxError as e:
            outcome = builder.end(Verdict.INFRA_FAULT, Stage.COMPILE, str(e), FaultKind.SANDBOX)
        except UsageError:
            raise
        except Exception as e:  # a dead GPU, no memory, a bug of the grader: never held against a submission
            message = f"{GRADER_FAILED}: {type(e).__name__}: {e}"[:900] + f" ({_places(e)})"
            outcome = builder.end(Verdict.INFRA_FAULT, Stage.COMPILE, message, FaultKind.GRADER_FAILED)
        finally:
            if chosen_options.backend == "cuda":
                # Other processes' gradings need the memory. Where the GPU is dead, the outcome says so.
                with contextlib.suppress(RuntimeError):
                    give_back(KEPT_BYTES)
        return replace(outcome, seconds={**outcome.seconds, "total": round(time.perf_counter() - start, 4)})


def _places(error: BaseException) -> str:
    """Return where an error was raised: the innermost places of this package, and of a library that it called."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if os.path.abspath(f.filename).startswith(_PACKAGE)][-3:]
    last = [] if not frames or frames[-1] in own else [frames[-1]]
    return " > ".join(f"{os.path.basename(f.filename)}:{f.lineno}" for f in own + last)


_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_PROVEN = ("kbx_env", "task_fingerprint", "split", "torch_ops")
"""Entries of the manifest that a proof shares with the grading that it is for."""


def proves(proof: Outcome, manifest: Mapping[str, Any], sha: str) -> bool:
    """Return whether an outcome of the CPU tier is the proof for a grading.

    Args:
        proof: the outcome.
        manifest: of the grading.
        sha: of its source.

    Returns:
        Whether it has the same source, task, split and policy for torch, under the same version, and was graded by the
        contract with all defences.
    """
    same = all(proof.manifest.get(name) == manifest[name] for name in _PROVEN)
    strict = proof.grading == "contract" and not proof.manifest.get("without")
    return same and strict and proof.backend == "cpu" and proof.source_sha256 == sha


def _manifest(task: Task, options: GradeOptions) -> dict[str, Any]:
    import kbx_env

    return {
        **versions.task_set((task.id,)).entries(),
        "kbx_env": kbx_env.__version__, "python": platform.python_version(), "torch": torch.__version__,
        "triton": importlib.metadata.version("triton"),  # not imported here: only the sandbox needs it
        "device": torch.cuda.get_device_name(0) if options.backend == "cuda" else "cpu",
        "machine": platform.machine(), "cores": os.cpu_count(), "task_fingerprint": task.fingerprint, "split": options.split,
        "seed_policy": "secret, fresh for every grading" if options.seed is None else f"fixed: {options.seed}",
        "attempt": 1, "torch_ops": options.torch_ops, "sizes": options.sizes, "precision": options.precision,
    }  # fmt: skip
