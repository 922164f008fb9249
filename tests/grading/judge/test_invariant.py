"""Factorisations, fractional windows, binomials and masks behind a normalisation: honest and dishonest answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from judge_helper import answer

from kbx_env.grading import inputs, judge, reference
from kbx_env.grading.judge import windows
from kbx_env.spec.catalog import load_task
from kbx_env.spec.task import Case, Task


def _ruling(task: Task, case: Case, args: dict[str, Any], change: Callable[..., Any]) -> judge.Ruling:
    native = reference.expect(task, case, args).native
    return judge.judge(task, case, args, [answer(*change(*(o.clone() for o in native)), args=args)])


def _square(name: str, law: str = "Normal") -> tuple[Task, Case, dict[str, Any]]:
    task = load_task(name)
    case = next(c for c in task.cases if not c.out and not c.layouts and not c.held and _large(c))
    return task, case, inputs.draw(task, case, 5)


def _large(case: Case) -> bool:
    return min(int(v) for v in case.axes.values() if not isinstance(v, tuple)) >= 5


FACTORS = [
    ("linearalgebra/qr", lambda q, r: (-q, -r), True),
    ("linearalgebra/qr", lambda q, r: (q.to(torch.bfloat16).to(q.dtype), r), False),
    ("linearalgebra/qr", lambda q, r: (q, r + 1e-4), False),
    ("linearalgebra/qr", lambda q, r: (q * 2, r / 2), False),
    ("linearalgebra/lu", lambda p, low, up: (p, low, up), True),
    ("linearalgebra/lu", lambda p, low, up: (p.flip(-1), low, up), False),
    ("linearalgebra/lu", lambda p, low, up: (p, low * 2, up / 2), False),
    ("linearalgebra/lu", lambda p, low, up: (p, low, up * 1.001), False),
    ("linearalgebra/eig", lambda w, v: (w.flip(-1), v.flip(-1)), True),
    ("linearalgebra/eig", lambda w, v: (w, v * 1j), True),
    ("linearalgebra/eig", lambda w, v: (w[..., :1].expand_as(w), v[..., :1].expand_as(v)), False),
    ("linearalgebra/eig", lambda w, v: (w, v * 2), False),
    ("linearalgebra/eig", lambda w, v: (w * 1.001, v), False),
    ("linearalgebra/ldl_factor", lambda ld, p: (ld.tril(), p), True),
    ("linearalgebra/ldl_factor", lambda ld, p: (ld * 1.001, p), False),
    ("linearalgebra/ldl_factor", lambda ld, p: (ld, p * 0 - 7), False),
    ("linearalgebra/ldl_factor", lambda ld, p: (ld, p * 0 + 1000), False),
]


@pytest.mark.parametrize(("name", "change", "right"), FACTORS)
def test_factors(name: str, change: Any, right: bool) -> None:
    task, case, args = _square(name)
    found = _ruling(task, case, args, change)
    assert found.passed == right, found


def test_complex_parts_are_judged_each() -> None:
    task = load_task("math/mul")
    case = next(c for c in task.cases if c.dtypes.get("input") == "c64")
    args = inputs.draw(task, case, 3)
    assert _ruling(task, case, args, lambda y: (y,)).passed
    assert not _ruling(task, case, args, lambda y: (y.conj().resolve_conj(),)).passed
    assert not _ruling(
        task, case, args, lambda y: (torch.complex(y.real, y.imag.to(torch.float16).to(torch.float32)),)
    ).passed


def test_sequences_of_windows_are_those_of_some_number() -> None:
    found, shares = windows.sequences(17, 6, 3)
    assert sum(shares) == pytest.approx(1.0) and len(set(found)) == len(found) > 3
    a = (17 - 3) / 5
    for u in torch.rand(500, dtype=torch.float64).tolist():
        starts = tuple(int((i + u) * a) - int(u * a) for i in range(5)) + (14,)
        assert starts in found


def test_windows() -> None:
    task = load_task("fusion/fused_fractional_max_pool2d_with_relu")
    case = next(c for c in task.cases if c.axes["C"] == 40 and c.args.get("return_indices"))
    args = inputs.draw(task, case, 3)

    def call(seed: int) -> judge.Answer:
        torch.manual_seed(seed)
        return answer(*task.reference(**args), args=args, is_tuple=True)

    assert judge.judge(task, case, args, [call(1), call(2)]).passed
    assert "same windows" in judge.judge(task, case, args, [call(1), call(1)]).reason
    y, at = task.reference(**args)
    wrong = answer(y, at * 0, args=args, is_tuple=True)
    assert "positions" in judge.judge(task, case, args, [wrong, call(2)]).reason
    wrong = answer(y + 1e-3, at, args=args, is_tuple=True)
    assert "fit no sequence" in judge.judge(task, case, args, [wrong, call(2)]).reason
    # One sequence for all planes: each is fair, together they are not drawn.
    plain = torch.nn.functional.max_pool2d(args["input"].clamp_min(0), 2)
    assert not judge.judge(task, case, args, [answer(plain, plain.long(), args=args, is_tuple=True)] * 2).passed


def _pool_in_fp32(x: torch.Tensor, count: tuple[int, int], kernel: int, u: torch.Tensor) -> torch.Tensor:
    """Pool planes (planes, height, width) as a kernel does that computes starts in fp32; ``u`` is (planes, 2)."""
    elements = []
    for axis, n in enumerate(count):
        a = torch.tensor(float(x.shape[1 + axis] - kernel)) / torch.tensor(float(n - 1))
        of = u[:, axis, None]
        starts = (torch.floor((torch.arange(n, dtype=torch.float32) + of) * a) - torch.floor(of * a)).long()
        starts[:, -1] = x.shape[1 + axis] - kernel
        elements.append((starts[..., None] + torch.arange(kernel)).flatten(1))
    picked = torch.stack([p[r][:, c] for p, r, c in zip(x, *elements, strict=True)])
    return picked.reshape(len(x), count[0], kernel, count[1], kernel).amax((2, 4))


def _rule_on_windows(us: list[list[float]], size: tuple[int, int], count: tuple[int, int]) -> judge.Ruling:
    """Rule on fp32 windows with these random numbers for each plane, of rows and of columns."""
    task = load_task("fusion/fused_fractional_max_pool2d_with_relu")
    args = inputs.draw(
        task, Case({"N": 1, "C": len(us), "H": size[0], "W": size[1]}, {"kernel_size": 2, "output_size": count}), 3
    )
    y = _pool_in_fp32(args["input"][0].clamp_min(0), count, 2, torch.tensor(us))
    return windows.rule(task.truth, args, [answer(y[None], args=args)], timed=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [(4, 1), (1, 4), (4, 3)])
def test_planes_that_several_sequences_explain_are_fair(count: tuple[int, int]) -> None:
    # Windows beside each other share many maxima: of a column of four, two planes in five have several sequences.
    task = load_task("fusion/fused_fractional_max_pool2d_with_relu")
    case = Case({"N": 1, "C": 60, "H": 9, "W": 7}, {"kernel_size": 2, "output_size": count})
    torch.manual_seed(0)
    for seed in range(40):
        args = inputs.draw(task, case, seed)
        assert windows.rule(task.truth, args, [answer(task.reference(**args), args=args) for _ in range(2)]).passed  # type: ignore[arg-type]


def _seem_drawn(rows: torch.Tensor, columns: torch.Tensor) -> str:
    """What the windows of planes with these random numbers have in common, judged in five cases."""
    task = load_task("fusion/fused_fractional_max_pool2d_with_relu")
    case = next(c for c in task.cases if c.axes["C"] == 100)
    x = inputs.draw(task, case, 5)["input"].flatten(0, 1)
    earlier: list[object] = []
    for u in torch.stack([rows, columns], -1).split(len(x)):
        y = _pool_in_fp32(x.clamp_min(0), (11, 11), 3, u)
        args = {"input": x[None], "kernel_size": 3}
        ruling = windows.rule(task.truth, args, [answer(y[None], args=args)], earlier=earlier)  # type: ignore[arg-type]
        if not ruling.passed:
            return ruling.reason
    return ""


def test_numbers_that_are_not_drawn_as_they_should_be() -> None:
    torch.manual_seed(0)
    u = torch.rand(2, 2000)
    assert _seem_drawn(u[0], u[1]) == ""
    assert "drawn" in _seem_drawn(u[0] ** 2, u[1])
    assert "more often" in _seem_drawn(u[0], u[1] ** 1.35), "too little for the windows of one call"
    at = torch.arange(400)
    drawn = torch.rand(5, 3 * 400)
    assert "in steps" in _seem_drawn(drawn[:, 3 * at % 1200].flatten(), drawn[:, 2 * at + 1].flatten())


TALL, NARROW = (4002, 12), (1601, 5)
"""1,601 windows 2.5 elements apart: rounding decides where u is within 0.0004 of a fifth."""


def test_windows_whose_starts_fp32_rounds_either_way_are_right() -> None:
    """On an H200 one of 48 planes of an honest kernel was refused: i + u was rounded to the other side of a whole start."""
    for u in (0.39997, 0.60002, 0.99999997):
        ruling = _rule_on_windows([[u, 0.3]], TALL, NARROW)
        assert ruling.passed, f"{u}: {ruling.reason}"
    assert _rule_on_windows([[0.3, 0.2 - 2e-5]], TALL[::-1], NARROW[::-1]).passed


def test_windows_of_sequences_that_do_not_meet_are_wrong() -> None:
    task = load_task("fusion/fused_fractional_max_pool2d_with_relu")
    args = inputs.draw(task, Case({"N": 1, "C": 1, "H": 30, "W": 30}, {"kernel_size": 2, "output_size": 11}), 3)
    x = args["input"][0].clamp_min(0)
    top, bottom = (_pool_in_fp32(x, (11, 11), 2, torch.tensor([[u, 0.3]])) for u in (0.1, 0.6))
    mixed = torch.cat([top[:, :5], bottom[:, 5:]], 1)
    assert "fit no sequence" in windows.rule(task.truth, args, [answer(mixed[None], args=args)], timed=True).reason  # type: ignore[arg-type]


def test_mixed_windows_are_as_rare_as_rounding_makes_them() -> None:
    for size, count in ((4002, 1601), (32, 13), (30, 11)):
        drawn = torch.rand(4_000, 1, generator=torch.Generator().manual_seed(1))
        a = torch.tensor(float(size - 2)) / torch.tensor(float(count - 1))
        starts = torch.floor((torch.arange(count - 1, dtype=torch.float32) + drawn) * a) - torch.floor(drawn * a)
        known = torch.tensor(windows.sequences(size, count, 2)[0])[:, None, :-1]
        mixed = int((starts.long() != known).any(-1).all(0).sum())
        assert mixed <= 4_000 * sum(b.share for b in windows.boundaries(size, count, 2))
    assert _rule_on_windows([[0.39997, 0.3]] * 2, TALL, NARROW).passed
    assert "fit no sequence" in _rule_on_windows([[0.39997, 0.3]] * 6, TALL, NARROW).reason


def test_binomials() -> None:
    task = load_task("math/bitwise_and_binomial")
    case = task.cases[3]
    args = inputs.draw(task, case, 3)

    def call(change: Any = lambda y: y) -> judge.Answer:
        return answer(change(task.reference(**args)), args=args)

    both = (args["input"] & args["other"]).to(torch.float32)
    mean = torch.round(args["total_count"] * args["probs"]) * both
    assert judge.judge(task, case, args, [call(), call()]).passed
    assert not judge.judge(task, case, args, [answer(mean, args=args)] * 2).passed
    assert not judge.judge(task, case, args, [call(lambda y: y + 0.5), call()]).passed
    same = call()
    assert "correlated" in judge.judge(task, case, args, [same, same]).reason


def test_a_mask_behind_a_normalisation() -> None:
    task = load_task("fusion/fused_transformer_block")
    case = task.cases[1]
    args = inputs.draw(task, case, 3)

    def call(p: float = 0.1, scale: float = 1.0) -> judge.Answer:
        return answer(task.reference(**(args | {"dropout_p": p})) * scale, args=args)

    assert judge.judge(task, case, args, [call(), call()]).passed
    same = call()
    assert "same elements" in judge.judge(task, case, args, [same, same]).reason
    assert not judge.judge(task, case, args, [call(0.0), call(0.0)]).passed
    assert not judge.judge(task, case, args, [call(0.3), call(0.3)]).passed
    assert not judge.judge(task, case, args, [call(scale=1.001), call()]).passed


@pytest.mark.parametrize("scale", [0.01, 1.0, 1000.0])
@pytest.mark.parametrize(
    "name", ["matmul_w8a8", "bmm_w8a8", "conv2d_w8a8", "linear_w4a16", "attention_w8a8", "layernorm_w8a8"]
)
def test_a_contract_holds_at_every_scale_and_from_both_sides(name: str, scale: float) -> None:
    from kbx_env.tasks._schemes import EXACT

    task = load_task(f"quantization/{name}")
    case = next(c for c in task.cases if not c.layouts and _middling(c))
    args = {
        k: v * (min(scale, 30.0) if name == "linear_w4a16" else scale) if isinstance(v, torch.Tensor) else v
        for k, v in inputs.draw(task, case, 11).items()
    }
    ideal = reference.expect(task, case, args)
    assert judge.judge(task, case, args, [answer(*ideal.native, args=args)]).passed
    plain = reference.expect(task, case, args, rounding=(EXACT,) * 4).native
    found = judge.judge(task, case, args, [answer(*plain, args=args)])
    assert not found.passed and "dB" in found.reason
    coarse = (ideal.native[0] * 1.002).to(ideal.native[0].dtype)
    assert not judge.judge(task, case, args, [answer(coarse, args=args)]).passed


def _middling(case: Case) -> bool:
    sizes = [n for v in case.axes.values() for n in (v if isinstance(v, tuple) else (v,))]
    return max(sizes) >= 16 and min(sizes) >= 1 and not case.draws
