"""The families of derived cases: within the tasks' bounds, repeatable, different for every grading."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from kbx_env.tasks._varied import LONG_CONV, WIDE, balanced, conv_sizes, longs, plain

from kbx_env.grading import derived_cases, inputs, reference
from kbx_env.grading import judge as judges
from kbx_env.grading.grader import Grader
from kbx_env.grading.judge import structure
from kbx_env.grading.runtime.session import RunnerSession
from kbx_env.spec.catalog import expert_source, load_task, task_ids
from kbx_env.spec.criteria import Sample, Windows
from kbx_env.spec.task import Case, Literal, Outlier, Scaled, Symmetric, shape_of
from kbx_env.spec.varied import Pick, contiguous, layout, parsed, reshapable

SECRETS = tuple(b"secret %d" % k for k in range(3))


@pytest.mark.parametrize("name", task_ids())
def test_every_family_draws_cases_that_the_reference_can_compute(name: str) -> None:
    task = load_task(name)
    assert task.varied, f"{name}: no derived cases"
    telling = 0
    for secret in SECRETS:
        for case in derived_cases.derive(task, secret, "train"):
            args = inputs.draw(task, case, 3)
            for tensor, t in task.takes.items():
                if isinstance(args.get(tensor), torch.Tensor):
                    assert args[tensor].shape == shape_of(t, case.axes)
            keep = None if isinstance(task.truth, Sample | Windows) else True
            expected = reference.expect(task, case, args, keep=keep, exact=not isinstance(task.truth, Sample | Windows))
            telling += bool(expected.native[0].numel())
    assert telling >= len(SECRETS), f"{name}: nearly all derived cases have empty results"


@pytest.mark.parametrize(
    "name",
    ["loss/nll_loss", "loss/cross_entropy", "fusion/fused_cross_entropy_log_softmax", "math/ifftshift",
     "fusion/fused_relu_max_pool2d_conv2d"],
)  # fmt: skip
def test_arguments_fit_what_is_drawn(name: str) -> None:
    """Ignored targets of a declared case met another ignored class, a long axis came with fewer axes than dim names, and a
    pooling window was larger than the image that it pools."""
    task = load_task(name)
    for k in range(60):
        for case in derived_cases.derive(task, b"%d" % k, "eval"):
            assert reference.expect(task, case, inputs.draw(task, case, k), exact=False).native, case.label()


def test_torchs_nearest_pixels_are_those_of_the_contract() -> None:
    """With factor 2.3 two pixels became four, and torch took the pixels of factor 2; pixel 10 was at position 22.9999996 or 23."""
    task, seen = load_task("spatialops/interpolate"), 0
    for k in range(150):
        for case in derived_cases.derive(task, b"%d" % k, "train"):
            factor = case.args.get("scale_factor")
            if case.args["mode"] != "nearest" or factor is None:
                continue
            x = inputs.draw(task, case, k)["input"]
            given = reference.expect(task, case, {**case.args, "input": x}).native[0]
            # A kernel may have the ratio in fp64, round it to fp32, or divide 1 by the rounded factor.
            for ratio in (torch.tensor(1 / factor, dtype=torch.float64), torch.tensor(1 / factor), 1 / torch.tensor(factor)):
                right = x
                for axis in (2, 3):
                    n = x.shape[axis]
                    places = (torch.arange(int(n * factor)) * ratio).floor().long()
                    right = right.index_select(axis, places.clamp_max(n - 1))
                assert torch.equal(given, right), case.label()
            seen += 1
    assert seen > 15


def test_no_least_squares_system_is_almost_singular() -> None:
    """With a condition of 10**5 the errors of two right kernels differed by more than the tolerance."""
    task, square = load_task("fusion/fused_qr_solve"), 0
    for k in range(300):
        case = derived_cases.derive(task, b"%d" % k, "train")[0]
        if case.axes["m"] < 6:
            square += case.axes["m"] == case.axes["n"]
            assert float(torch.linalg.cond(inputs.draw(task, case, k)["A"].double()).max()) < 10, case.label()
    assert square > 10


@pytest.mark.parametrize("name", [t for t in task_ids() if load_task(t).takes])
def test_a_secret_repeats_its_cases_and_another_secret_draws_others(name: str) -> None:
    task = load_task(name)
    first, again, other = (
        [c.label() for c in derived_cases.derive(task, secret, "eval")] for secret in (b"one", b"one", b"other")
    )
    assert first == again and first != other


REDUCTIONS = ("reduce/mean", "reduce/std", "reduce/min_gelu", "fusion/fused_sum_std", "fusion/fused_add_mean",
              "normalization/normalized_cosine_similarity")  # fmt: skip


@pytest.mark.parametrize("name", REDUCTIONS)
def test_every_grading_reduces_many_columns_that_are_adjacent_in_memory(name: str) -> None:
    """A kernel that joins the parts of split columns needs a second program there; 7 of 10 gradings had such a case."""
    task = load_task(name)
    tensor = next(iter(task.takes))
    for k in range(20):
        cases = [
            c for c in derived_cases.derive(task, b"%d" % k, "train")
            if len(shape := shape_of(task.takes[tensor], c.axes)) == 2 and shape[0] >= 260 and shape[1] >= WIDE
        ]  # fmt: skip
        assert cases, f"{name}: no wide matrix"
        for c in cases:
            order, steps, _, _ = parsed(c.layouts[tensor]) or ((), (), 0, 0)
            assert c.args["dim"] in (0, -2, (0,), (-2,)) and order == (0, 1) and steps[1] == 1


MANY = 1 << 17
"""Elements from which on the experts take their path for large tensors."""
LARGE = (
    *REDUCTIONS, "reduce/sum", "reduce/min", "reduce/argmax", "fusion/fused_gelu_min", "normalization/normalize_pairwise_distance",
    "fusion/fused_exp_mean", "fusion/fused_gelu_std",
    "matrixmultiply/matmul", "matrixmultiply/matmul_fp16", "matrixmultiply/matmul_bf16", "matrixmultiply/addmm",
    "matrixmultiply/tensordot_rsqrt", "matrixmultiply/matrix_multiply_symmetric", "matrixmultiply/tril_mm_and_scale",
    "activation/combined_activation", "fusion/fused_elu_linear", "fusion/fused_tanh_linear", "fusion/fused_softplus_linear",
    "fusion/fused_dropout_sigmoid_linear", "fusion/fused_log_softmax_linear", "fusion/fused_layer_norm_relu_linear",
    "fusion/fused_bmm_dropout_gelu", "fusion/fused_bmm_rmsnorm_gelu_dropout", "fusion/fused_bmm_rmsnorm_gelu_dropout_sub",
    "fusion/fused_mul_add_logsoftmax_dropout_bmm", "fusion/fused_transformer_block",
    "quantization/bmm_w8a8", "quantization/matmul_w8a8", "quantization/linear_w4a16", "quantization/conv2d_w8a8",
    "convolution/conv2d", "fusion/fused_conv2d_add", "fusion/fused_relu_conv2d", "fusion/fused_gelu_conv2d",
    "fusion/fused_leaky_relu_conv2d", "fusion/fused_pixel_shuffle_conv2d", "fusion/fused_relu_max_pool2d_conv2d",
    "fusion/fused_silu_layer_norm_conv2d", "fusion/fused_relu_batch_norm_conv2d",
    "fusion/fused_instance_norm_selu_conv2d", "fusion/fused_dropout_relu_batch_norm_conv2d",
    "normalization/batch_norm", "fusion/fused_sigmoid_batch_norm", "fusion/fused_hardsigmoid_batch_norm",
    "math/softmax", "fusion/fused_softmax_log", "fusion/fused_repeat_interleave_log_softmax", "fusion/attention",
)  # fmt: skip


@pytest.mark.parametrize("name", LARGE)
def test_every_grading_has_a_large_tensor(name: str) -> None:
    """Kernels take another path for large tensors: without masks, or with a sum that several programs share."""
    task = load_task(name)
    for k in range(10):
        cases = derived_cases.derive(task, b"%d" % k, "train")
        sizes = [math.prod(shape_of(t, c.axes)) for c in cases for t in task.takes.values()]
        assert max(sizes) >= MANY, k


@pytest.mark.parametrize("name", task_ids())
def test_no_constant_is_right_in_a_case_of_large_tensors(name: str) -> None:
    """Otherwise the case would prove nothing: rewards count telling cases only."""
    task = load_task(name)
    for case in derived_cases.derive(task, b"large", "train"):
        passed = [t for n, t in task.takes.items() if n not in case.args and (not t.optional or n in case.given)]
        if max((math.prod(shape_of(t, case.axes)) for t in passed), default=0) >= MANY:
            assert derived_cases.is_telling(task, case), case.label()


MOMENTS = ("normalization/batch_norm", "fusion/fused_sigmoid_batch_norm", "fusion/fused_hardsigmoid_batch_norm")


@pytest.mark.parametrize("name", MOMENTS)
def test_every_grading_trains_channels_of_two_elements_and_of_an_odd_last_chunk(name: str) -> None:
    task = load_task(name)
    for k in range(20):
        cases = [c for c in derived_cases.derive(task, b"%d" % k, "train") if c.args.get("training")]
        elements = [c.axes["N"] * math.prod(c.axes["*"]) for c in cases]  # type: ignore[operator, arg-type]
        assert 2 in elements and any(n > 1 << 15 and n % 4096 > 2048 and n % 2 for n in elements)


@pytest.mark.parametrize("name", [n for n in task_ids() if "correction" in load_task(n).signature.parameters])
def test_a_correction_is_below_the_number_of_reduced_elements(name: str) -> None:
    # The contracts say so. A division by zero or less has no right answer that all kernels share.
    task = load_task(name)
    for k in range(60):
        for case in derived_cases.derive(task, b"%d" % k, "eval"):
            found = reference.expect(task, case, inputs.draw(task, case, k), "cpu", exact=False).native
            assert all(torch.isfinite(f).all() for f in found), case.label()


def test_every_grading_passes_values_that_no_declared_case_has() -> None:
    for name, argument in (("pooling/avg_pool1d", "stride"), ("linearalgebra/low_rank_svd_approximation", "k")):
        task = load_task(name)
        declared = {c.args.get(argument) for c in task.cases}
        for k in range(20):
            drawn = {c.args.get(argument) for c in derived_cases.derive(task, b"%d" % k, "train")}
            assert drawn - declared, (name, k)


@pytest.mark.parametrize("name", [t for t in task_ids() if load_task(t).takes])
def test_one_derived_case_of_each_grading_is_contiguous(name: str) -> None:
    """A kernel that was right for strided tensors, and for contiguous ones of declared shapes, was paid."""
    task = load_task(name)
    for secret in SECRETS:
        cases = derived_cases.derive(task, secret, "train")
        (plain,) = [c for c in cases if not c.layouts]
        if len(cases) > len(task.varied):  # a case of its own, so that no layout is lost
            continue
        for tensor, t in task.takes.items():  # the layouts that it does not test, another case does
            if tensor not in plain.args and (not t.optional or tensor in plain.given) and shape_of(t, plain.axes):
                ranks = [len(shape_of(t, c.axes)) for c in cases if tensor in c.layouts]
                assert max(ranks) >= min(3, len(shape_of(t, plain.axes))), tensor


def test_factors_of_a_product_are_large_and_small() -> None:
    for seed in range(20):
        found = balanced(Pick(seed), "a", "b", 0.25)
        assert found["a"].scale >= 8 and found["a"].scale * found["b"].scale == 0.25**2
        assert math.frexp(found["a"].scale / found["b"].scale)[0] == 0.5  # a power of two: no rounding changes


@pytest.mark.parametrize("name", ["fusion/fused_relu_conv2d", "matrixmultiply/matmul", "fusion/fused_tanh_linear"])
def test_either_factor_is_large_in_a_case_of_each_grading(name: str) -> None:
    """Kernels that clamp one of the factors to 16 were paid: all factors were drawn of order one."""
    task = load_task(name)
    for secret in SECRETS:
        names = sorted(t for t in task.takes if not t.endswith("bias"))
        drawn = [c.draws for c in derived_cases.derive(task, secret, "eval") if set(names) <= set(c.draws)]
        laws = [[draws[tensor] for tensor in names] for draws in drawn]
        scales = [[d.base for d in each] for each in laws if all(isinstance(d, Outlier) for d in each)]
        assert any(a > 50 * b for a, b in scales) and any(b > 50 * a for a, b in scales)


@pytest.mark.parametrize("name", ["fusion/fused_relu_conv2d", "matrixmultiply/matmul", "loss/mse_loss"])
def test_some_normal_numbers_of_derived_cases_are_near_zero(name: str) -> None:
    task = load_task(name)
    near = 0
    for case in derived_cases.derive(task, b"near zero", "eval"):
        args = inputs.draw(task, case, 1)
        for tensor, t in task.takes.items():
            draw = case.draws.get(tensor) or t.draw or case.draw
            if tensor in args and isinstance(draw, Outlier) and draw.scale == 2.0**-14 and args[tensor].numel() > 400:
                near += 1
                assert 0.06 < float((args[tensor].abs() < 1e-3 * draw.base).double().mean()) < 0.2
    assert near


@pytest.mark.parametrize(
    "name", ["fusion/fused_sigmoid_batch_norm", "fusion/fused_hardsigmoid_batch_norm", "normalization/batch_norm"]
)
def test_running_statistics_are_small_and_large_outside_of_training_in_every_grading(name: str) -> None:
    """A kernel that took running means below 0.0001 for zero was paid."""
    task = load_task(name)
    for secret in SECRETS:
        cases = [c for c in derived_cases.derive(task, secret, "eval") if c.args.get("training") is False]
        means = [inputs.draw(task, c, 1)["running_mean"].abs() for c in cases]
        assert any(bool((m < 1e-3).all() and ((m > 0) & (m < 1e-4)).any()) for m in means)
        assert any(bool((m > 16).any()) for m in means)


def test_a_contiguous_case_ends_within_a_block() -> None:
    # Otherwise a kernel may leave out its last block wherever the input is contiguous and of no declared size.
    task = load_task("activation/sigmoid")
    for k in (*range(60), 104, 214, 239):
        sizes = [c.elements() for c in derived_cases.derive(task, b"%d" % k, "eval") if not c.layouts]
        assert any(n > 1024 and n % 256 for n in sizes)


def test_no_tensor_is_contiguous_by_chance() -> None:
    for seed in range(300):
        for shape in ((2,), (1, 5), (1, 1, 7), (3, 1), (2, 3, 4)):
            text = Pick(seed).layout(shape)
            assert not inputs._laid_out(torch.zeros(shape), text).is_contiguous(), (shape, text)
    assert Pick(0).layout(()) is None and Pick(0).layout((1, 1))


def test_large_tensors_have_few_gaps() -> None:
    def spans(shape: tuple[int, ...]) -> set[float]:
        laid = [inputs._laid_out(torch.empty(shape), Pick(seed).layout(shape)) for seed in range(60)]
        return {(1 + sum((n - 1) * s for n, s in zip(shape, t.stride(), strict=True))) / t.numel() for t in laid}

    large, small = spans((1, 5, 115, 117)), spans((1, 5, 11, 17))
    assert max(large) <= 4 < max(small)
    assert len(large) > 5, "there are gaps of several kinds"


def test_contiguous_says_what_torch_says() -> None:
    for seed in range(300):
        pick = Pick(seed)
        shape = pick.shape(1, 4, 30)
        found = parsed(pick.layout((1,) * len(shape)) or "")
        assert found is not None
        placed = inputs._laid_out(torch.zeros(shape), layout(*found))
        assert contiguous(shape, *found) == placed.is_contiguous() or math.prod(shape) < 2, (shape, found)


def test_axes_without_steps_are_expanded() -> None:
    x = torch.arange(60.0).view(3, 4, 5)
    placed = inputs._laid_out(x, layout((2, 0, 1), (1, 0, 2), offset=3, pad=1))
    assert placed.stride(1) == 0 and torch.equal(placed, x[:, :1].expand(3, 4, 5)) and placed.storage_offset() == 3
    assert torch.equal(inputs.once(placed), x[:, :1]) and inputs.once(x).shape == x.shape
    assert not contiguous((3, 4, 5), (2, 0, 1), (1, 0, 2)) and not contiguous((3, 5), (0, 1), (0, 1))
    with pytest.raises(RuntimeError):
        placed.add_(1)


def test_equal_layouts_are_drawn_and_different_ones() -> None:
    task = load_task("math/add")
    shapes = [{"*a": (2, 3, 5), "*b": (2, 3, 5)}]
    for alike in (True, False):
        cases = [derived_cases.laid_out(task, Case(shapes[0], out=True), Pick(k), alike=alike) for k in range(20)]
        assert sum(len({c.layouts[n] for n in ("input", "other", "out")}) == 1 for c in cases) == (20 if alike else 0)


def test_neighbours_along_an_axis_are_adjacent() -> None:
    for seed in range(50):
        placed = inputs._laid_out(torch.zeros(3, 4, 5), Pick(seed).adjacent(3, 1))
        assert placed.stride(1) == 1


def test_a_layout_keeps_the_values_and_poisons_the_gaps() -> None:
    x = torch.arange(24.0).reshape(2, 3, 4)
    placed = inputs._laid_out(x, layout((2, 0, 1), (1, 3, 2), 5))
    assert torch.equal(placed, x) and placed.storage_offset() == 5
    assert placed.stride() == (9, 3, 36)
    held = placed.untyped_storage().nbytes() // 4
    whole = torch.empty(0).set_(placed.untyped_storage(), 0, (held,), (1,))
    assert int(torch.isnan(whole).sum()) == held - 24


def test_the_notation_of_a_layout_is_read_back() -> None:
    assert parsed(layout((1, 0), (1, 2), 7)) == ((1, 0), (1, 2), 7, 0) and parsed("transposed") is None
    assert parsed(layout((0,), (3,), 1, 2)) == ((0,), (3,), 1, 2)


def test_a_pad_lies_behind_each_line_as_in_a_slice() -> None:
    x = torch.arange(12.0).reshape(3, 4)
    placed = inputs._laid_out(x, layout((0, 1), (1, 1), 0, 1))
    assert torch.equal(placed, x) and placed.stride() == (5, 1)
    assert inputs._laid_out(x, layout((1, 0), (2, 1), 0, 3)).stride() == (2, 9)


def test_every_axis_is_long_in_one_case_of_a_grading() -> None:
    short, long = {"B": (2, 4), "M": (2, 9), "N": (2, 9)}, {"B": 20, "M": 600, "N": 1100}
    functions = longs(short, long, most=50_000)
    for seed in range(20):
        drawn = [draw(Pick(seed)) for draw in functions]
        for axis, size in long.items():
            assert max(d[axis] for d in drawn) >= size, (axis, drawn)


@pytest.mark.parametrize("axis", LONG_CONV)
def test_derived_convolutions_have_the_long_axes_and_few_elements(axis: dict[str, int]) -> None:
    for seed in range(60):
        axes, args = conv_sizes(Pick(seed), axis)
        assert all(axes["D" if name == "C" else name] >= size for name, size in axis.items()), axes
        assert axes["C"] == axes["D"] * args["groups"] and axes["O"] % args["groups"] == 0
        assert axes["N"] * axes["O"] * axes["P"] * axes["Q"] < 200_000 and axes["P"] >= 2 and axes["Q"] >= 2


def test_broadcast_tensors_keep_the_axes_that_are_asked_for() -> None:
    assert all(len(Pick(seed).broadcast((2, 3, 4, 5), 3)) >= 3 for seed in range(50))


def test_tuples_of_axes_are_never_in_ascending_order() -> None:
    drawn = [Pick(seed).axes(4, 2) for seed in range(60)]
    assert all(list(axes) != sorted(axes) and len({a % 4 for a in axes}) == len(axes) for axes in drawn)


def test_a_full_case_passes_the_optional_tensors() -> None:
    cases = (Case({"n": 3}), Case({"n": 3}, given=("weight",)), Case({"n": 3}, given=("weight", "bias")))
    assert {Pick(seed, cases).like(full=True).given for seed in range(20)} == {("weight", "bias")}


def test_shapes_broadcast_both_ways() -> None:
    for seed in range(50):
        a, b = Pick(seed).both_ways(3, 5)
        common = torch.broadcast_shapes(a, b)
        assert common not in (a, b), (a, b)


def test_a_single_element_of_any_stride_is_compared_and_read_as_bytes() -> None:
    placed = inputs._laid_out(torch.tensor([[3.5]]), layout((1, 0), (3, 2), 1))
    assert placed.stride() != (1, 1) and structure.same_bits(placed, placed.clone())
    assert not structure.same_bits(placed, torch.tensor([[4.5]]))


def test_a_result_of_one_element_may_have_any_stride(grader: Grader) -> None:
    task = load_task("reduce/std")
    case = Case({"*": (1, 5)}, {"dim": 1}, out=True, layouts={"out": layout((0,), (3,), 1)})
    task = replace(task, cases=(case,), varied=())
    source = expert_source(task.id)
    assert source is not None
    with RunnerSession(grader.zygote(), task, "cpu", b"secret", "eval", 60.0) as session:
        session.load(source.encode())
        (call,) = session.calls(case, 0, 1, "run")
    assert call.broken is None and call.answer.aliases == ("out",)


def test_a_derived_case_that_a_constant_would_pass_is_not_telling() -> None:
    task = load_task("reduce/std")
    spread, single = (
        Case({"*": (n, 7)}, {"dim": 0, "correction": 0}) for n in (5, 1)
    )  # of one element the deviation is 0
    assert derived_cases.is_telling(task, spread) and not derived_cases.is_telling(task, single)


def test_a_window_of_each_derived_convolution_reads_a_pixel() -> None:
    # A stride could skip the only pixels of a small image: the result was the bias, whatever the kernel did with the image.
    task = load_task("convolution/conv2d")
    for k in range(40):
        for case in derived_cases.derive(task, b"%d" % k, "eval"):
            args = inputs.draw(task, replace(case, out=False, layouts={}), 1)
            image = args["input"].abs() + 1
            options = (case.args[n] for n in ("stride", "padding", "dilation", "groups"))
            sums = torch.nn.functional.conv2d(image, torch.ones_like(args["weight"]), None, *options)
            assert sums.abs().max() > 0, case.label()


def test_each_channel_of_a_derived_convolution_with_many_has_two_weights() -> None:
    # A norm of the channels divides by the size of a single weight: a kernel that bounded weights by 16 was paid.
    for k in range(200):
        axes, _ = conv_sizes(Pick(k), {"O": 130})
        assert axes["D"] * axes["R"] * axes["S"] > 1


def test_nll_loss_draws_losses_up_to_100() -> None:
    task = load_task("loss/nll_loss")
    for secret in SECRETS:
        drawn = [inputs.draw(task, c, 1)["input"] for c in derived_cases.derive(task, secret, "eval")]
        assert any(bool((x < -90).any()) for x in drawn if x.numel())


def test_small_biases_come_with_products_of_order_one() -> None:
    # The contract of ELU says exp(z) - 1: with tiny products an honest kernel was refused.
    task = load_task("fusion/fused_elu_linear")
    for k in range(20):
        for case in derived_cases.derive(task, b"%d" % k, "eval"):
            args = inputs.draw(task, replace(case, out=False, layouts={}), 1)
            z = torch.nn.functional.linear(args["input"].float(), args["weight"].float())
            assert z.abs().max() > 0.01, case.label()


def test_listed_values_keep_their_shape_where_they_are_scaled() -> None:
    # A matrix of listed values was drawn with another size, where it is singular: an expert was refused in 1 of 15 gradings.
    listed, drawn = Literal(0, 1, 1, 0), Symmetric()
    cases = [Case({"n": 2}, draws={"A": d}) for d in (listed, Scaled(listed, 2), drawn, Scaled(drawn, 2))]
    assert reshapable(cases) == tuple(cases[2:])
    assert reshapable([Case({"n": 2}, draw=Scaled(listed, 1 + 1j))]) == ()


def test_plain_is_a_condition_on_a_case() -> None:
    # It returned a function, which is true of every case.
    assert plain(Case({"B": 1})) is True and plain(Case({"B": 1}, dtypes={"input": "f16"})) is False


@pytest.mark.parametrize("name", ("loss/smooth_l1_loss", "matrixmultiply/matmul", "fusion/fused_hardshrink_dropout"))
def test_what_the_check_of_a_derived_case_finds_serves_its_ruling(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    task = load_task(name)
    for case in derived_cases.derive(task, b"known", "eval"):
        args, known = inputs.draw(task, case, 7), judges.Known()
        telling = derived_cases.is_telling(task, case, args, known)
        assert known.expected is not None and telling == (not judges.is_trivial(task, case, args))
        for right in judges.canaries(task, case, args, known.expected).values():
            answers = [right] * judges.calls_needed(task, case)
            fresh = judges.judge(task, case, args, answers, timed=True)
            with monkeypatch.context() as without:
                without.setattr(judges, "_expected", lambda *a: pytest.fail("the reference runs again"))
                assert judges.judge(task, case, args, answers, timed=True, known=known).passed == fresh.passed
