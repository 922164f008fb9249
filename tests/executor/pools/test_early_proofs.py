"""Proofs begin before their gradings: what fails there takes no worker again, and what survives brings its proof."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from test_tiered_pool import CUDA, LOST, RIGHT, SCREENINGS, WRONG

from kbx_env.errors import UsageError
from kbx_env.executor import Executor, Request
from kbx_env.executor.pools.early_proofs import EarlyProofPool
from kbx_env.executor.pools.tiered import SCREENED
from kbx_env.outcome import Outcome, Verdict


class Workers:
    """A pool for both tiers that records its requests; proofs wait until ``go_on`` is set."""

    def __init__(self, width: int = 8) -> None:
        self.width, self.proven, self.graded, self.closed = width, list[Request](), list[Request](), False
        self.go_on = threading.Event()
        self.go_on.set()

    def grade(self, request: Request, deadline: float) -> Outcome:
        if request.options["backend"] == "cuda":
            self.graded.append(request)
            if request.source == b"refused":
                raise UsageError("no such task")
            return replace(RIGHT, backend="cuda")
        self.proven.append(request)
        assert self.go_on.wait(20)
        if request.source == b"refused":
            raise UsageError("no such task")
        found = SCREENINGS[request.source]
        if isinstance(found, Exception):
            raise found
        return found

    def close(self) -> None:
        self.closed = True


def test_a_grading_goes_on_from_its_proof() -> None:
    workers = Workers()
    pool = EarlyProofPool(workers)
    requests = [Request("t", source, CUDA) for source in SCREENINGS]
    for request in (*requests, *requests):
        pool.begin(request, 60)
    until = time.monotonic() + 20
    while len(workers.proven) < len(requests) and time.monotonic() < until:
        time.sleep(0.01)
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


def test_a_proof_that_waits_for_a_worker_is_left_to_the_grading() -> None:
    workers = Workers(width=1)
    workers.go_on.clear()
    pool = EarlyProofPool(workers)
    for source in (b"right", b"wrong", b"lost"):
        pool.begin(Request("t", source, CUDA), 60)
    while not workers.proven:
        time.sleep(0.01)
    pool.leave_rest()
    with ThreadPoolExecutor(3) as threads:
        graded = [threads.submit(pool.grade, Request("t", source, CUDA), 60) for source in (b"right", b"wrong")]
        time.sleep(0.2)
        assert not workers.graded, "its only worker proves"
        workers.go_on.set()
        assert all(f.result(20).correct for f in graded)
    pool.close()
    assert [r.source for r in workers.proven] == [b"right"]
    assert {r.source: r.proof for r in workers.graded} == {b"right": RIGHT, b"wrong": None}, "which proves it itself"


def test_a_dropped_proof_is_not_made() -> None:
    workers = Workers(width=1)
    workers.go_on.clear()
    pool = EarlyProofPool(workers)
    for source in (b"right", b"wrong"):
        pool.begin(Request("t", source, CUDA), 60)
    while not workers.proven:
        time.sleep(0.01)
    pool.forget()
    workers.go_on.set()
    assert pool.grade(Request("t", b"right", CUDA), 60).correct and workers.graded[0].proof is None
    pool.close()
    assert [r.source for r in workers.proven] == [b"right"]


def test_closing_ends_proofs_and_gradings() -> None:
    workers = Workers(width=1)
    workers.go_on.clear()
    pool = EarlyProofPool(workers)
    for source in (b"dead", b"right"):
        pool.begin(Request("t", source, CUDA), 60)
    threading.Timer(0.2, workers.go_on.set).start()
    pool.close()
    assert workers.closed and [r.source for r in workers.proven] in ([b"dead"], [])


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
