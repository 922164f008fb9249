"""Honest and dishonest answers for the judge of floating point, and for structure."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from judge_helper import answer, canaries_fail, draw, make, rule, tf32
from kbx_env.tasks._varied import LARGE, TINY
from torch.utils._python_dispatch import TorchDispatchMode

from kbx_env.grading import inputs, judge, reference
from kbx_env.grading.judge import close
from kbx_env.spec.catalog import expert_source, load_task, load_tasks
from kbx_env.spec.criteria import Close, Exact
from kbx_env.spec.task import Case, Choice, DtypeArg, Normal, T, Task, Uniform


def matmul(a, b):
    return a @ b


def gelu(x):
    return F.gelu(x)


def total(x):
    return x.sum()


def halves(x):
    return x / 3, x * 3


def scale_(x, y):
    x.mul_(y)
    return x


MATMUL = make(matmul, {"a": T("M K"), "b": T("K N")}, Close(), "2 * M * N * K")
GELU16 = make(gelu, {"x": T("N M", "f16")}, Close(), "8 * numel(x)")
GELU32 = make(gelu, {"x": T("N M")}, Close(), "8 * numel(x)")
TOTAL = make(total, {"x": T("N")}, Close(), "numel(x)")
HALVES = make(halves, {"x": T("N")}, Close())
SCALE = make(scale_, {"x": T("N"), "y": T("N")}, Close(), writes={"x": "always"})
BIG = Case({"M": 64, "K": 4096, "N": 48})


def sequential(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    acc = torch.zeros(a.shape[0], b.shape[1])
    for k in range(a.shape[1]):
        acc += a[:, k, None] * b[k]
    return acc


@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_matmul_in_any_fair_order(dtype: str) -> None:
    case = replace_case(BIG, dtypes={"a": dtype, "b": dtype})
    args = draw(MATMUL, case, 1)
    a, b = args["a"], args["b"]
    order = torch.randperm(4096, generator=torch.Generator().manual_seed(0))
    blocks = sum(x @ y for x, y in zip(a.split(32, 1), b.split(32, 0), strict=True))
    one_by_one = sequential(a, b) if dtype == "f32" else (a[:, order] @ b[order])
    for honest in (a @ b, a[:, order] @ b[order], blocks, one_by_one):
        assert rule(MATMUL, case, args, honest).passed


def replace_case(case: Case, **changes: object) -> Case:
    names = ("axes", "args", "draw", "draws", "dtypes", "layouts", "given", "out", "held")
    fields = {k: getattr(case, k) for k in names}
    return Case(**(fields | changes))


@pytest.mark.parametrize("k", [1, 7, 64, 1024, 4096])
def test_downgraded_matmuls_fail(k: int) -> None:
    case = Case({"M": 64, "K": k, "N": 48})
    args = draw(MATMUL, case, k)
    a, b = args["a"], args["b"]
    assert rule(MATMUL, case, args, (a.double() @ b.double()).float()).passed
    wrong = {
        "tf32": tf32(a) @ tf32(b),
        "bf16 operands": a.bfloat16().float() @ b.bfloat16().float(),
        "bf16 result": (a @ b).bfloat16().float(),
        "fp16 result": (a @ b).half().float(),
        "one element": (a @ b).index_fill(0, torch.tensor([3]), 0.0),
        "one product less": (a @ b) - a[:, :1] * b[:1],
        "transposed": (a @ b).flip(0),
        "nan": torch.full((64, 48), torch.nan),
    }
    for name, y in wrong.items():
        assert not rule(MATMUL, case, args, y).passed, name
    canaries_fail(MATMUL, case, args)


def test_a_sum_that_cancels_may_be_added_in_any_order() -> None:
    case, refused = Case({"N": 1 << 16}), 0
    for seed in range(8):
        args = draw(TOTAL, case, seed)
        x = args["x"]
        args["x"] = x = torch.cat([x[: 1 << 15], -x[: 1 << 15] + 1e-5])
        perm = torch.randperm(x.numel(), generator=torch.Generator().manual_seed(seed))
        assert rule(TOTAL, case, args, x[perm].sum()).passed
        assert rule(TOTAL, case, args, x[perm].view(64, -1).cumsum(1)[:, -1].sum()).passed
        refused += not rule(TOTAL, case, args, tf32(x).sum()).passed
    assert refused >= 5, "a single number is right by chance once in four or five draws (28 of 120)"


def test_elementwise_fp32_and_fp16() -> None:
    case = Case({"N": 65, "M": 129})
    args = draw(GELU16, case, 3)
    x = args["x"]
    assert rule(GELU16, case, args, F.gelu(x.float()).half()).passed
    assert rule(GELU16, case, args, F.gelu(x.double()).half()).passed
    for y in (F.gelu(x.float(), approximate="tanh") + 5e-3, F.silu(x.float()), F.relu(x.float())):
        assert not rule(GELU16, case, args, y.half()).passed
    canaries_fail(GELU16, case, args)
    args = draw(GELU32, case, 3)
    x = args["x"]
    assert rule(GELU32, case, args, 0.5 * x * (1 + torch.erf(x * 0.70710678))).passed
    for y in (F.gelu(x, approximate="tanh"), F.gelu(tf32(x)), F.gelu(x.half()).float(), F.gelu(x.bfloat16()).float()):
        assert not rule(GELU32, case, args, y).passed


def test_sums_of_blocks_may_be_added_one_after_the_other() -> None:
    """One grading in 150 refused the atomic sum of 512 blocks: noise of the inputs averages out in it, rounding does not."""
    task = load_task("loss/smooth_l1_loss")
    case = Case({"*": (128, 1024)}, {"reduction": "sum", "beta": 3.0})
    args = draw(task, case, 1)
    blocks = F.smooth_l1_loss(args["input"], args["target"], reduction="none", beta=3.0).reshape(512, 256).sum(1).numpy()
    order = np.random.default_rng(0)
    totals = torch.from_numpy(np.array([order.permutation(blocks).cumsum(dtype=np.float32)[-1] for _ in range(400)]))
    exact = float(blocks.astype(np.float64).sum())
    for extreme in (totals.min(), totals.max()):
        assert rule(task, case, args, extreme).passed
    assert max(abs(float(t) / exact - 1) for t in (totals.min(), totals.max())) > 8 * 2.0**-23, "the declared tolerance"
    assert not rule(task, case, args, torch.tensor(exact * (1 - 64 * 2.0**-23))).passed
    elementwise = case.args | {"reduction": "none"}
    each = F.smooth_l1_loss(args["input"], args["target"], reduction="none", beta=3.0)
    assert not rule(task, replace_case(case, args=elementwise), args | elementwise, each * (1 + 20 * 2.0**-23)).passed


def test_one_giant_does_not_excuse_the_rest() -> None:
    case = Case({"N": 64, "M": 64}, draw=Choice(1e30, 1.0, 2.0, 3.0))
    args = draw(GELU32, case, 5)
    y = F.gelu(args["x"])
    assert rule(GELU32, case, args, y).passed
    assert not rule(GELU32, case, args, torch.where(y < 10, y + 1e-3, y)).passed


def test_nan_and_infinity_must_be_where_the_truth_has_them() -> None:
    case = Case({"N": 8, "M": 64}, draw=Choice(1.0, 2.0, float("inf"), float("nan"), -3.0))
    args = draw(GELU32, case, 5)
    y = F.gelu(args["x"].double()).float()  # torch's fp32 gelu of infinity is NaN; the truth decides
    assert rule(GELU32, case, args, y).passed
    assert not rule(GELU32, case, args, torch.nan_to_num(y, nan=0.0)).passed
    assert not rule(GELU32, case, args, torch.where(torch.isinf(y), torch.nan, y)).passed


def test_overflow_may_round_to_the_largest_number_or_infinity() -> None:
    case = Case({"M": 4, "K": 4, "N": 4}, draw=Normal(1e20, 1.0))
    args = draw(MATMUL, case, 1)
    table = ((float("inf"), True), (torch.finfo(torch.float32).max, True), (-float("inf"), False), (1.0, False))
    for fill, right in table:
        assert rule(MATMUL, case, args, torch.full((4, 4), fill)).passed is right


def test_empty_and_scalar() -> None:
    case = Case({"N": 0, "M": 3})
    args = draw(GELU32, case, 1)
    assert rule(GELU32, case, args, torch.empty(0, 3)).passed
    assert judge.is_trivial(GELU32, case, args)
    assert rule(TOTAL, Case({"N": 0}), draw(TOTAL, Case({"N": 0}), 1), torch.tensor(0.0)).passed


def test_structure() -> None:
    case = Case({"N": 33})
    args = draw(HALVES, case, 1)
    x = args["x"]
    good = answer(x / 3, x * 3, args=args)
    table = {
        "swapped": answer(x * 3, x / 3, args=args),
        "dtype": answer((x / 3).double(), x * 3, args=args),
        "shape": answer((x / 3)[None], x * 3, args=args),
        "one tensor": answer(x / 3, args=args),
        "three": answer(x / 3, x * 3, x, args=args),
        "view of the input": replace(good, shares=("x", None)),
        "mutated input": answer(x / 3, x * 3, args=args, x=x + 1),
        "lost argument": replace(good, after={}),
    }
    assert judge.judge(HALVES, case, args, [good]).passed
    for name, bad in table.items():
        ruling = judge.judge(HALVES, case, args, [bad])
        assert not ruling.passed and ruling.reason, name


def test_written_tensors() -> None:
    case = Case({"N": 33})
    args = draw(SCALE, case, 1)
    y = args["x"] * args["y"]
    good = replace(answer(y, args=args, x=y), aliases=("x",), shares=("x",))
    assert judge.judge(SCALE, case, args, [good]).passed
    for bad in (
        replace(good, aliases=(None,), shares=(None,)),
        replace(good, after={**good.after, "x": args["x"]}),
        replace(good, after={**good.after, "x": y + 1e-3}),
        replace(good, after={**good.after, "y": y}),
    ):
        assert not judge.judge(SCALE, case, args, [bad]).passed
    canaries_fail(SCALE, case, args)


def test_out_must_be_returned() -> None:
    def sine(x, *, out=None):
        return torch.sin(x, out=out)

    t = make(sine, {"x": T("N")}, Close())
    case = Case({"N": 9}, out=True)
    args = draw(t, case, 1)
    fresh = answer(args["x"].sin(), args=args)
    assert not judge.judge(t, case, args, [fresh]).passed
    assert judge.judge(t, case, args, [replace(fresh, aliases=("out",), shares=("out",))]).passed
    assert not judge.judge(t, Case({"N": 9}), args, [replace(fresh, shares=("x",))]).passed
    empty = Case({"N": 0}, out=True)
    args = draw(t, empty, 1)
    fresh = answer(args["x"].sin(), args=args)
    assert "itself" in judge.judge(t, empty, args, [fresh]).reason, "also where nothing is in it"
    assert judge.judge(t, empty, args, [replace(fresh, aliases=("out",))]).passed


def test_exact_and_paper() -> None:
    def rank(x):
        return x.argsort()

    t = make(rank, {"x": T("N")}, Exact())
    case = Case({"N": 257})
    args = draw(t, case, 1)
    right = args["x"].argsort()
    for grading in ("contract", "paper"):
        assert rule(t, case, args, right, grading=grading).passed
        for bad in (right + 1, right.flip(0), right.float(), right.int(), torch.zeros_like(right)):
            assert not rule(t, case, args, bad, grading=grading).passed
    gelu_case = Case({"N": 8, "M": 8})
    args = draw(GELU16, gelu_case, 1)
    y = F.gelu(args["x"])
    assert rule(GELU16, gelu_case, args, y + 0.004, grading="paper").passed
    assert not rule(GELU16, gelu_case, args, y + 0.02, grading="paper").passed


def test_reasons_leak_no_values() -> None:
    case = Case({"N": 1, "M": 3})
    args = draw(GELU32, case, 1)
    reason = rule(GELU32, case, args, torch.full((1, 3), 1e4)).reason
    assert not any(f"{abs(float(v)):.3f}"[:5] in reason for v in args["x"].flatten())


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 300), st.integers(0, 2**62), st.floats(1e-6, 1e6))
def test_random_orders_pass(m: int, n: int, k: int, seed: int, scale: float) -> None:
    case = Case({"M": m, "K": k, "N": n}, draw=Normal(0.0, scale))
    args = draw(MATMUL, case, seed)
    perm = torch.randperm(k, generator=torch.Generator().manual_seed(seed))
    assert rule(MATMUL, case, args, args["a"][:, perm] @ args["b"][perm]).passed
    assert rule(MATMUL, case, args, sequential(args["a"], args["b"])).passed


def bf16_product(a, b):
    return a @ b


# Forty seeds; the default tier runs the first ten.
@pytest.mark.parametrize("seeds", [range(k, k + 10) for k in range(0, 40, 10)])
def test_no_seed_rejects_a_fair_bf16_product(seeds: range) -> None:
    # Elements that cancel to nearly zero are uncertain by far more than one bf16 step of themselves. About one in
    # a million does so within fp32's own noise: only many seeds find it.
    truth = Close(ulps=1.0, k=1.5, scale="element")
    t = make(bf16_product, {"a": T("M K", "bf16"), "b": T("K N", "bf16")}, truth, "2 * M * N * K")
    case = Case({"M": 256, "K": 256, "N": 256})
    for seed in seeds:
        args = draw(t, case, seed)
        a, b = args["a"].float(), args["b"].float()
        for step in (4, 32):
            parts = zip(a.split(step, 1), b.split(step, 0), strict=True)
            ruling = rule(t, case, args, sum(x @ y for x, y in parts).to(torch.bfloat16))
            assert ruling.passed, (seed, step, ruling.reason)
        assert not rule(t, case, args, (a @ b * 1.01).to(torch.bfloat16)).passed


def test_the_published_table_goes_by_dtype() -> None:
    task = load_task("matrixmultiply/matmul")
    half = next(c for c in task.cases if c.dtypes)
    full = task.cases[0]
    for case, error, right in ((half, 3e-3, True), (half, 2e-2, False), (full, 3e-3, False), (full, 1e-7, True)):
        args = inputs.draw(task, case, 1)
        y = reference.expect(task, case, args).native[0]
        found = rule(task, case, args, (y.to(torch.float64) * (1 + error)).to(y.dtype), grading="paper")
        assert found.passed == right, (case.label(), error, found)


def _eliminated(a: list[list[Fraction | float]]) -> torch.Tensor:
    """The inverse by Gauss-Jordan with row swaps, in the arithmetic of the elements."""
    n = len(a)
    rows = [[*r, *(type(r[0])(i == j) for j in range(n))] for i, r in enumerate(a)]
    for k in range(n):
        p = max(range(k, n), key=lambda i: abs(rows[i][k]))
        rows[k], rows[p] = rows[p], rows[k]
        rows[k] = [x / rows[k][k] for x in rows[k]]
        for i in range(n):
            if i != k:
                f = rows[i][k]
                rows[i] = [x - f * y for x, y in zip(rows[i], rows[k], strict=True)]
    return torch.tensor([[float(x) for x in r[n:]] for r in rows], dtype=torch.float64)


def test_the_truth_of_an_fp64_inverse_is_nearer_than_torch() -> None:
    task = load_task("linearalgebra/invert_matrix_lu")
    case = next(c for c in task.cases if c.label() == "*batch=(2, 2) n=16 A:f64")
    eps = torch.finfo(torch.float64).eps
    apart = 0.0
    for seed in range(8):
        a = inputs.draw(task, case, seed)["A"]
        args = {"A": a}
        expected = reference.expect(task, case, args)
        truth, torchs = expected.outputs[0], expected.native[0]
        exact = _eliminated([[Fraction(x) for x in r] for r in a[0, 0].tolist()])
        assert float((truth[0, 0] - exact).abs().max()) <= 0.5 * eps * float(exact.abs().max())
        mine = torch.stack([_eliminated(m.tolist()) for m in a.flatten(0, 1)]).view_as(a)
        apart = max(apart, float((torchs - truth).abs().max()) / eps / 0.25)
        assert rule(task, case, args, mine).passed and rule(task, case, args, torchs).passed
        assert not rule(task, case, args, mine * (1 + 2.0**-42)).passed
        assert not rule(task, case, args, mine.float().double()).passed
    assert apart > 8.0  # half of the tolerance, were it taken for the truth


def test_a_fair_inverse_that_the_unrefined_truth_rejected(grader) -> None:
    """1.1 times the tolerance from LAPACK's, which was the truth."""
    task = "linearalgebra/invert_matrix_lu"
    assert grader.grade(task, expert_source(task), backend="cpu", targets=(), seed=1013).correct


def _jacobi(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return eigenvalues and eigenvectors by plain cyclic rotations."""
    a, q, n = matrix.copy(), np.eye(len(matrix)), len(matrix)
    for _ in range(12):
        for i in range(n - 1):
            for j in range(i + 1, n):
                if abs(a[i, j]) > 1e-300:
                    half = 0.5 * math.atan2(2 * a[i, j], a[j, j] - a[i, i])
                    turn = np.array([[math.cos(half), math.sin(half)], [-math.sin(half), math.cos(half)]])
                    a[:, [i, j]] = a[:, [i, j]] @ turn
                    a[[i, j]] = turn.T @ a[[i, j]]
                    q[:, [i, j]] = q[:, [i, j]] @ turn
    return np.diag(a).copy(), q


@pytest.mark.parametrize("how, seeds", [("multiplied out", 60), ("jacobi", 8)])
def test_no_seed_rejects_a_power_of_another_right_algorithm(how: str, seeds: int) -> None:
    """A case with k = 20 refused one in fifty, and our expert in one of 36 gradings: the fp64 answer it was compared with had an
    error of the same size."""
    task = load_task("linearalgebra/matrix_power_eig")
    cases = [c for c in task.cases if "f64" in c.dtypes.values() and float(c.args["k"]).is_integer()]
    assert len(cases) >= 4
    for case in cases:
        for seed in range(seeds):
            args = inputs.draw(task, case, seed)
            k, base = int(case.args["k"]), args["A"]
            if how == "multiplied out":
                power = torch.linalg.matrix_power(torch.linalg.inv(base) if k < 0 else base, abs(k))
            else:
                found = [_jacobi(a.numpy()) for a in base.reshape(-1, *base.shape[-2:])]
                power = torch.stack([torch.from_numpy((q * w**k) @ q.T) for w, q in found]).reshape(base.shape)
            assert rule(task, case, args, power).passed, (case.label(), seed)
            assert not rule(task, case, args, power.to(torch.float32).to(torch.float64) * (1 + 1e-7)).passed


def test_sixteen_bits_have_two_units_whatever_the_task_says() -> None:
    t = make(matmul, {"a": T("M K"), "b": T("K N")}, Close(ulps=16), "2 * M * N * K")
    case = Case({"M": 60, "K": 160, "N": 72}, dtypes={"a": "f16", "b": "f16"})
    args = draw(t, case, 1)
    a, b = args["a"], args["b"]
    assert rule(t, case, args, (a.float() @ b.float()).half()).passed
    assert not rule(t, case, args, (a.bfloat16().float() @ b.bfloat16().float()).half()).passed


def test_results_may_have_tolerances_of_their_own() -> None:
    t = make(halves, {"x": T("N")}, Close(of=(4, 4096)))
    case = Case({"N": 100})
    args = draw(t, case, 1)
    x = args["x"]
    assert rule(t, case, args, x / 3, x * 3 * (1 + 1e-4)).passed
    assert not rule(t, case, args, x / 3 * (1 + 1e-4), x * 3).passed


def test_chance_does_not_make_an_element_of_a_product_look_calm() -> None:
    """Of 7 x 10**7 elements one was 1.07 times off on an H200: its eight draws of noise happened to be small."""
    draw = torch.Generator().manual_seed(5)
    noise = 1.0 + torch.arange(512).reshape(512, 1) / 512  # rows of different size
    squares = torch.zeros(512, 2048, dtype=torch.float64)
    for _ in range(reference.DRAWS):
        squares += (noise * torch.randn(512, 2048, generator=draw, dtype=torch.float64)).square()
    moved = (squares / reference.DRAWS).sqrt()
    assert float((moved / noise).min()) < 0.2
    mended = close.without_luck(moved)
    assert float((mended / noise).min()) > 0.3
    # What is calm by itself stays calm: no draw is off by more than chance can be.
    moved[3, 7] = 1e-6
    assert float(close.without_luck(moved)[3, 7]) <= close.LUCK * 1e-6
    assert torch.equal(close.without_luck(moved[0]), moved[0])


def product(x, y):
    return x * y


COMPLEX = make(product, {"x": T("N", "c64"), "y": T("N", "c64")}, Close(ulps=2, scale="element"), "6 * numel(x)")


def _parts(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Multiply as a kernel does that rounds every product."""
    return torch.complex(x.real * y.real - x.imag * y.imag, x.real * y.imag + x.imag * y.real)


def test_a_part_of_a_complex_product_may_cancel() -> None:
    # The measured noise of one element in many is small by chance, and the worst rounding errors may fall on it.
    n, rng = 1 << 17, torch.Generator().manual_seed(3)
    case = Case({"N": n})
    x, y, turned = (torch.randn(n, dtype=torch.complex64, generator=rng) for _ in range(3))
    near = 1 + torch.view_as_complex(torch.rand(n, 2, generator=rng))
    cancelling = torch.complex(near.imag, near.real * (1 + 1e-4 * turned.real))
    args = {"x": near, "y": cancelling}
    expected = reference.expect(COMPLEX, case, args)
    terms = near.real * cancelling.real
    noise = reference.Perturbations(COMPLEX, case, args, expected).root_mean_square(reference.DRAWS)[0][0][:, 0] / terms
    errors = (_parts(near, cancelling).real - expected.outputs[0].real).abs() / terms
    quiet, worst = int(noise.argmin()), int(errors.argmax())
    x[quiet], y[quiet] = near[worst], cancelling[worst]
    args = {"x": x, "y": y}
    result = _parts(x, y)
    assert rule(COMPLEX, case, args, result).passed
    assert not rule(COMPLEX, case, args, torch.complex(torch.zeros(n), result.imag)).passed
    half = torch.complex((x.real.half() * y.real.half()).float() - x.imag * y.imag, result.imag)
    assert not rule(COMPLEX, case, args, half).passed


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(("tensor", "element")), st.sampled_from((torch.float32, torch.float16, torch.bfloat16, torch.float64)),
    st.integers(0, 40), st.integers(0, 2**31), st.floats(0, 3), st.booleans(),
)  # fmt: skip
def test_pieces_find_what_the_whole_finds(scale: str, dtype, n: int, seed: int, error: float, sized: bool) -> None:
    # A result is compared piece by piece first. That must not depend on where the pieces end.
    g = torch.Generator().manual_seed(seed)
    exact = torch.randn(n, 3, dtype=torch.float64, generator=g) * 10.0 ** float(torch.randint(-3, 4, (1,), generator=g))
    native = exact.to(dtype)
    size = exact.abs().amax(1, keepdim=True) if sized and n else None
    off = torch.randn(n, 3, dtype=torch.float64, generator=g) * error * torch.finfo(dtype).eps
    got = (exact * (1 + off)).to(dtype)
    if n > 5:
        got[2, 1], exact[4, 0] = float("nan"), float("inf") if seed % 2 else exact[4, 0]
        native[4, 0] = exact[4, 0].to(dtype)
        got[4, 0] = native[4, 0]
        if seed % 3:
            got[2, 1] = native[2, 1]
    truth = Close(scale=scale)
    old = close.PIECE
    close.PIECE = 7
    try:
        whole = not bool(close.misses(truth, got, exact, native, size=size)[1].any())
        assert close.all_close(truth, got, exact, native, size) == whole
    finally:
        close.PIECE = old


def _one_element_is_seen(device: str, n: int) -> None:
    """Spoil one element after the other of a right answer whose errors are all smaller than the smallest tolerance."""
    exact = torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(n)).to(device)
    got, truth = exact.to(torch.float32), Close(ulps=16.0)
    limits = close.declared_tolerance(truth, torch.float32, exact)
    rms = float(exact.square().mean().sqrt())
    assert close._all_within(got, exact, limits, None)
    for at in (0, n // 2, n - 1):
        right = float(exact[at])
        step = 16 * torch.finfo(torch.float32).eps * max(abs(right), rms)
        for value, passes in ((right + 0.9 * step, True), (right - 1.1 * step, False), (math.nan, False), (math.inf, False),
                              (-math.inf, False)):  # fmt: skip
            spoilt = got.clone()
            spoilt[at] = value
            assert close._all_within(spoilt, exact, limits, None) is passes, (n, at, value)
            assert close.all_close(truth, spoilt, exact, got, tolerance=limits) is passes, (n, at, value)


@pytest.mark.parametrize("n", [1, 2, 33, 1000, 70_001])
def test_one_wrong_element_is_seen(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(close, "PIECE", 1 << 15)
    _one_element_is_seen("cpu", n)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [33, 70_001, 5_000_001])
def test_one_wrong_element_is_seen_on_a_gpu(n: int) -> None:
    _one_element_is_seen("cuda", n)


@pytest.mark.parametrize("largest", [1e200, 1e307, 1.7e308])
def test_huge_numbers_have_a_tolerance_too(largest: float) -> None:
    """The root-mean-square of numbers above 1e154 was infinite, and then any number was right."""
    exact = torch.linspace(0.5, 1.0, 8, dtype=torch.float64) * largest
    truth = Close(ulps=16.0)
    assert close.all_close(truth, exact.clone(), exact, exact)
    for wrong in (0.0, exact[3] * (1 + 1e-12), -exact[3], math.inf, math.nan):
        got = exact.clone()
        got[3] = wrong
        assert not close.all_close(truth, got, exact, exact), wrong


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 2, 3, 10, 1001])
def test_a_gpu_finds_the_median_that_the_host_finds(n: int) -> None:
    for zeros in {0, 1, n // 2, n - 1, n}:
        sizes = torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) + 0.1
        sizes[torch.randperm(n)[:zeros]] = 0.0
        assert float(close._median_above_zero(sizes.cuda())) == float(close._median_above_zero(sizes))


class _Kernels(TorchDispatchMode):
    """Counts operations that compute."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype, most", [(torch.float32, 2.2), (torch.bfloat16, 6.2)])
def test_a_right_result_is_compared_in_few_kernels(dtype: torch.dtype, most: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those who judge share a GPU, and each kernel of one keeps the others waiting."""
    exact = torch.randn(4096, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    limits = close.declared_tolerance(Close(ulps=16.0), dtype, exact)
    monkeypatch.setattr(close, "PIECE", 64)
    with _Kernels() as kernels:
        assert close._all_within(exact.to(dtype), exact, limits, None)
    assert kernels.count <= most * 64


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 200), st.integers(0, 2**31), st.sampled_from((1.0, 20.0, 1e6)), st.sampled_from((0.0, math.inf, math.nan)))
def test_the_scale_of_a_tensor_counts_no_element_with_more_than_16_medians(n: int, seed: int, peak: float, odd: float) -> None:
    exact = torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    exact[0] *= peak
    exact[-1] = exact[-1] if odd == 0.0 else odd
    finite = torch.where(torch.isfinite(exact), exact.abs(), 0.0)
    cap = 16.0 * float(finite[finite > 0].median()) if bool((finite > 0).any()) else 0.0
    scale = close._Scale.of("tensor", exact)
    assert scale.least == pytest.approx(float(finite.clamp_max(cap).square().mean().sqrt()), rel=1e-12)
    assert scale.finite == bool(torch.isfinite(exact).all())
    assert torch.equal(scale.magnitude(exact, None), finite.clamp_min(scale.least))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 50), st.integers(0, 2**31), st.sampled_from((0.0, math.inf, math.nan)))
def test_a_tolerance_follows_torchs_largest_finite_error(n: int, seed: int, odd: float) -> None:
    g = torch.Generator().manual_seed(seed)
    exact = torch.randn(n, dtype=torch.float64, generator=g)
    native = (exact * (1 + 1e-5 * torch.randn(n, dtype=torch.float64, generator=g))).to(torch.float32)
    native[-1] = native[-1] if odd == 0.0 else odd
    scale = close._Scale.of("tensor", exact)
    errors = (native.to(torch.float64) - exact).abs() / scale.units(exact, torch.float32, None)
    largest = float(torch.where(torch.isfinite(errors), errors, 0.0).max())
    assert close._strict(Close(ulps=4, k=4), torch.float32, native, exact, scale, None) == max(4.0, 4 * largest)


@pytest.mark.parametrize("name", ["activation/gelu", "math/softmax", "matrixmultiply/addmm", "linearalgebra/solve", "reduce/std"])
def test_what_a_sample_shows_to_be_wrong_is_refused_and_a_right_answer_never(name: str) -> None:
    task, told = load_task(name), 0
    for case in task.cases[:6]:
        args = draw(task, case, 3)
        expected = reference.expect(task, case, args, "cpu")
        measured = close.Measured()
        right = answer(*expected.native, args=args)
        assert not close.plainly_wrong(task.truth, task, case, args, expected, right, measured)
        for found in judge.canaries(task, case, args, expected).values():
            if close.plainly_wrong(task.truth, task, case, args, expected, found, measured):
                told += 1
                assert not close.rule(task.truth, task, case, args, expected, found).passed
    assert told >= 6, "most answers without a computation are far off"


def test_noise_in_place_of_zeros_sets_no_scale() -> None:
    g = torch.Generator().manual_seed(7)

    def eye(x):
        return torch.eye(64, dtype=x.dtype) + 1e-16 * torch.rand(64, 64, generator=g, dtype=torch.float64).to(x.dtype)

    task, case = make(eye, {"x": T("N")}, Close(k=4.0), "N"), Case({"N": 64})
    args = draw(task, case, 1)
    right = torch.eye(64) + 1e-8 * torch.rand(64, 64, generator=g)
    expected = reference.expect(task, case, args, "cpu")
    # Torch's own error of 1e-8 is 1e8 times the noise: without a limit each diagonal element may be off by all of its size.
    expected = replace(expected, native=(right,))
    wrong = torch.eye(64) * 1.5
    assert not close.misses(Close(k=4.0), right.diagonal(), expected.outputs[0].diagonal(), right.diagonal())[1].any()
    assert close.misses(Close(k=4.0), wrong, expected.outputs[0], right)[1].diagonal().all()


@pytest.mark.parametrize("name", ["activation/gelu", "math/softmax", "matrixmultiply/addmm", "optimizer/Adam"])
def test_rulings_that_share_what_was_measured_are_the_same(name: str, monkeypatch) -> None:
    found = [t for t in load_tasks(pattern=name + "*") if isinstance(t.truth, Close)]
    task = found[0]
    case = next(c for c in task.cases if c.elements() > 100 and not c.out)
    args = inputs.draw(task, case, 3)
    expected = reference.expect(task, case, args)
    answers = judge.canaries(task, case, args, expected)
    right = next(iter(answers.values()))
    nearly = [o * (1 + 40 * torch.finfo(o.dtype).eps) if o.is_floating_point() else o for o in expected.native]
    answers |= {"right": replace(right, outputs=expected.native), "nearly": replace(right, outputs=tuple(nearly))}
    draws, real = [], reference.Perturbations.root_mean_square
    monkeypatch.setattr(
        reference.Perturbations, "root_mean_square", lambda self, number: (draws.append(number), real(self, number))[1]
    )
    known = judge.Known(measured=close.Measured())
    for label, one in answers.items():
        shared = judge.judge(task, case, args, [one], known=known)
        count = len(draws)
        assert judge.judge(task, case, args, [one]) == shared, label
        del draws[count:]
    assert len(draws) == len(set(draws)) > 0, "each number of draws is made once"
    draws.clear()
    assert not judge.is_trivial(task, case, args) and len(draws) == len(set(draws))


def dots(a, b):
    return (a * b).sum(-1), (a * b).sum(-1)


def test_a_second_result_may_need_fewer_perturbations_than_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several results each begins with one perturbation, whatever the result before it has needed."""
    task = make(dots, {"a": T("M K"), "b": T("M K")}, Close(k=0, ulps=1), "2 * M * K")
    case = Case({"M": 200, "K": 64})
    args = draw(task, case, 1)
    terms = args["a"].double() * args["b"].double()
    exact, typical = terms.sum(-1), terms.square().sum(-1).sqrt()
    needed, real = [], reference.Perturbations.root_mean_square
    monkeypatch.setattr(reference.Perturbations, "root_mean_square", lambda self, n: (needed.append(n), real(self, n))[1])
    passed = set()
    for factor in range(90, 140, 2):
        got = (exact + factor / 10 * torch.finfo(torch.float32).eps * typical).float()
        needed.clear()
        passed.add((rule(task, case, args, got, got.clone()).passed, *needed))
    assert (True, 1, 8) in passed, "or the first result never needs more than the second begins with"


def test_a_perturbation_that_fails_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU may have no memory for one of them. It was in the sums half, and the next measurement went on from there."""
    task = load_task("math/softmax")
    case = next(c for c in task.cases if c.elements() > 20 and not c.out)
    args = inputs.draw(task, case, 3)
    expected = reference.expect(task, case, args)
    begin = partial(reference.Perturbations, task, case, args, expected)
    wanted, measured, real = close.Measured().moved(8, begin, False), close.Measured(), reference._add_square
    calls = iter(range(99))

    def add(*parts: torch.Tensor) -> None:
        real(*parts)
        if next(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(reference, "_add_square", add)
    with pytest.raises(torch.OutOfMemoryError):
        measured.moved(8, begin, False)
    assert all(torch.equal(a, b) for a, b in zip(measured.moved(8, begin, False), wanted, strict=True))


@pytest.mark.parametrize("name", ["math/softmax", "matrixmultiply/addmm", "math/fftn", "normalization/batch_norm"])
def test_more_perturbations_build_on_those_before(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A product of 16-bit matrices at its timed size spent 1.3 s on calls with noise, one of nine made twice."""
    task = load_task(name)
    case = next(c for c in task.cases if c.elements() > 20 and not c.out)
    args = inputs.draw(task, case, 3)
    expected = reference.expect(task, case, args)
    at_once = reference.Perturbations(task, case, args, expected).root_mean_square(8)
    calls, real = [], reference._run
    monkeypatch.setattr(reference, "_run", lambda *a, **k: (calls.append(1), real(*a, **k))[1])
    stepwise = reference.Perturbations(task, case, args, expected)
    few = stepwise.root_mean_square(1)
    many = stepwise.root_mean_square(8)
    assert len(calls) == 8
    for at, then in zip((*at_once[0], *at_once[1].values()), (*many[0], *many[1].values()), strict=True):
        assert torch.equal(at, then)
    assert any(not torch.equal(a, b) for a, b in zip(few[0], many[0], strict=True))


def solve(A, B):
    return torch.linalg.solve(A, B)


SOLVE = make(solve, {"A": T("n n"), "B": T("n k")}, Close(path="2 * n ** 2 / 3 + 2 * n"), "2 * n ** 3 / 3 + 2 * n ** 2 * k")


def test_more_right_hand_sides_share_a_factorisation_and_no_errors() -> None:
    def grown(task: Task, k: int, dtype: str = "f32") -> float:
        case = Case({"n": 40, "k": k}, dtypes={"A": dtype, "B": dtype})
        return close.growth(task.truth, task, case, reference.expect(task, case, draw(task, case, 1)))

    assert grown(SOLVE, 1) == grown(SOLVE, 40) > 30
    assert grown(replace(SOLVE, truth=Close()), 40) < grown(SOLVE, 40) / 2
    assert grown(SOLVE, 40, "c64") > 1.4 * grown(SOLVE, 40)


def test_an_elu_as_its_contract_writes_it_is_right_where_most_sums_are_small() -> None:
    """One grading in 60 refused it: half of the results were so small that a unit of 1 was many of their tolerances."""
    task = load_task("fusion/fused_elu_linear")
    case = Case({"B": 4, "K": 1, "O": 9}, {"alpha": 0.5, "bias": None}, draw=Normal())
    args = draw(task, case, 1)
    args["input"] = torch.tensor([[1e-4], [-2e-4], [1.0], [1.5e-4]])
    z = F.linear(args["input"], args["weight"])
    by_exp = torch.where(z > 0, z, 0.5 * (torch.exp(z) - 1))
    assert rule(task, case, args, by_exp).passed
    assert not rule(task, case, args, torch.where(z > 0, z, 0.5 * z)).passed, "a line instead of the curve"
    assert not rule(task, case, args, torch.where(z.abs() < 1e-3, 0.0, by_exp)).passed, "zeros for small results"


def test_the_error_of_another_right_algorithm_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    rival = make(total, {"x": T("N")}, Close(rival=lambda x: x.sum() * (1 + 1e-5)), "numel(x)")
    case, asked = Case({"N": 100}, draw=Uniform(1, 2)), list[str]()
    args = draw(rival, case, 1)
    own, by_rival = args["x"].sum(), reference.by_rival
    monkeypatch.setattr(reference, "by_rival", lambda *a: asked.append("rival") or by_rival(*a))
    assert rule(rival, case, args, own).passed and not asked
    assert rule(rival, case, args, own * (1 + 3e-5)).passed and asked
    assert not rule(rival, case, args, own * (1 + 6e-5)).passed
    assert not rule(TOTAL, case, args, own * (1 + 3e-5)).passed
    # Where the rival fails, as on a zero pivot, torch's own error counts.
    failing = replace(rival, truth=Close(rival=lambda x: x.sum() * math.nan))
    assert rule(failing, case, args, own).passed and not rule(failing, case, args, own * (1 + 3e-5)).passed


@pytest.mark.parametrize("wrong, draws", [(1.5, [1, 8, 64]), (4.0, [1, 8])])
def test_a_near_miss_is_measured_with_more_draws(wrong: float, draws: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    task = make(matmul, {"a": T("M K"), "b": T("K N")}, Close(k=0, ulps=20), "2 * M * N * K")
    case, seen = Case({"M": 64, "K": 64, "N": 48}), list[int]()
    args = draw(task, case, 1)
    exact = args["a"].double() @ args["b"].double()
    rms = exact.square().mean().sqrt()

    def unlucky(perturbations: reference.Perturbations, draws: int) -> object:
        seen.append(draws)
        return [torch.full_like(exact, 4 * float(rms) if draws == close.MANY else 0.0, dtype=torch.float64)], {}

    monkeypatch.setattr(reference.Perturbations, "root_mean_square", unlucky)
    got = (args["a"] @ args["b"]).clone()
    at = divmod(int(exact.abs().argmin()), 48)
    got[at] = exact[at] + wrong * 20 * torch.finfo(torch.float32).eps * rms
    assert rule(task, case, args, got).passed == (draws[-1] == close.MANY)
    assert seen == draws


def test_an_ldl_factorisation_is_accurate_enough_for_the_task_that_names_it() -> None:
    # LAPACK's own solution by LDL^T was refused on these draws: its elements grow, and both parts of complex products round. By how
    # much depends on the processor, so that each machine refuses some of them.
    task, refused = load_task("linearalgebra/solve_symmetric_ldl"), 0
    case = next(c for c in task.cases if c.axes["n"] == 16 and c.axes["*batch"] == (2,))
    for seed in (477, 893, 3595):
        args = draw(task, case, seed)
        x = torch.linalg.ldl_solve(*torch.linalg.ldl_factor(args["A"]), args["b"])
        assert rule(task, case, args, x).passed
        refused += not rule(replace(task, truth=Close(ulps=16)), case, args, x).passed
        assert not rule(task, case, args, torch.linalg.solve(args["A"].to(torch.complex64), args["b"] * (1 + 2e-4))).passed
    assert refused


def _log_softmax_in_fp32(z: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(z, -1).to(torch.float64)


@pytest.mark.parametrize("seed", range(20))
def test_fp64_results_need_the_accuracy_of_the_arithmetic_only_where_the_contract_says_so(seed: int) -> None:
    # The products are so tiny that torch's own fp64 results are nearly exact; an fp32 kernel was refused for its honest error.
    task = load_task("fusion/fused_log_softmax_linear")
    axes, draws = {"B": 5, "K": 6, "O": 7}, {"input": TINY, "weight": LARGE, "bias": TINY}
    case = Case(axes, {"dtype": DtypeArg("f64")}, draws=draws, given=("bias",))
    args = inputs.draw(task, case, seed)
    honest = _log_softmax_in_fp32(F.linear(args["input"], args["weight"], args["bias"]))
    strict = replace(task, truth=Close(ulps=16))
    assert judge.judge(task, case, args, [answer(honest, args=args)]).passed
    assert not judge.judge(strict, case, args, [answer(honest, args=args)]).passed
    for wrong in (honest * (1 + 1e-5), _log_softmax_in_fp32(F.linear(args["input"], args["weight"]))):
        assert not judge.judge(task, case, args, [answer(wrong, args=args)]).passed


def test_a_look_up_in_a_large_table_is_no_sum() -> None:
    case = Case({"N": 1 << 17})

    def blocks(task: Task) -> float:
        return close._blocks_of_sum(task.truth, task, case, reference.expect(task, case, draw(task, case, 1)))

    assert blocks(make(lambda x: x[7].tanh(), {"x": T("N")}, Close(), "1")) == 0
    assert blocks(make(total, {"x": T("N")}, Close(), "numel(x)")) == (1 << 17) / 256
