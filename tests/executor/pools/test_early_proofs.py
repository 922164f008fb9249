"""Proofs begin before their gradings: what fails there takes no worker again, and what survives brings its proof."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from test_tiered_pool import CUDA, LOST, RIGHT, SCREENINGS, WRONG

import kbx_env
from kbx_env.errors import UsageError
from kbx_env.executor import Executor, ProcessPool, Request, WorkerLost
from kbx_env.executor.pools.early_proofs import EarlyProofPool
from kbx_env.executor.pools.tiered import SCREENED
from kbx_env.grading.grader import proves
from kbx_env.options import GradeOptions
from kbx_env.outcome import Outcome, Verdict
from kbx_env.spec.catalog import expert_source, load_task


class Workers:
    """A pool for both tiers that records its requests; proofs wait until ``go_on`` is set."""

    def __init__(self, width: int = 8) -> None:
        self.width, self.proven, self.graded, self.closed = width, list[Request](), list[Request](), False
        self.go_on = threading.Event()
        self.go_on.set()

    def grade(self, request: Request, deadline: float) -> Outcome:
        if self.closed:
            raise WorkerLost("closed")
        if request.options["backend"] == "cuda":
            self.graded.append(request)
            if request.source == b"refused":
                raise UsageError("no such task")
            return replace(RIGHT, backend="cuda")
        self.proven.append(request)
        assert self.go_on.wait(20)
        if self.closed:
            raise WorkerLost("closed")
        if request.source == b"refused":
            raise UsageError("no such task")
        found = SCREENINGS[request.source]
        if isinstance(found, Exception):
            raise found
        return found

    def close(self) -> None:
        """End the workers: what they do is lost."""
        self.closed = True
        self.go_on.set()


def _until(reached: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_grading_goes_on_from_its_proof() -> None:
    workers = Workers()
    pool = EarlyProofPool(workers)
    requests = [Request("t", source, CUDA) for source in SCREENINGS]
    for request in (*requests, *requests):
        pool.begin(request, 60)
    _until(lambda: len(workers.proven) == len(requests))
    assert not workers.graded and len(workers.proven) == len(requests), "each proof once, and nothing on the GPU"
    assert all(dict(r.options) == {**CUDA, **SCREENED} for r in workers.proven)
    outcomes = {r.source: pool.grade(Request("t", r.source, CUDA), 60) for r in requests}
    wrong = outcomes[b"wrong"]
    assert (wrong.verdict, wrong.backend) == (Verdict.INCORRECT, "cuda") and "proof" in wrong.seconds
    assert wrong.message == f"executed on the CPU tier: {WRONG.message}"
    assert {r.source: r.proof for r in workers.graded} == {
        b"right": RIGHT, b"unsupported": SCREENINGS[b"unsupported"], b"lost": None, b"dead": None
    }, "what the machine lost is proven again"
    pool.grade(requests[0], 60)
    assert workers.graded[-1].proof is None, "a proof serves one grading"
    pool.close()
    assert workers.closed


def _proving(sources: Sequence[bytes]) -> tuple[Workers, EarlyProofPool]:
    """A pool whose only worker proves the first source, while the proofs of the others wait."""
    workers = Workers(width=1)
    workers.go_on.clear()
    pool = EarlyProofPool(workers)
    for source in sources:
        pool.begin(Request("t", source, CUDA), 60)
    _until(lambda: len(workers.proven) == 1)
    return workers, pool


def test_a_proof_that_waits_for_a_worker_is_left_to_the_grading() -> None:
    workers, pool = _proving([b"right", b"wrong", b"lost"])
    pool.cancel_pending()
    with ThreadPoolExecutor(2) as threads:
        graded = [threads.submit(pool.grade, Request("t", source, CUDA), 60) for source in (b"right", b"wrong")]
        time.sleep(0.2)
        assert not workers.graded, "its only worker proves"
        workers.go_on.set()
        assert all(f.result(20).correct for f in graded)
    pool.close()
    assert [r.source for r in workers.proven] == [b"right"]
    assert {r.source: r.proof for r in workers.graded} == {b"right": RIGHT, b"wrong": None}, "which proves it itself"


def test_a_dropped_proof_is_not_made() -> None:
    workers, pool = _proving([b"right", b"wrong"])
    pool.clear()
    workers.go_on.set()
    assert pool.grade(Request("t", b"right", CUDA), 60).correct and workers.graded[0].proof is None
    pool.close()
    assert [r.source for r in workers.proven] == [b"right"]


def test_closing_ends_the_proof_that_runs_and_the_grading_that_waits_for_it() -> None:
    workers, pool = _proving([b"right", b"wrong"])
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(pool.grade, Request("t", b"right", CUDA), 60)
        pool.close()
        with pytest.raises(WorkerLost):
            waiting.result(20)
    assert workers.closed and not workers.graded and [r.source for r in workers.proven] == [b"right"]


def test_proofs_of_real_workers_serve_gradings_on_cuda() -> None:
    """Four sources for two workers, graded at once. The stage on the GPU is left out: a grading is its proof."""
    task = load_task("activation/relu")
    right = (expert_source(task.id) or "").encode()
    broken = right.replace(b"inside = offsets < n", b"inside = offsets < n - 1")
    assert broken != right
    sources = [right, right + b"# another", b"def relu(input, inplace=False):\n    return input", broken]
    graded: list[Request] = []

    class Workers(ProcessPool):
        def grade(self, request: Request, deadline: float) -> Outcome:
            if request.options["backend"] == "cpu":
                return super().grade(request, deadline)
            graded.append(request)
            proof = request.proof or super().grade(replace(request, options={**CUDA, **SCREENED}), deadline)
            return replace(proof, backend="cuda")

    pool = EarlyProofPool(Workers(2))
    requests = [Request(task.id, source, CUDA) for source in sources]
    try:
        for request in requests:
            pool.begin(request, 60)
        with ThreadPoolExecutor(4) as threads:
            outcomes = list(threads.map(lambda r: pool.grade(r, 60), requests))
    finally:
        pool.close()
    assert [o.correct for o in outcomes] == [True, True, False, False]
    options = GradeOptions.of(CUDA)
    asked = {"kbx_env": kbx_env.__version__, "task_fingerprint": task.fingerprint, "split": options.split, "torch_ops": "strict"}
    proofs = {r.source: r.proof for r in graded if r.proof is not None}
    assert proofs, "at least the first one has begun early"
    assert all(p.correct and proves(p, asked, hashlib.sha256(source).hexdigest()) for source, p in proofs.items())


@pytest.mark.parametrize("options", [{**CUDA, "grading": "paper"}, {**CUDA, "backend": "cpu"}])
def test_what_needs_no_proof_has_none(options: dict[str, object]) -> None:
    workers = Workers()
    pool = EarlyProofPool(workers)
    pool.begin(Request("t", b"right", options), 60)
    pool.close()
    assert not workers.proven and not workers.graded


def test_a_request_that_is_refused_is_refused_by_its_grading() -> None:
    pool = EarlyProofPool(Workers())
    pool.begin(Request("t", b"refused", CUDA), 60)
    with pytest.raises(UsageError, match="no such task"):
        pool.grade(Request("t", b"refused", CUDA), 60)
    pool.close()


def test_an_executor_grades_again_what_the_machine_lost() -> None:
    class Unlucky(Workers):
        def grade(self, request: Request, deadline: float) -> Outcome:
            found = super().grade(request, deadline)
            return replace(LOST, backend="cuda") if request.proof is not None and request.options["backend"] == "cuda" else found

    workers = Unlucky()
    pool, request = EarlyProofPool(workers), Request("t", b"right", CUDA)
    pool.begin(request, 60)
    with Executor(pool, attempts=2) as executor:
        assert executor.submit(request).result(20).correct
    assert [r.proof for r in workers.graded] == [RIGHT, None]
