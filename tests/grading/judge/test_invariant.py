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
