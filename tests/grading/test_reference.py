"""Inputs, references and floors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from judge_helper import make

from kbx_env.errors import DeclarationError
from kbx_env.grading import compulsory_work, inputs, reference
from kbx_env.spec.criteria import Close
from kbx_env.spec.task import (
    Bernoulli,
    Case,
    Choice,
    Constant,
    Cost,
    Distinct,
    Distribution,
    DtypeArg,
    Eye,
    HalfNormal,
    Ints,
    Linspace,
    Literal,
    Normal,
    Outlier,
    Places,
    Shuffled,
    Signed,
    T,
    Uniform,
)

LAWS = (
    Normal(), Outlier(0.1, 30.0, 50.0), Uniform(-1, 3), HalfNormal(), Literal(-2, 0, 1), Linspace(-12, 12),
    Ints(0, "M"), Ints(-5, 5, -100, 0.2), Distinct(), Bernoulli(0.3), Constant(2.5), Eye(),
    Choice(1.0, float("inf"), float("nan")), Shuffled(2, 0, 3, 1), Signed(1, 0, 2), Places(20, -1),
)  # fmt: skip


def twice(x, k=2, *, dtype=None, bias=None):
    y = x * k if bias is None else x * k + bias
    return y if dtype is None else y.to(dtype)


TWICE = make(twice, {"x": T("N M"), "bias": T("M", optional=True)}, Close(), "2 * numel(x) + k * N // M ** 1")


@pytest.mark.parametrize("law", LAWS, ids=lambda law: type(law).__name__)
@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32", "f64", "i32", "bool"])
@pytest.mark.parametrize("layout", [None, "transposed", "strided", "offset"])
def test_every_law_dtype_and_layout(law: Distribution, dtype: str, layout: str | None) -> None:
    case = Case({"N": 7, "M": 13}, draw=law, dtypes={"x": dtype}, layouts={"x": layout} if layout else {})
    if dtype == "bool" and isinstance(law, Distinct):
        with pytest.raises(DeclarationError):
            inputs.draw(TWICE, case, 1)
        return
    x, again = inputs.draw(TWICE, case, 1)["x"], inputs.draw(TWICE, case, 1)["x"]
    assert x.shape == (7, 13) and x.dtype == inputs.DTYPES[dtype]
    assert torch.equal(torch.nan_to_num(x.double(), nan=7), torch.nan_to_num(again.double(), nan=7))
    plain = inputs.draw(TWICE, Case(case.axes, draw=law, dtypes={"x": dtype}), 1)["x"]
    assert torch.equal(torch.nan_to_num(x.double(), nan=7), torch.nan_to_num(plain.double(), nan=7))
    wanted = {None: (13, 1), "transposed": (1, 7), "strided": (26, 2), "offset": (13, 1)}[layout]
    assert x.stride() == wanted and x.storage_offset() == (layout == "offset")


def test_laws_mean_what_they_say() -> None:
    def one(law: Distribution, dtype: str = "f64") -> torch.Tensor:
        return inputs.draw(TWICE, Case({"N": 100, "M": 100}, draw=law, dtypes={"x": dtype}), 3)["x"]

    assert abs(float(one(Normal(3.0, 2.0)).mean()) - 3) < 0.2 and abs(float(one(Normal(3.0, 2.0)).std()) - 2) < 0.1
    assert one(Normal(clamp=0.5)).abs().max() == 0.5
    assert one(HalfNormal(0.25)).min() >= 0.25
    assert one(Distinct()).flatten().sort().values.tolist() == list(range(10000))
    assert one(Shuffled(2, 0, 3, 1)).sum() == 15000 and len(one(Shuffled(2, 0, 3, 1)).flatten()[::4].unique()) == 4
    assert one(Signed(1, 2)).abs().flatten()[:4].tolist() == [1, 2, 1, 2] and len(one(Signed(1, 2)).unique()) == 4
    for dim in (0, 1):
        x = one(Places(100, dim), "i64").sort(dim).values
        assert torch.equal(x, torch.arange(100).view((-1, 1) if dim == 0 else (1, -1)).expand(100, 100))
    with pytest.raises(DeclarationError):
        one(Places(99, 0), "i64")
    assert 0.25 < one(Bernoulli(0.3), "bool").double().mean() < 0.35
    assert one(Ints(2, "M"), "i64").min() >= 2 and one(Ints(2, "M"), "i64").max() < 100
    assert 0.15 < (one(Ints(0, 9, -100, 0.2), "i64") == -100).double().mean() < 0.25
    assert one(Linspace(-1, 1)).flatten()[[0, -1]].tolist() == [-1, 1]
    x = one(Normal())
    assert len(x.unique()) == 10000 and not torch.equal(x.float().double(), x), "fp64 draws have fp64 resolution"
    with pytest.raises(DeclarationError):
        one(Distinct(), "f16")


def test_optionals_overrides_and_markers() -> None:
    case = Case({"N": 2, "M": 3}, {"k": 4, "dtype": DtypeArg("f16")}, given=("bias",), draws={"bias": Constant(5.0)})
    args = inputs.draw(TWICE, case, 1)
    assert list(args) == ["x", "k", "dtype", "bias"] and args["bias"].tolist() == [5.0] * 3
    assert args["dtype"] == DtypeArg("f16")
    assert list(inputs.draw(TWICE, Case({"N": 0, "M": 3}, draw=Ints(0, "N")), 1)) == ["x"]
    expected = reference.expect(TWICE, case, args)
    assert expected.native[0].dtype is torch.float16 and expected.outputs[0].dtype is torch.float64
    assert not torch.equal(expected.native[0].double(), expected.outputs[0])


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=8), st.text(max_size=6), st.text(max_size=6), st.integers(0, 99), st.integers(0, 99))
def test_seeds_are_apart(secret: bytes, task_id: str, split: str, index: int, repeat: int) -> None:
    seed = inputs.case_seed(secret, task_id, split, index, repeat)
    assert 0 <= seed < 1 << 63
    others = [
        inputs.case_seed(secret + b"|", task_id, split, index, repeat),
        inputs.case_seed(secret, task_id + "|", split, index, repeat),
        inputs.case_seed(secret, task_id, split, index + 1, repeat),
        inputs.case_seed(secret, task_id, split, index, repeat + 1),
        inputs.generator_seed(seed, "x"),
    ]
    assert len({seed, *others}) == 6


def test_reference_leaves_arguments_and_settings_alone() -> None:
    def bump(x):
        return x.add_(1)

    def view(x):
        return x[1:]

    torch.set_float32_matmul_precision("high")
    try:
        t = make(bump, {"x": T("N")}, Close(), writes={"x": "always"})
        args = inputs.draw(t, Case({"N": 5}, layouts={"x": "strided"}), 1)
        before = args["x"].clone()
        expected = reference.expect(t, Case({"N": 5}), args)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert torch.equal(args["x"], before) and torch.equal(expected.native_written["x"], before + 1)
    assert expected.aliases == ("x",) and expected.written["x"].dtype is torch.float64
    t = make(view, {"x": T("N")}, Close())
    assert reference.expect(t, Case({"N": 5}), args).shares == ("x",)


def test_missing_half_kernels_fall_back_to_fp32() -> None:
    def fragile(x, y):
        if x.dtype is torch.float16 and x.device.type == "cpu":
            raise RuntimeError("\"fragile\" not implemented for 'Half'")
        return x * y

    t = make(fragile, {"x": T("N", "f16"), "y": T("N", "f16")}, Close())
    case = Case({"N": 9})
    args = inputs.draw(t, case, 1)
    native = reference.expect(t, case, args).native[0]
    assert native.dtype is torch.float16 and torch.equal(native, args["x"] * args["y"])
    mixed = Case({"N": 9}, dtypes={"y": "f32"})
    assert reference.expect(t, mixed, inputs.draw(t, mixed, 1)).native[0].dtype is torch.float32


def test_floors() -> None:
    case = Case({"N": 6, "M": 3}, given=("bias",))
    args = inputs.draw(TWICE, case, 1)
    assert compulsory_work.flops(TWICE, case) == 2 * 18 + 2 * 6 // 3
    assert compulsory_work.ideal_bytes(TWICE, case, args, reference.expect(TWICE, case, args)) == 4 * (18 + 3 + 18)
    star = make(twice, {"x": T("*b M")}, Close(), cost=Cost("b * M", bytes="3 * b + numel(x) + numel(bias)"))
    with pytest.raises(DeclarationError):
        compulsory_work.ideal_bytes(star, Case({"*b": (2, 5), "M": 7}), {}, reference.expect(TWICE, case, args))
    assert compulsory_work.flops(star, Case({"*b": (2, 5), "M": 7})) == 70
    for bad in ("__import__('os')", "x.y", "[1]", "unknown", "numel(1)", "lambda: 1", "'a' * 3"):
        with pytest.raises(DeclarationError):
            compulsory_work.evaluate(bad, {"n": 1}, {"x": 1})


def test_exact_products_of_threads_that_overlap_leave_what_was_set_before() -> None:
    first, second = reference.exact_matmul(), reference.exact_matmul()
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = True
    try:
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert not torch.backends.cudnn.allow_tf32, "the second block still computes"
        second.__exit__(None, None, None)
        assert torch.backends.cudnn.allow_tf32
    finally:
        torch.backends.cudnn.allow_tf32 = before
