"""Two tiers: only survivors of the CPU tier reach the GPU's workers, with their proof; the graders are functions."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from kbx_env.errors import UsageError
from kbx_env.executor import Executor, InlinePool, Request, WorkerLost
from kbx_env.executor.pools.process import reply_of
from kbx_env.executor.pools.tiered import SCREENED, TieredPool
from kbx_env.grading.grader import Grader, proves
from kbx_env.options import GradeOptions
from kbx_env.outcome import Cases, Evidence, Fault, FaultKind, Outcome, Stage, Verdict

CUDA = {"backend": "cuda", "targets": ("sm_90",), "timing": True, "grading": "contract"}


class Tier:
    """A pool that records its requests; ``outcomes`` are by source."""

    def __init__(self, outcomes: dict[bytes, Outcome | Exception], width: int = 2, seconds: float = 0.0) -> None:
        self.width, self.asked, self.closed, self._outcomes, self._seconds = width, list[Request](), False, outcomes, seconds
        self.busy = self.most = 0
        self._lock = threading.Lock()

    def grade(self, request: Request, deadline: float) -> Outcome:
        with self._lock:
            self.asked.append(request)
            self.busy += 1
            self.most = max(self.most, self.busy)
        time.sleep(self._seconds)
        with self._lock:
            self.busy -= 1
        found = self._outcomes[request.source]
        if isinstance(found, Exception):
            raise found
        return found

    def close(self) -> None:
        self.closed = True


RIGHT = Outcome("t", Verdict.CORRECT, Stage.EVIDENCE, "cpu", "contract", cases=Cases(1, 1), evidence=Evidence(1))
WRONG = Outcome("t", Verdict.INCORRECT, Stage.CORRECT, "cpu", "contract", Fault.POLICY, "off by one")
LOST = Outcome("t", Verdict.INFRA_FAULT, Stage.CORRECT, "cpu", "contract", Fault.INFRA, "no", fault_kind=FaultKind.SANDBOX)
UNSUPPORTED = replace(LOST, fault_kind=FaultKind.UNSUPPORTED)
SCREENINGS: dict[bytes, Outcome | Exception] = {
    b"right": RIGHT, b"wrong": WRONG, b"unsupported": UNSUPPORTED, b"lost": LOST, b"dead": WorkerLost("gone")
}  # fmt: skip


def test_only_survivors_take_the_gpu() -> None:
    screen, final = Tier(SCREENINGS), Tier({s: replace(RIGHT, backend="cuda") for s in SCREENINGS})
    pool = TieredPool(screen, final)
    assert pool.width == 4
    outcomes = {s: pool.grade(Request("t", s, CUDA), 60) for s in SCREENINGS}
    assert outcomes[b"wrong"].backend == "cuda" and outcomes[b"wrong"].message == "executed on the CPU tier: off by one"
    assert outcomes[b"wrong"].verdict is Verdict.INCORRECT and outcomes[b"right"].correct
    assert {r.source: r.proof for r in final.asked} == {
        b"right": RIGHT, b"unsupported": UNSUPPORTED, b"lost": None, b"dead": None
    }, "a survivor brings its proof; what the machine lost is proven again"
    assert all(dict(r.options) == {**CUDA, **SCREENED} for r in screen.asked)
    GradeOptions.of(screen.asked[0].options)
    assert (pool.screened, pool.survived) == (3, 2)
    pool.close()
    assert screen.closed and final.closed


@pytest.mark.parametrize("options", [{**CUDA, "grading": "paper"}, {**CUDA, "backend": "cpu"}])
def test_what_needs_no_proof_is_not_screened(options: dict[str, Any]) -> None:
    screen, final = Tier(SCREENINGS), Tier(SCREENINGS)
    assert TieredPool(screen, final).grade(Request("t", b"wrong", options), 60) == WRONG
    assert not screen.asked and final.asked[0].proof is None


def test_screening_goes_on_while_the_gpu_is_busy_and_each_tier_keeps_to_its_width() -> None:
    screen, final = Tier(SCREENINGS, 3, 0.01), Tier({b"right": RIGHT}, 1, 0.05)
    with Executor(TieredPool(screen, final), capacity=100) as executor:
        futures = [executor.submit(Request("t", b"right" if k % 4 == 0 else b"wrong", {**CUDA, "seed": k})) for k in range(24)]
        assert [f.result(20).correct for f in futures] == [k % 4 == 0 for k in range(24)]
    assert screen.most == 3 and final.most == 1 and len(final.asked) == 6


def test_a_proof_reaches_the_grader_and_nothing_else_may_pass_for_one() -> None:
    seen: list[Any] = []

    class Fake:
        def grade(self, task: str, source: bytes, *, proof: Outcome | None = None, **options: Any) -> Outcome:
            seen.append(proof)
            return RIGHT

    reply_of(Fake(), "t", b"x", {}, RIGHT.to_dict())
    reply_of(Fake(), "t", b"x", {})
    assert seen == [RIGHT, None]
    with pytest.raises(UsageError, match="unknown option 'proof'"):
        GradeOptions.of({"proof": RIGHT.to_dict()})
    executor = Executor(InlinePool(lambda *a, **o: RIGHT))
    plain, proven = Request("t", b"x", CUDA), Request("t", b"x", CUDA, proof=RIGHT)
    executor.close()
    assert plain.key == proven.key and plain.content == proven.content


def test_a_proof_of_something_else_is_refused() -> None:
    manifest = {"kbx_env": "1", "task_fingerprint": "f", "split": "train", "torch_ops": "strict"}
    proof = replace(RIGHT, manifest=dict(manifest), source_sha256="s")
    assert proves(proof, manifest, "s") and not proves(proof, manifest, "other")
    assert not proves(replace(proof, backend="cuda"), manifest, "s")
    assert not proves(replace(proof, grading="paper"), manifest, "s"), "the paper's check asks for no evidence"
    assert not proves(replace(proof, manifest={**manifest, "without": ["screen"]}), manifest, "s")
    for name in manifest:
        assert not proves(proof, {**manifest, name: "another"}, "s")
    with Grader() as grader, pytest.raises(UsageError, match="the proof of math/abs is of another source"):
        grader.grade("math/abs", "x", backend="cpu", proof=proof)
