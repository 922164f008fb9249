"""Experts with one promise of the contract broken are refused: the declared cases alone would pay most of them."""

from __future__ import annotations

import pytest

from kbx_env.grading.grader import Grader
from kbx_env.outcome import Verdict
from kbx_env.spec.catalog import expert_source

SEEDS = range(20, 26)
"""Of the inputs and of the derived cases: one of these gradings must refuse each kernel, most of them do."""
BROKEN: dict[str, tuple[str, str, str]] = {
    "strides of four axes": (
        "math/add",
        "xs = [x.expand(shape).contiguous() for x in inputs]",
        "xs = [x.expand(shape) if len(shape) > 3 else x.expand(shape).contiguous() for x in inputs]",
    ),
    "out= with gaps": (
        "math/exp_sqrt",
        "target = y if y.is_contiguous() else torch.empty(shape, dtype=y.dtype, device=y.device)",
        "target = y",
    ),
    "out= of a reduction with gaps": (
        "reduce/mean",
        "ys = [o if o.is_contiguous() else y for o, y in zip(outs, ys, strict=True)]",
        "ys = list(outs)",
    ),
    "integers next to the lowest": ("reduce/argmax", "-9223372036854775808 if", "-9000000000000000000 if"),
    "an fp16 accumulator": (
        "matrixmultiply/matmul_fp16",
        "acc = tl.dot(x, y, acc, input_precision=PRECISION)",
        "acc = tl.dot(x, y, acc, input_precision=PRECISION).to(tl.float16).to(tl.float32)",
    ),
    "an inner axis of more than 512": (
        "fusion/fused_tanh_linear",
        "for k0 in range(0, K, BK):\n        if EVEN",
        "for k0 in range(0, tl.minimum(K, 512), BK):\n        if EVEN",
    ),
    "a vector with gaps": (
        "normalization/batch_norm",
        "(1 - momentum) * tl.load(running_mean) + momentum",
        "(1 - momentum) * tl.load(running_mean - c * rm + c) + momentum",
    ),
    "in place, with gaps in three axes": (
        "optimizer/SGD",
        "if not old.is_contiguous():",
        "if not old.is_contiguous() and old.dim() < 3:",
    ),
    "a correction below 0": (
        "reduce/std",
        "tl.sqrt_rn(state[2] / (n - t))",
        "tl.sqrt_rn(state[2] / (n - tl.maximum(t, 0.0)))",
    ),
    "int64 of all bits": ("math/floor", "        return x\n", "        return x.to(tl.float64).to(x.dtype)\n"),
}
"""By promise: the task, a piece of its expert, and what takes its place."""


@pytest.mark.parametrize("promise", BROKEN)
def test_a_kernel_that_breaks_a_promise_is_refused(grader: Grader, promise: str) -> None:
    task, old, new = BROKEN[promise]
    source = expert_source(task)
    assert source is not None and source.count(old) == 1, f"{task}: the expert has changed; mend this test"
    for seed in SEEDS:
        verdict = grader.grade(task, source.replace(old, new), backend="cpu", targets=(), seed=seed).verdict
        assert verdict in (Verdict.CORRECT, Verdict.INCORRECT, Verdict.RUNTIME_ERROR)
        if verdict is not Verdict.CORRECT:
            return
    pytest.fail(f"{task}: paid {len(SEEDS)} times")
