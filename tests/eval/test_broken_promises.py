"""The tool that breaks one promise at a time: every kernel goes wrong in one place, and is refused."""

from __future__ import annotations

import ast

import pytest
from kbx_env.eval import broken_promises, promises

from kbx_env.grading.grader import Grader
from kbx_env.spec.catalog import load_task, task_ids


@pytest.mark.parametrize("name", task_ids())
def test_every_broken_kernel_is_python(name: str) -> None:
    task = load_task(name)
    made = broken_promises.kernels(task) + broken_promises.ignoring(task)
    for _, source in made:
        ast.parse(source)
    assert len({text for text, _ in made}) == len(made)


def test_arguments_without_an_effect_are_optional_parameters_that_cases_pass() -> None:
    for (name, argument), why in broken_promises.NO_EFFECT.items():
        task = load_task(name)
        assert argument in {text for text, _ in broken_promises.ignoring(task)} and why


def test_promises_that_make_no_difference_are_those_of_kernels() -> None:
    for (name, promise), why in broken_promises.NO_DIFFERENCE.items():
        assert promise in {text for text, _ in broken_promises.kernels(load_task(name))} and why


@pytest.mark.parametrize("name", task_ids())
def test_every_argument_with_an_effect_is_needed_by_a_case(name: str) -> None:
    assert broken_promises.unnoticed(load_task(name)) == []


def test_what_a_call_writes_in_place_is_compared_too() -> None:
    # Before, tensors counted as unchanged, so that every change of a task that works in place was noticed.
    task = load_task("fusion/fused_embedding_add_tanh")
    assert task.writes and broken_promises.noticed(task, "padding_idx") is False
    assert broken_promises.noticed(load_task("fusion/fused_hardsigmoid_batch_norm"), "momentum") is True


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("fusion/fused_cross_entropy_log_softmax", "input"), ("fusion/fused_cross_entropy_softmax_layernorm", "logits"),
        ("fusion/fused_repeat_interleave_log_softmax", "input"), ("loss/cross_entropy", "input"), ("activation/gelu_bf16", "input"),
        ("activation/gelu_fp16", "input"), ("matrixmultiply/matmul", "tensor1"),
    ],
)  # fmt: skip
def test_every_grading_tells_small_numbers_from_zero(name: str, tensor: str) -> None:
    # Logits below 0.0001 taken for zero were paid, because no case drew them where they matter.
    small = "numbers below 0.0001 taken for zero"
    assert [broken_promises.values_told(load_task(name), tensor, small, b"%d" % k) for k in range(8)] == [True] * 8


@pytest.mark.parametrize(
    ("name", "tensor", "change"),
    [
        ("fusion/fused_sigmoid_batch_norm", "running_mean", broken_promises.SMALL),
        ("fusion/fused_hardsigmoid_batch_norm", "running_mean", broken_promises.SMALL),
        ("fusion/fused_relu_batch_norm_conv2d", "bn_weight", broken_promises.SMALL),
        ("normalization/batch_norm", "bias", broken_promises.SMALL),
        ("normalization/batch_norm", "running_mean", broken_promises.LARGE),
        ("convolution/conv2d", "bias", broken_promises.SMALL),
        ("fusion/fused_silu_layer_norm_conv2d", "conv_weight", broken_promises.LARGE),
        ("fusion/fused_gelu_min", "input", broken_promises.LARGE),
        ("reduce/argmax", "input_tensor", broken_promises.SMALL),
        ("index/masked_select", "input", broken_promises.LARGE),
        ("matrixmultiply/symmetric_mm_and_abs_sum", "C", broken_promises.SMALL),
        ("activation/sigmoid", "input", broken_promises.LARGE),
        ("activation/combined_activation", "weight2", broken_promises.LARGE),
        ("fusion/attention", "q", broken_promises.LARGE),
        ("fusion/fused_conv2d_add", "other", broken_promises.LARGE),
        ("fusion/fused_conv2d_add", "other", broken_promises.SMALL),
        ("fusion/fused_log_softmax_linear", "bias", broken_promises.LARGE),
        ("fusion/fused_tanh_linear", "bias", broken_promises.SMALL),
        ("fusion/fused_lu_solve", "A", broken_promises.SMALL),
        ("linearalgebra/low_rank_svd_approximation", "A", broken_promises.LARGE),
        ("loss/cross_entropy", "weight", broken_promises.SMALL),
        ("math/pow", "exponent", broken_promises.SMALL),
        ("spatialops/grid_sample", "grid", broken_promises.LARGE),
        ("spatialops/grid_sample_with_affine", "theta", broken_promises.LARGE),
    ],
)  # fmt: skip
def test_every_grading_has_numbers_that_are_small_and_large(name: str, tensor: str, change: str) -> None:
    # Kernels that dropped or bounded these numbers were paid in all gradings or in some.
    assert [broken_promises.values_told(load_task(name), tensor, change, b"%d" % k) for k in range(4)] == [True] * 4


@pytest.mark.parametrize(("name", "tensor", "change"), broken_promises.SAME_VALUES)
def test_no_grading_tells_changes_without_an_effect(name: str, tensor: str, change: str) -> None:
    assert broken_promises.values_told(load_task(name), tensor, change, b"1") is not True


def test_kernels_that_change_values_are_refused(grader: Grader) -> None:
    name = "fusion/fused_sigmoid_batch_norm"
    sources = dict(broken_promises.changing(load_task(name)))
    outcome = grader.grade(name, sources[f"running_mean, {broken_promises.SMALL}"], backend="cpu", targets=(), seed=5)
    assert str(outcome.verdict) == "incorrect"


def test_values_that_make_no_difference_are_told_from_those_that_nobody_draws() -> None:
    assert broken_promises.values_told(load_task("math/cos"), "input_tensor", "numbers below 0.0001 taken for zero", b"1") is False
    assert broken_promises.values_told(load_task("loss/nll_loss"), "target", "numbers bounded by 16", b"1") is None
    assert broken_promises.values_told(load_task("loss/nll_loss"), "input", "numbers bounded by 16", b"1") is True


@pytest.mark.parametrize(
    ("name", "promise"),
    [
        ("reduce/sum", "input: three or more axes in any order in memory"),
        ("math/sub", "out= of any strides"),
        ("activation/relu", "an axis of more than one block"),
        ("activation/relu", promises.NEW_CONTIGUOUS),
        ("linearalgebra/svd", promises.NEW_CONTIGUOUS),
        ("convolution/conv2d", "D: more than one block"),
    ],
)
def test_a_kernel_with_one_promise_broken_is_refused(grader: Grader, name: str, promise: str) -> None:
    task = load_task(name)
    source = dict(broken_promises.kernels(task))[promise]
    outcome = grader.grade(name, source, backend="cpu", targets=(), seed=5)
    assert not outcome.correct and outcome.message


def test_gaps_are_listed_by_family() -> None:
    row = {"task": "a/b", "promise": "x: any strides", "verdicts": ["incorrect", "correct"], "paid": True}
    text = broken_promises.table([row, row | {"promise": "y: any strides", "paid": False}])
    assert "| any strides | 1 | 2 | 1 |" in text and "paid in grading 2: a/b, x: any strides" in text
