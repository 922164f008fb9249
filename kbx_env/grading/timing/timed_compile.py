"""Compiles what timed calls launch, before anything is timed.

A kernel of a matrix product takes seconds to compile, and cases of other sizes have other kernels. So those of the timed cases are
compiled together with those of the graded ones, in the same threads, not after them.
"""

from __future__ import annotations

import contextlib

import torch

from kbx_env.errors import SandboxError
from kbx_env.grading import compulsory_work
from kbx_env.grading.runtime.session import RunnerSession
from kbx_env.grading.runtime.untrusted import GradingAborted
from kbx_env.grading.sizes import timed
from kbx_env.grading.timing.contestants import PREPARE_SECONDS, RunnerContestant
from kbx_env.spec.task import Case, Task


def largest_first(task: Task, sizes: str) -> tuple[list[Case], list[int], list[int]]:
    """Return the timed cases that fit into the device's memory: the others use the memory again that the largest has asked for.

    Args:
        task: the task.
        sizes: which timing cases, one of ``kbx_env.options.SIZES``.

    Returns:
        The cases; the bytes that each one needs; and for each case in the declared order its place in the list.
    """
    # The choice must not depend on the other processes on the GPU.
    cases = compulsory_work.fitting(task, torch.cuda.get_device_properties(0).total_memory, timed(task, sizes))
    # A task without inputs counts by its results.
    declared = [int(compulsory_work.declared_bytes(task, c) or 0) for c in cases]
    needed = [max(compulsory_work.input_bytes(task, c), d) for c, d in zip(cases, declared, strict=True)]
    order = sorted(range(len(cases)), key=lambda k: -needed[k])
    return [cases[k] for k in order], [needed[k] for k in order], [order.index(k) for k in range(len(cases))]


def begin(task: Task, session: RunnerSession, sizes: str) -> None:
    """Begin to compile what the timed calls launch; ``session.finish_compiling`` waits for it.

    No kernel is launched, and the runner gets no values. An error of these calls is ignored: ``paired.time_task`` makes them again,
    and reports it.

    Args:
        task: the task.
        session: with the loaded submission.
        sizes: which timing cases, one of ``kbx_env.options.SIZES``.

    Raises:
        GradingAborted: the submission's process has ended.
        SandboxError: the machine is to blame.
    """
    contestants = [RunnerContestant(session, case) for case in largest_first(task, sizes)[0]]
    session.timed_compile_seconds = PREPARE_SECONDS * len(contestants)
    case_bytes = session.case_bytes
    with session.budget.free():
        try:
            for contestant in contestants:
                contestant.compile_ahead()
            session.timed_begun = True
        except GradingAborted as e:
            if session.lost:
                raise GradingAborted(e.verdict, f"called without launches on timed sizes: {e.message}", e.violations) from e
        except SandboxError:
            if session.lost:
                raise
        finally:
            with contextlib.suppress(GradingAborted, SandboxError):
                contestants[-1].release(ahead=True)
            session.case_bytes = case_bytes
