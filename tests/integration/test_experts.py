"""Every task is payable: our own kernel earns full correctness. Constants and torch fallbacks earn none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from kbx_env.baselines.policy import make_policy
from kbx_env.rewards.compose import load_preset
from tiers import representatives

from kbx_env.grading.evidence.accumulator import EvidenceAccumulator
from kbx_env.grading.runtime.session import CallResult
from kbx_env.spec.catalog import expert_source, load_task, task_ids
from kbx_env.spec.task import Case

REWARD = load_preset("default")


@pytest.fixture
def floors(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Of every case that is graded: label, bytes that must be moved, bytes that the kernels moved."""
    seen: list[tuple[str, int, int]] = []
    add = EvidenceAccumulator.add

    def watched(self: EvidenceAccumulator, case: Case, answers: Sequence[CallResult], ideal: int, *more: Any) -> bool:
        facts = answers[0].facts
        seen.append((case.label(), ideal, facts.moved if facts else 0))
        return add(self, case, answers, ideal, *more)

    monkeypatch.setattr(EvidenceAccumulator, "add", watched)
    return seen


@pytest.mark.parametrize("task", task_ids())
def test_the_expert_is_correct(grader, floors: list[tuple[str, int, int]], task: str) -> None:
    outcome = grader.grade(task, expert_source(task), backend="cpu", targets=("sm_90",))
    assert outcome.correct, (outcome.message, outcome.violations)
    evidence = outcome.evidence
    declared = load_task(task)
    assert evidence.launches > 0 and evidence.findings == ()
    # What is written in place may be written in part: the rest is the input, as it should be.
    assert evidence.stored_share == 1.0 or (declared.writes and evidence.stored_share > 0)
    assert set(declared.takes) >= set(evidence.depends_on) and bool(evidence.depends_on) == bool(declared.takes)
    assert outcome.evidence.moved_bytes > 0 and outcome.timing is None
    assert floors and [row for row in floors if row[1] > row[2]] == [], "no floor is above what a right kernel moved"
    assert all(b.ok for b in outcome.compile), outcome.compile
    assert REWARD(outcome) == pytest.approx(1.0)


# The audit of cheap answers asks the judge about zeros in every task; the grader is asked in one of each category.
CATEGORIES = sorted(representatives())


@pytest.mark.parametrize(
    ("task", "policy"), [(t, "eager") for t in task_ids()] + [(t, "zeros") for t in (*CATEGORIES, "random/logspace")]
)
def test_no_work_no_pay(grader, task: str, policy: str) -> None:
    source = make_policy(policy).act({"task": task})
    outcome = grader.grade(task, source, backend="cpu", targets=())
    assert not outcome.correct
    assert REWARD(outcome) == 0.0 and outcome.violations


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "sm_120", "gfx942"])
def test_every_target_builds(grader, target: str) -> None:
    outcome = grader.grade("math/softmax", expert_source("math/softmax"), backend="cpu", targets=(target,))
    (build,) = [b for b in outcome.compile]
    assert build.ok and build.target == target and build.shared is not None and build.registers is not None
    assert build.warps == 4


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_a_build_says_its_warps(grader, target: str) -> None:
    kernel = "import torch\nimport triton\nimport triton.language as tl\n\n\n@triton.jit\n"
    kernel += "def _double(x, o, n, BLOCK: tl.constexpr):\n"
    kernel += "    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)\n    tl.store(o + i, 2 * tl.load(x + i, i < n), i < n)\n"
    kernel += "\n\ndef rsqrt(input, out=None):\n    o = torch.empty_like(input)\n"
    kernel += "    _double[(triton.cdiv(input.numel(), 256),)](input, o, input.numel(), BLOCK=256, num_warps=2)\n    return o\n"
    outcome = grader.grade("math/rsqrt", kernel, backend="cpu", targets=(target,))
    assert [(b.ok, b.warps) for b in outcome.compile] == [(True, 2)], outcome.message


def test_paper_grading_pays_a_deterministic_expert(grader) -> None:
    for task in ("activation/gelu_fp16", "normalization/batch_norm", "loss/cross_entropy"):
        outcome = grader.grade(task, expert_source(task), backend="cpu", targets=(), grading="paper")
        assert outcome.correct, (task, outcome.message)
        assert outcome.grading == "paper"


def test_fixed_seeds_repeat_and_secret_ones_do_not(grader) -> None:
    source = "import torch\n\ndef argmax(input_tensor, dim, keepdim=False):\n    return torch.empty(0)\n"
    first = [grader.grade("reduce/argmax", source, backend="cpu", targets=(), seed=7) for _ in range(2)]
    assert first[0].message == first[1].message and first[0].manifest["seed_policy"] == "fixed: 7"
    assert load_task("reduce/argmax").fingerprint == first[0].manifest["task_fingerprint"]


def _coarse(task: str) -> str:
    """The expert, but for its products, which round the operands as an impatient policy would."""
    return (expert_source(task) or "").replace('"tf32x3"', '"tf32"').replace('"ieee"', '"tf32"')


PRODUCTS = [t for t in task_ids() if '"tf32x3"' in (expert_source(t) or "") and not t.endswith(("matmul_fp16", "matmul_bf16"))]


@pytest.mark.parametrize("task", PRODUCTS[::8])
def test_a_coarse_product_is_no_fp32_product(grader, task: str) -> None:
    outcome = grader.grade(task, _coarse(task), backend="cpu", targets=())
    assert not outcome.correct and outcome.cases is not None and outcome.cases.failures


# Where the CPU tier can tell it has told before; on the GPU the published sizes are judged for what it lets through.
@pytest.mark.gpu
@pytest.mark.parametrize("task", PRODUCTS)
def test_a_coarse_product_is_no_fp32_product_on_gpu(grader, task: str) -> None:
    outcome = grader.grade(task, _coarse(task), backend="cuda", targets=())
    assert not outcome.correct and outcome.cases is not None and outcome.cases.failures


# All 176 with 14 gradings at once: benchmarks/expert_speed.py --parts grade.
@pytest.mark.gpu
@pytest.mark.parametrize("task", CATEGORIES)
def test_the_expert_is_correct_on_gpu(grader, task: str) -> None:
    outcome = grader.grade(task, expert_source(task), backend="cuda", targets=("sm_90",), timing=False)
    assert outcome.correct, (outcome.message, outcome.violations)
