"""What the grader sees of wrong kernels: stages of a quantization scheme, and the work in cases that pass."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
from kbx_env.eval.zoo import specimens
from kbx_env.rewards.compose import load_preset

from kbx_env.grading import inputs, reference
from kbx_env.grading.evidence import stage_credit
from kbx_env.outcome import Outcome, Verdict
from kbx_env.spec.catalog import expert_source, load_task

MATMUL, LAYERNORM, LINEAR = (f"quantization/{n}" for n in ("matmul_w8a8", "layernorm_w8a8", "linear_w4a16"))
ROUND = "((tl.div_rn(v, scale) + 12582912.0) - 12582912.0)"
SCALES = "acc.to(tl.float32) * left[:, None] * right[None, :]"
DOT = "acc = tl.dot(x, w, acc, out_dtype=tl.int32)"
REWARD, DEFAULT = load_preset("quantization"), load_preset("default")


def _broken(grader, task: str, old: str, new: str, seed: int | None = None) -> Outcome:
    text = expert_source(task)
    assert old in text
    outcome = grader.grade(task, text.replace(old, new), backend="cpu", targets=(), seed=seed)
    assert outcome.verdict is Verdict.INCORRECT, outcome.message
    assert Outcome.from_dict(outcome.to_dict()) == outcome
    return outcome


BROKEN = {
    "truncation": (MATMUL, ROUND, "tl.div_rn(v, scale)", "scale clamp product dequantization"),
    "no dequantization": (MATMUL, SCALES, "acc.to(tl.float32)", "scale rounding clamp product"),
    "a scale that is no contract's": (MATMUL, "127.0, tl.float32", "120.0, tl.float32", ""),
    "a product of floats": (
        MATMUL, DOT, "acc += tl.dot(x.to(tl.float16), w.to(tl.float16)).to(tl.int32) * 2", "scale rounding clamp",
    ),
    "integers beside a result that is made of nothing": (MATMUL, SCALES, "0.5 + 1e-30 * acc.to(tl.float32)", ""),
    "truncation before a norm": (LAYERNORM, ROUND, "tl.div_rn(v, scale)", "scale clamp dequantization"),
    "halves of bytes swapped": (LINEAR, "(low & 15) | (high << 4)", "(high & 15) | (low << 4)", "scale rounding clamp packing"),
}  # fmt: skip


def _seen(outcome: Outcome, held: str) -> None:
    stages = outcome.evidence.stages
    assert {k for k, v in stages.items() if v > 0.9} == set(held.split())
    # The margin is measured: in small operands with an outlier, one looked at in three, most integers are the same truncated.
    assert all(v < (0.35 if k == "margin" else 0.1) for k, v in stages.items() if k not in held.split())
    _paid_by_stage(outcome, held.split())


def _paid_by_stage(outcome: Outcome, held: list[str]) -> None:
    """Check that each held stage saves its own part of what hints take away, and that nobody gains by hints."""
    least = DEFAULT(outcome) - sum(REWARD.shaping.values())
    assert least <= REWARD(outcome) <= DEFAULT(outcome) and (REWARD(outcome) > least) == bool(held)
    stages, wrong = outcome.evidence.stages, 1 - outcome.cases.telling_passed / outcome.cases.telling
    for stage in held:
        without = dataclasses.replace(outcome.evidence, stages={**stages, stage: 0.0})
        less = REWARD(outcome) - REWARD(dataclasses.replace(outcome, evidence=without))
        assert less == pytest.approx(REWARD.shaping[stage] * stages[stage] * wrong) and less > 0, stage


@pytest.mark.parametrize("name", BROKEN)
def test_each_stage_is_seen_for_itself(grader, name: str) -> None:
    task, old, new, held = BROKEN[name]
    _seen(_broken(grader, task, old, new), held)


# An outlier among the weights leaves 30 integers of 60; one among 17 x 77 numbers leaves nearly what rounding does.
@pytest.mark.parametrize(("name", "seed"), [("truncation before a norm", 10), ("truncation", 7)])
def test_an_outlier_hides_no_stage(grader, name: str, seed: int) -> None:
    task, old, new, held = BROKEN[name]
    _seen(_broken(grader, task, old, new, seed), held)


# An outlier's row is nearly all of the reference's norm, and one row of 17 in a result without scales.
@pytest.mark.parametrize("seed", [1])
def test_an_outlier_hides_no_product(grader, seed: int) -> None:
    task, old, new, held = BROKEN["no dequantization"]
    _seen(_broken(grader, task, old, new, seed), held)


def test_truncation_has_its_units_however_much_it_loses() -> None:
    task = load_task(MATMUL)
    case = next(c for c in task.cases if c.label() == "M=17 K=77 N=33")
    for seed in (90042, 90274):  # 11 and more dB of noise, where rounding has 0
        args = inputs.draw(task, case, seed)
        got = reference.expect(task, case, args, rounding=("truncate",) * 4).outputs[0]
        for wrong, whole in ((1.0, 1.0), (1.1, 0.0), (127.0, 0.0)):
            call = SimpleNamespace(args=args, answer=SimpleNamespace(outputs=(wrong * got,)))
            assert stage_credit._noise(task, case, call)["dequantization"] == whole, (seed, wrong)


def test_a_kernel_that_is_right_needs_no_stages(grader) -> None:
    outcome = grader.grade(MATMUL, expert_source(MATMUL), backend="cpu", targets=())
    assert outcome.correct and outcome.evidence.stages is None and REWARD(outcome) == DEFAULT(outcome) == 1.0
    work = outcome.evidence.passing
    assert work.cases == outcome.cases.telling and work.launches == 3 * work.cases and work.buffers == 4 * work.cases
    # Integers and scales of both operands are written once and read at least once; the rest goes to arguments and the result.
    assert 0 < work.between_bytes < work.moved_bytes - work.ideal_bytes / 2


def test_attacks_get_no_more_than_by_default(grader) -> None:
    for name in ("e_one_scale", "fp32_as_int8", "b_tile_overlapping", "b_dropout_mirrored"):
        s = specimens(name)[0]
        outcome = grader.grade(s.task, s.path.read_bytes(), backend="cpu", targets=())
        assert outcome.verdict is Verdict.INCORRECT
        reward = load_preset(s.task.split("/")[0])
        assert reward(outcome) == DEFAULT(outcome) - sum(reward.shaping.values()), "no hint is worth anything to it"


def _softmax_log(steps: int) -> str:
    """Copies through ``steps`` buffers before the expert reads its input."""
    text = expert_source("fusion/fused_softmax_log")
    return text.replace("def fused_softmax_log(input", "def _expert(input") + COPY.replace("STEPS", str(steps))


COPY = """

import torch
import triton
import triton.language as tl

@triton.jit
def _same(x, y, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y + i, tl.load(x + i, mask=i < n), mask=i < n)

def fused_softmax_log(input, *args, **more):
    x = input.contiguous()
    for _ in range(STEPS):
        y = torch.empty_like(x)
        if x.numel():
            _same[(triton.cdiv(x.numel(), 256),)](x, y, x.numel(), B=256)
        x = y
    return _expert(x, *args, **more)
"""


def test_intermediate_tensors_are_seen(grader) -> None:
    """Each copy is one launch, one buffer, and one write and one read of it more."""
    # With equal seeds both get the same derived cases, and copy the same inputs of other layouts.
    found = [
        grader.grade("fusion/fused_softmax_log", _softmax_log(n), backend="cpu", targets=(), seed=3) for n in (1, 2)
    ]
    assert [o.verdict for o in found] == [Verdict.CORRECT] * 2, found[0].message
    one, two = (o.evidence.passing for o in found)
    assert two.launches - one.launches == two.buffers - one.buffers == one.cases
    assert two.between_bytes - one.between_bytes == two.moved_bytes - one.moved_bytes > 0
    shaped = load_preset("fusion")
    assert shaped.potential(found[0]) > shaped.potential(found[1]) > 0 and shaped(found[0]) == shaped(found[1])
