"""Statistics of reports: published figures, known values, and every reason of every judge in a class."""

from __future__ import annotations

import ast
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kbx_env.eval import stats
from kbx_env.eval.report_data import PolicyStudy, Row, Study

import kbx_env.grading.judge
from kbx_env.grading.judge.contract import sqnr


def row(task: str, correct: bool = False, **more) -> Row:
    verdict = "correct" if correct else "incorrect"
    given = {
        "category": "math", "difficulty": 1, "sample": 0, "verdict": verdict, "masked": False, "compiled": correct,
        "correct": correct, "speedup": None, "low": None, "high": None, "floor_ratio": None, "traffic": None,
        "launches": None, "message": "", "turns": (), "spent": {}, "raw": {},
    }  # fmt: skip
    return Row(task=task, **{**given, **more})


def policy(rows, name: str = "p", timed: bool = False, **manifest) -> PolicyStudy:
    return PolicyStudy(name, {"timed": timed, **manifest}, {}, tuple(rows))


def fast(task: str, speedup: float, width: float = 0.01, **more) -> Row:
    return row(task, True, speedup=speedup, low=speedup * (1 - width), high=speedup * (1 + width), **more)


def test_wilson_against_known_values() -> None:
    # Newcombe (1998), Table I: 81 of 263, 15 of 148, 0 of 20, 1 of 29.
    known = {(81, 263): (0.2553, 0.3662), (15, 148): (0.0624, 0.1605), (0, 20): (0.0, 0.1611), (1, 29): (0.0061, 0.1718)}
    for (k, n), expected in known.items():
        assert stats.wilson(k, n) == pytest.approx(expected, abs=5e-5)
    assert stats.wilson(0, 0) is None
    with pytest.raises(ValueError, match="no share"):
        stats.wilson(3, 2)


@given(st.integers(0, 300), st.integers(1, 300), st.floats(0.5, 0.999))
def test_wilson_contains_the_point_inside_of_0_and_1(k: int, n: int, level: float) -> None:
    k = min(k, n)
    low, high = stats.wilson(k, n, level)
    assert 0 <= low <= k / n <= high <= 1


def test_wilson_is_statsmodels_own() -> None:
    from scipy.stats import binomtest
    from statsmodels.stats.proportion import proportion_confint

    assert stats.wilson(3.7, 11.2) == pytest.approx(proportion_confint(3.7, 11.2, method="wilson"), abs=1e-12)
    assert stats.wilson(19, 176) == pytest.approx(tuple(binomtest(19, 176).proportion_ci(method="wilson")), abs=1e-12)
    for k, n in ((0, 176), (19, 176), (54, 176), (176, 176)):
        assert stats.wilson(k, n) == pytest.approx(proportion_confint(k, n, method="wilson"), abs=1e-12)


@settings(max_examples=40)
@given(st.lists(st.tuples(st.floats(-50, 50), st.integers(1, 4)), min_size=1, max_size=30), st.integers(0, 9))
def test_a_mean_is_inside_its_interval_and_the_seed_decides(pairs: list[tuple[float, int]], seed: int) -> None:
    sums, counts = [v * c for v, c in pairs], [c for _, c in pairs]
    found = stats.mean(sums, counts, seed=seed)
    assert found == stats.mean(sums, counts, seed=seed) and found.tasks == len(pairs)
    assert found.value == pytest.approx(sum(sums) / sum(counts), abs=1e-9)
    assert found.low is None or found.low <= found.value <= found.high


def test_a_mean_is_the_bootstrap_of_tasks_by_hand() -> None:
    """The interval of reports before scipy's bootstrap: the same draws, the same quantiles."""
    for seed in range(20):
        rng = np.random.default_rng(100 + seed)
        n = int(rng.integers(2, 180))
        s, c = 3 * rng.normal(size=n), rng.integers(1, 6, n).astype(float)
        at = np.random.default_rng(seed).integers(0, n, (stats.DRAWS, n))
        low, high = np.quantile(s[at].sum(1) / c[at].sum(1), [0.025, 0.975])
        found = stats.mean(list(s), list(c), seed=seed)
        assert (found.low, found.high) == pytest.approx((min(low, found.value), max(high, found.value)), abs=1e-9)


def test_a_mean_without_spread_has_no_interval() -> None:
    assert stats.mean([]) is None and stats.mean([2.0]) == stats.Mean(2.0, None, None, 1)
    assert stats.mean([1.0] * 5).low is None, "five alike say nothing of how others are"
    values = list(np.random.default_rng(1).normal(3, 2, 200))
    found = stats.mean(values, seed=3)
    half = 1.96 * np.std(values) / math.sqrt(200)
    assert found.high - found.low == pytest.approx(2 * half, rel=0.15)


def test_rates_leave_out_what_is_masked_and_count_it() -> None:
    rows = [row("a", True), row("b"), row("c", compiled=True), row("d", masked=True, verdict="infra_fault")]
    found = stats.rates(policy(rows))
    assert (found.masked, found.tasks, found.compiled.k, found.correct.k, found.correct.n) == (1, 3, 2, 1, 3)
    assert (found.correct.low, found.correct.high) == pytest.approx(stats.wilson(1, 3))
    empty = stats.rates(policy(rows), "loss")
    assert empty.correct == stats.Rate(0, 0, None, None, None)
    table = stats.rate_table(Study((policy(rows),)))
    assert [r.category for r in table] == [None, "math"] and json.dumps(table[0].to_dict())


def test_answers_to_one_task_are_not_independent() -> None:
    alike = [row(f"t{i}", i < 10, sample=s) for i in range(20) for s in range(5)]
    assert stats.rates(policy(alike)).correct.low == pytest.approx(stats.wilson(10, 20)[0], abs=0.01)
    spread = [row(f"t{i}", s % 2 == 0, sample=s) for i in range(20) for s in range(4)]
    assert stats.rates(policy(spread)).correct.low == pytest.approx(stats.wilson(40, 80)[0])
    never = stats.rates(policy([row(f"t{i}", sample=s) for i in range(20) for s in range(5)])).correct
    assert never.high == pytest.approx(stats.wilson(0, 20)[1]) and (never.k, never.n) == (0, 100)


def test_speeds() -> None:
    rows = [fast("a", 0.5), fast("b", 2.0), fast("c", 0.999), fast("d", 4.0), row("e"), row("f", True)]
    found = stats.speeds(rows)
    logs = [math.log(x) for x in (0.5, 2.0, 0.999, 4.0)]
    assert found.geometric_mean.value == pytest.approx(math.exp(sum(logs) / 4))
    assert found.geometric_mean.low < found.geometric_mean.value < found.geometric_mean.high
    assert (found.n, found.untimed) == (4, 1) and found.spread.median == pytest.approx(1.4995)
    assert found.arithmetic_mean == pytest.approx(7.499 / 4)
    assert (found.slower.k, found.slower_surely.k, found.faster_surely.k, found.slower.n) == (2, 1, 2, 4)
    many = [fast(f"t{i}", 1 + i / 7) for i in range(40)]
    assert stats.speeds(many, seed=5) == stats.speeds(many, seed=5) != stats.speeds(many, seed=6)
    assert stats.speeds([row("a", True)]) is None and stats.speeds([]) is None
    assert json.loads(json.dumps(found.to_dict())) == found.to_dict()


def test_fast_p_is_of_all_judged_answers() -> None:
    rows = [fast("a", 0.5), fast("b", 2.0), row("c"), row("d", True), row("e", masked=True)]
    curve = {p: r.k for p, r in stats.fast_p(policy(rows, timed=True), (0.0, 0.4, 1.0, 2.0))}
    assert curve == {0.0: 3, 0.4: 2, 1.0: 1, 2.0: 0}
    shares = [r.rate for _, r in stats.fast_p(policy(rows, timed=True))]
    assert shares == sorted(shares, reverse=True)
    assert stats.fast_p(policy(rows)) is None, "unknown is not 0"


def test_pass_at_k_is_unbiased() -> None:
    rows = [row(f"t{i}", s < i, sample=s) for i in range(4) for s in range(5)]
    found = stats.pass_at(rows)
    assert list(found) == [1, 2, 4, 5] and found[1].value == pytest.approx(6 / 20)
    # Of the pairs out of 5: none, 4, 7 and 9 of 10 hold one of 0, 1, 2, 3 correct ones.
    assert found[2].value == pytest.approx((0 + 4 + 7 + 9) / 40) and found[5].value == 0.75
    assert all(0 <= m.low <= m.value <= m.high <= 1 for m in found.values())
    assert stats.pass_at([]) == {} and stats.pass_at([row("a", masked=True)]) == {}
    one = stats.pass_at([row("a", True), row("b")])
    assert list(one) == [1] and one[1].value == 0.5


def turn(number: int, compiled: bool, correct: bool = False, speedup: float | None = None) -> dict[str, object]:
    return {"label": "", "round": number, "verdict": "", "compiled": compiled, "correct": correct, "speedup": speedup}


def test_geak_s_rounds_of_the_paper() -> None:
    # Fig. 3: compiled 92, 114, 121 and correct 32, 47, 54 of 176 after rounds 0, 1, 2.
    def at(i: int, ends: tuple[int, ...]) -> int | None:
        return next((r for r, end in enumerate(ends) if i < end), None)

    def way(i: int) -> tuple[dict[str, object], ...]:
        c, k = at(i, (92, 114, 121)), at(i, (32, 47, 54))
        # A later round may be worse: what was reached stays reached.
        return tuple(turn(r, c == r, k == r, 1.6 if k == 0 else 1.2) for r in range(3))

    found = stats.trajectory(policy([row(f"t{i}", i < 54, turns=way(i)) for i in range(176)]))
    assert [round(100 * r.compiled.rate, 1) for r in found.rounds] == [52.3, 64.8, 68.8]
    assert [round(100 * r.correct.rate, 1) for r in found.rounds] == [18.2, 26.7, 30.7]
    assert [(r.rescued, r.persistent) for r in found.rounds] == [(32, 0), (15, 32), (7, 47)]
    last = found.rounds[2]
    assert last.rescued_speedup == pytest.approx(1.2) and found.rounds[1].persistent_speedup == pytest.approx(1.6)
    assert last.persistent_speedup == pytest.approx((1.6**32 * 1.2**15) ** (1 / 47))
    assert found.unknown == 0 and json.dumps(found.to_dict())


def test_a_round_counts_the_best_so_far_and_who_said_nothing() -> None:
    rows = [
        row("a", True, turns=(turn(0, True, True, 2.0), turn(1, True, True, 3.0), turn(1, True, True, 1.0))),
        row("b", spent={"gradings": 0}), row("c", True, spent={"gradings": 1}), row("d", masked=True, turns=(turn(0, True),)),
    ]  # fmt: skip
    found = stats.trajectory(policy(rows))
    assert [r.speedup for r in found.rounds] == pytest.approx([2.0, 3.0]) and found.unknown == 1
    assert [r.compiled.n for r in found.rounds] == [2, 2] and found.rounds[1].persistent == 1
    untimed = stats.trajectory(policy([row("a", True, turns=(turn(0, True, True),))])).rounds[0]
    assert (untimed.speedup, untimed.rescued, untimed.rescued_speedup) == (None, 1, None)
    assert stats.trajectory(policy([row("a", True)])) is None


def test_traffic() -> None:
    raw = {"evidence": {"moved_bytes": 8, "kernels": [{"launches": 4}, {"launches": 2}]}, "cases": {"total": 3}}
    rows = [row("a", True, traffic=2.0, raw=raw), row("b", True, traffic=8.0), row("c", traffic=100.0)]
    found = stats.traffic(policy(rows), "math")
    assert found.ratio == pytest.approx(4.0) and found.ratios.median == 5.0 and found.launches.median == 2.0
    nothing = stats.traffic(policy(rows), "loss")
    assert nothing.ratio is None and nothing.launches == stats.Spread(0, None, None, None, None, None)


# Failures.

FRAGMENTS = {
    # names within other reasons
    "one tensor", "a single result", "output 7", "output 0 after the call", "torch.float32 7", "copy of output 0", "two calls",
    "a tuple of 7",
    "generators in different states", "output 0 (neither the kept nor the dropped value)", "output 7: 7",
    # why elements go together
    "7 apart", "read backwards", "read again", "far away, ", "at places that differ by XOR with 7", "in groups of 7",
    "output 0 of planes go together, 7", "planes of different calls go together", "output 0 of planes go together in steps",
    "the random numbers of output 0 come more often from some parts of [0, 1)",
    "across the diagonal", "too evenly", "output 0 are dropped 7",
    # what a factorisation promises
    "A = U diag(S) Vh", "U has orthonormal columns", "Vh has orthonormal rows", "S holds the singular values", "S is not negative",
    "S descends", "R is upper triangular", "R^T R = A^T A", "A = Q R", "Q has orthonormal columns", "L is unit lower triangular",
    "U is upper triangular", "P is a permutation", "no element of L is larger than 1", "A = P L U", "A V = V diag(w)",
    "the eigenvectors have length 1", "the eigenvectors are independent", "the pivots follow LAPACK's form",
    "LD and pivots solve A X = 1",
    # the noise of a quantized result stands after a reason, the published thresholds after "output 0: "
    "7 dB of signal to noise beside the unquantized result, the scheme has 7 dB",
    "cosine 7 (>= 7), l1 7 (<= 7), rmse 7 (<= 7)",
}  # fmt: skip
"""Texts that only occur inside of a reason."""
NOT_IN_REASONS = ("accepted: ", "no judge for", "the judge needs", "are too many to enumerate")
NAMED = {"name": "output 0", "high.name": "output 0", "row.name": "out after the call", "want.dtype": "torch.float32",
         "got.dtype": "torch.float16", "tuple(got.shape)": "(7,)", "found.reason": "wrong values: output 0 is off by 7 times the "
         "tolerance, 7 % of the elements", "_noise(task, case, args, expected, answer, device)": "7.0 dB of signal to noise beside "
         "the unquantized result, the scheme has 41.2 dB", "wanted": "torch.float32 (7,)", "what": "two calls", "got": "one tensor",
         "type(e).__name__": "ValueError", "returned": "a single result", "expected": "a tuple of 2",
         "answer.shares[i]": "'x'"}  # fmt: skip


def reasons(text: str) -> list[str]:
    """Every text of a judge with a blank in it, f-strings with something in each hole."""
    tree = ast.parse(text)
    docs = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    inner = {id(v) for n in ast.walk(tree) if isinstance(n, ast.JoinedStr) for v in ast.walk(n) if v is not n}
    found = []
    for n in ast.walk(tree):
        if isinstance(n, ast.JoinedStr):
            holes = (v.value if isinstance(v, ast.Constant) else NAMED.get(ast.unparse(v.value), "7") for v in n.values)
            whole = "".join(holes)
        elif isinstance(n, ast.Constant) and isinstance(n.value, str):
            whole = n.value
        else:
            continue
        if " " in whole and id(n) not in docs | inner and not any(part in whole for part in NOT_IN_REASONS):
            found.append(whole)
    return found


def test_every_reason_of_the_judges_has_a_class() -> None:
    folder = Path(next(iter(kbx_env.grading.judge.__path__)))
    every = {r for f in folder.glob("*.py") for r in reasons(f.read_text(encoding="utf-8"))}
    assert len(every) > 80
    unknown = sorted(r for r in every - FRAGMENTS if stats.wrong_kind(r) == "other")
    assert not unknown, "teach eval/stats.py these, or name them as fragments here"
    assert not FRAGMENTS - every, "these occur no more"


def test_a_new_reason_would_be_missed() -> None:
    assert reasons('def f():\n    """Doc of it."""\n    return Ruling(False, f"a new reason: {x:.3g}")') == ["a new reason: 7"]
    assert stats.wrong_kind("a new reason: 7") == "other"


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("returned a tuple of 2, expected one tensor", "count"), ("returned 3 outputs, expected 1", "count"),
        ("returned a NoneType where a tensor was expected", "no tensor"), ("returned a tensor on cpu, expected cuda", "device"),
        ("output 0 has dtype torch.float16, expected torch.float32", "dtype"), ("output 1 has shape (1,), expected ()", "shape"),
        ("output 0 is torch.float16 (3,), expected torch.float32 (3,)", "dtype"),
        ("output 0 is torch.float32 (3,), expected torch.float32 (4,)", "shape"),
        ("output 0 shares memory with 'x'; a new tensor is expected", "aliasing"),
        ("the result lies in the memory of an earlier call's result, which it overwrites", "aliasing"),
        ("the input 'x' was changed", "input changed"), ("what lies between the elements of x was changed", "input changed"),
        ("wrong values: output 0 holds NaN or infinity where the result is finite (or the reverse)", "not finite"),
        ("wrong values: output 0 holds NaN or infinity where the result is finite (or the reverse); 50 % of the elements were "
         "never written", "unwritten"),
        ("wrong values: output 0 is off by 3.43 times the tolerance, 100 % of the elements", "values"),
        ("wrong values: output 0 is off by 9 times the tolerance, 1 % of the elements; 38.1 dB of signal to noise beside the "
         "unquantized result, the scheme has 41.2 dB", "scheme"),
        ("wrong values: 3 of 12 planes fit no sequence of windows", "windows"),
        ("broken promise: A = Q R (error 2, allowed 0.1)", "invariant"),
        ("keep rate 0.8000, expected 0.5000 over 900 elements", "statistical"),
        ("output 0 not within rtol=0.005, atol=0.005", "values"), ("output 0 is not equal", "values"),
        ("returned a single result, expected a tuple of 2", "count"),
        ("raised ValueError with another text than the published reference", "exception"),
        ("raised ValueError, where the published reference does not", "exception"),
        ("the published reference raises ValueError here", "reference"),
        ("the published test compares the options of a torch.optim.Adam, not a tensor", "reference"),
        ("output 0: cosine 0.9 (>= 0.95), l1 1 (<= 2), rmse 1 (<= 2)", "values"),
        ("output 0 has shape (2,), expected (); 50 % of the elements were never written", "shape"),
        ("something else", "other"),
    ],
)  # fmt: skip
def test_classes_of_reasons(reason: str, kind: str) -> None:
    assert stats.wrong_kind(reason) == kind
    with_case = row("a", message=f"N=1 C=3: layout: {reason}")
    assert stats.failure_of(with_case).kind == kind, "also where only the message is left"
    told = row("a", raw={"cases": {"failures": [{"case": "", "reason": reason}]}})
    assert stats.failure_of(told).kind == kind and stats.failure_of(told).stage == "wrong"


def test_how_far_values_are_off() -> None:
    texts = {"9.68": "under 10 tolerances", "145": "10 to 1000 tolerances", "1.57e+06": "1000 tolerances or more"}
    for factor, far in texts.items():
        text = f"*=(7, 31): wrong values: output 0 is off by {factor} times the tolerance, 64 % of the elements"
        assert stats.failure_of(row("a", message=text)).far == far
    assert stats.failure_of(row("a", message="wrong values: output 0, 3 % of the elements")).far is None


@pytest.mark.parametrize(
    ("verdict", "message", "kind"),
    [
        ("malformed", "the policy has no answer: it refused", "no answer"),
        ("malformed", "line 3: syntax error: invalid", "syntax"),
        ("malformed", "no function named 'softmax' at the top level (found: _relu, relu)", "entry"),
        ("malformed", "line 23: tanh lacks the parameter 'x'; signature: tanh(x)", "entry"),
        ("malformed", "line 9: not UTF-8 text (bad byte at byte 3)", "text"), ("timeout", "no result within 30 s", "timeout"),
        ("compile_error", "line 60: CompilationError: ValueError: bad axis\nat 1:2", "CompilationError: ValueError"),
        ("compile_error", "line 60: CompilationError: at 21:23:\n", "CompilationError"),
        ("compile_error", "_kernel for sm_90: ptxas failed", "ahead of time"),
        ("runtime_error", "_k: out-of-bounds load at line 42, program (0, 0, 0): 4 byte(s) outside x", "out of bounds"),
        ("runtime_error", "line 65: NameError: name 'B' is not defined", "NameError"),
        ("runtime_error", "executed on the CPU tier: line 65: NameError: name 'B' is not defined", "NameError"),
        ("runtime_error", "the submission's process died (signal 11)", "process"), ("runtime_error", "what", "other"),
    ],
)  # fmt: skip
def test_failures_before_a_judge(verdict: str, message: str, kind: str) -> None:
    found = stats.failure_of(row("a", verdict=verdict, message=message))
    assert found.kind == kind and found.stage == verdict.removesuffix("_error")


def test_a_taxonomy_counts_every_failure_once() -> None:
    rows = [row("a", verdict="rejected", raw={"violations": [{"rule": "torch_compute", "detail": ""}]})] * 2
    rows += [row("b", verdict="timeout"), row("c", True), row("d", masked=True, verdict="infra_fault")]
    assert stats.taxonomy(rows) == (("rejected", "torch_compute", None, 2), ("timeout", "timeout", None, 1))


# The quantization contract.


def quantized(name: str, correct: bool = False, **raw) -> Row:
    held = {"evidence": {"launches": 3, "moved_bytes": 9, "dots": ["i8*i8->i32"]}, "cases": {"passed": 4, "total": 4}}
    return row(f"quantization/{name}", correct, category="quantization", raw={**held, **raw})


def test_stages_of_a_scheme() -> None:
    none = {"scale": None, "rounding": None, "packed operands": None, "integer product": None}
    found = stats.scheme(quantized("matmul_w8a8", True)).reached
    assert found == none | {"scale": True, "rounding": True, "integer product": True, "result": True}
    assert stats.scheme(quantized("linear_w4a16", True)).reached == none | {"scale": True, "packed operands": True, "result": True}
    rejected = replace(quantized("layernorm_w8a8", violations=[{"rule": "contract", "detail": ""}]), verdict="rejected")
    assert stats.scheme(rejected).reached == none | {"scale": True, "rounding": False, "result": True}
    reason = "wrong values: output 0 is off by 9 times the tolerance, 1 % of the elements; 38.1 dB of signal to noise beside the " \
        "unquantized result, the scheme has 41.2 dB"  # fmt: skip
    wrong = {"passed": 3, "total": 4, "failures": [{"case": "", "reason": reason}]}
    plain = stats.scheme(quantized("matmul_w8a8", cases=wrong, evidence={"launches": 3, "dots": ["f16*f16->f32"]}))
    assert plain.reached == none | {"integer product": False, "result": False} and (plain.noise, plain.ideal) == (38.1, 41.2)
    assert stats.scheme(quantized("matmul_w8a8", cases=wrong)).reached == none | {"result": False}
    unproven = stats.scheme(quantized("matmul_w8a8", True, evidence={"launches": 3, "dots": ["i8*i8->i32"]}))
    assert unproven.reached["integer product"] is None, "on a GPU alone the products are claims"
    assert stats.scheme(row("math/cos", True)) is None and stats.scheme(quantized("no_such_task")) is None
    assert stats.scheme(quantized("matmul_w8a8", grading="paper")) is None and json.dumps(plain.to_dict())


def test_the_noise_of_a_reason_is_read_as_it_is_written() -> None:
    import torch

    assert f"{sqnr(torch.tensor([1.1]), torch.tensor([1.0])):.1f}" == "20.0"
    text = "x; -inf dB of signal to noise beside the unquantized result, the scheme has 41.2 dB"
    found = stats.scheme(quantized("bmm_w8a8", cases={"passed": 0, "total": 1, "failures": [{"case": "", "reason": text}]}))
    assert (found.noise, found.ideal) == (None, 41.2)
