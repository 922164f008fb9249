"""Models of what decides correctness: the paper's figures, other implementations, and data that cannot be modelled."""

from __future__ import annotations

import builtins
import json
import math
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kbx_env.eval import models
from kbx_env.eval.report_data import Study

from kbx_env.errors import UsageError
from tests.eval.test_stats import fast, policy, row

PAPER = {"AutoTriton": (30, 176), "GEAK": (54, 176), "KernelAgent": (19, 176), "Claude": (40, 176)}
"""Correct of 176, from the percentages of Table 1."""


def drawn(seed: int = 0, tasks: int = 120, sd: float = 1.5, shift: float = 1.5) -> models.Answers:
    """Three methods with log-odds -1, 0 and ``shift`` on tasks whose difficulty varies by ``sd``, in four categories."""
    rng = np.random.default_rng(seed)
    hard = rng.normal(0, sd, tasks)
    return [
        (f"t{i}", f"c{i % 4}", m, bool(rng.random() < 1 / (1 + math.exp(-(hard[i] + a)))))
        for i in range(tasks) for m, a in (("low", -1.0), ("mid", 0.0), ("top", shift))
    ]  # fmt: skip


def test_the_paper_s_explained_deviance() -> None:
    four = models.deviance(models.expand(PAPER), ["method"])
    assert round(100 * four.explained, 1) == 3.3 and (four.df, four.n) == (3, 704)
    five = models.deviance(models.expand(PAPER | {"DeepSeek-Coder": (0, 176)}), ["method"])
    assert round(100 * five.explained, 1) == 12.1 and five.df == 4
    assert five.deviance == pytest.approx(four.deviance), "who is never right adds nothing to be explained"
    compiled = {"AutoTriton": (64, 176), "GEAK": (121, 176), "KernelAgent": (113, 176), "Claude": (80, 176)}
    assert round(100 * models.deviance(models.expand(compiled), ["method"]).explained, 1) == 5.2


def test_one_factor_is_the_closed_form() -> None:
    fit = models.deviance(models.expand(PAPER), ["method"])

    def loss(k: int, n: int) -> float:
        return -2 * (k * math.log(k / n) + (n - k) * math.log(1 - k / n))

    assert fit.null == pytest.approx(loss(143, 704))
    assert fit.deviance == pytest.approx(sum(loss(k, n) for k, n in PAPER.values()))
    assert fit.mcfadden == fit.explained and fit.adjusted == pytest.approx(1 - (fit.deviance / 2 + 3) / (fit.null / 2))
    (test,) = models.analyse(models.expand(PAPER)).tests
    assert (test.chi2, test.df) == (pytest.approx(fit.null - fit.deviance), 3) and test.p == pytest.approx(2.8e-5, rel=0.01)


def test_two_factors_against_a_formula_on_single_answers() -> None:
    import pandas as pd
    import statsmodels.formula.api as smf
    from statsmodels.genmod.families import Binomial

    data = drawn()
    frame = pd.DataFrame(data, columns=["task", "category", "method", "right"])
    frame["right"] = frame["right"].astype(float)
    given_ = smf.glm("right ~ C(category) + C(method)", frame, family=Binomial()).fit()
    fit = models.deviance(data, ["category", "method"])
    assert (fit.deviance, fit.null) == (pytest.approx(given_.deviance), pytest.approx(given_.null_deviance)) and fit.df == 5
    found = models.analyse(data, draws=50)
    both = {(t.factor, t.given): t for t in found.tests}
    alone = found.fits["category"].deviance
    assert both["method", "category"].chi2 == pytest.approx(alone - fit.deviance) and both["method", "category"].df == 2
    assert len(found.tests) == 4 and not found.reasons and json.loads(json.dumps(found.to_dict())) == found.to_dict()


def test_levels_at_infinity_in_two_factors() -> None:
    data = [*drawn(), *[(f"t{i}", f"c{i % 4}", "never", False) for i in range(120)]]
    data += [("easy", "easy", m, True) for m in ("low", "mid", "top")]
    fit = models.deviance(data, ["category", "method"])
    assert fit.deviance == pytest.approx(models.deviance(drawn(), ["category", "method"]).deviance) and fit.df == 7


def test_the_mixed_model_finds_what_was_put_in() -> None:
    found = models.mixed(drawn(tasks=800))
    sd, low, high = found.sd
    assert low < 1.5 < high and high - low < 0.8 and abs(sd - 1.5) < 0.3
    for name, truth in (("low", -1.0), ("mid", 0.0), ("top", 1.5)):
        value, low, high = found.log_odds[name]
        assert low < truth < high and high - low < 0.6 and low < value < high
    assert found.reference == "top" and set(found.against) == {"low", "mid"}
    assert found.against["low"][0] == pytest.approx(found.log_odds["low"][0] - found.log_odds["top"][0])


def test_the_mixed_model_beside_a_variational_fit() -> None:
    from statsmodels.genmod.bayes_mixed_glm import BinomialBayesMixedGLM

    data = drawn(tasks=300)
    methods, tasks = sorted({m for _, _, m, _ in data}), sorted({t for t, *_ in data})
    exog = np.array([[float(m == x) for x in methods] for _, _, m, _ in data])
    vc = np.array([[float(t == x) for x in tasks] for t, *_ in data])
    y = np.array([float(r) for *_, r in data])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit = BinomialBayesMixedGLM(y, exog, vc, np.zeros(len(tasks), dtype=int), vcp_p=2, fe_p=5).fit_vb()
    found = models.mixed(data)
    assert [found.log_odds[m][0] for m in methods] == pytest.approx(list(fit.fe_mean), abs=0.25)
    assert found.sd[0] == pytest.approx(math.exp(fit.vcp_mean[0]), rel=0.3)


def test_tasks_alike_have_no_random_effect_and_always_wrong_is_left_out() -> None:
    data = [*drawn(sd=0.0, tasks=400), *[(f"t{i}", "c", "never", False) for i in range(400)]]
    found = models.mixed(data)
    assert found.sd[0] < 0.6 and found.left_out == ("never",) and "never" not in found.log_odds


def test_permutation_within_tasks() -> None:
    strong = models.permuted(drawn(), draws=400)
    assert strong.p == 1 / 401 and strong.by_chance < strong.explained and strong == models.permuted(drawn(), draws=400)
    level = [[a for a in drawn(seed, 60, shift=0.0) if a[2] != "low"] for seed in range(40)]
    null = [models.permuted(data, seed, 99).p for seed, data in enumerate(level)]
    assert 0.2 < np.mean(null) < 0.85 and min(null) >= 0.01 and sum(p <= 0.05 for p in null) <= 7


ROWS = st.tuples(st.integers(0, 5), st.integers(0, 2), st.sampled_from("abc"), st.booleans())


@settings(max_examples=60, deadline=None)
@given(st.lists(ROWS, max_size=40), st.integers(0, 3))
def test_any_data_gives_numbers_or_a_reason(data, seed: int) -> None:
    data = [(f"t{t}", f"c{c}", m, r) for t, c, m, r in data]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = models.analyse(data, seed, draws=20)
    assert found == models.analyse(data, seed, draws=20)
    for name in ("category", "method", "both"):
        assert (name in found.fits) != (name in found.reasons)
    assert (found.mixed is None) == ("mixed" in found.reasons)
    assert (found.permutation is None) == ("permutation" in found.reasons)
    assert found.permutation is None or 0 < found.permutation.p <= 1
    assert all(0 <= f.explained <= 1 and f.adjusted <= f.explained for f in found.fits.values())
    assert all(0 <= t.p <= 1 for t in found.tests)
    json.dumps(found.to_dict(), allow_nan=False)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ([], {"category": "0 answers", "mixed": "0 answers", "permutation": "0 answers"}),
        (drawn()[:6], {"method": "6 answers are too few"}),
        ([(t, c, m, False) for t, c, m, _ in drawn()], {"method": "every answer is wrong", "mixed": "every answer is wrong"}),
        ([(t, c, m, True) for t, c, m, _ in drawn()], {"both": "every answer is right"}),
        ([(t, c, "m", r) for t, c, _, r in drawn()[::3]],
         {"method": "only one method", "mixed": "two answers", "permutation": "only one method"}),
        ([(t, "c", m, r) for t, _, m, r in drawn()], {"category": "only one category", "both": "only one category"}),
        ([(t, c, m, m == "top") for t, c, m, _ in drawn()], {"method": "perfect separation", "mixed": "two answers"}),
        ([(t, c, m, c == "c0") for t, c, m, _ in drawn()], {"category": "perfect separation", "mixed": "nearly every answer"}),
        ([(f"t{i}", f"c{i}", f"m{i}", i % 2 == 0) for i in range(20)], {"category": "20 parameters for 20 answers"}),
        (models.expand(PAPER), {"mixed": "not known", "permutation": "not known", "category": "only one category"}),
    ],
)  # fmt: skip
def test_what_cannot_be_modelled_says_why(data, says, capfd: pytest.CaptureFixture[str]) -> None:
    found = models.analyse(data, draws=20)
    for name, reason in says.items():
        assert reason in found.reasons[name] and name not in found.fits
    assert capfd.readouterr() == ("", "")


def test_answers_of_a_study_and_published_counts() -> None:
    study = Study((policy([row("a", True), row("b", compiled=True), row("c", masked=True)], "p"), policy([row("a")], "q")))
    assert models.answers(study) == [("a", "math", "p", True), ("b", "math", "p", False), ("a", "math", "q", False)]
    assert [a[3] for a in models.answers(study, "compiled")] == [True, True, False]
    assert models.expand({("math", "x"): (1, 2)}) == [(None, "math", "x", True), (None, "math", "x", False)]


def test_without_statsmodels_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *args, **kwargs):
        if name.startswith("statsmodels"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(UsageError, match=r"pip install .*\[report\]"):
        models.analyse(drawn())


# Two policies.


def two(both: int, only_a: int, only_b: int, neither: int, **more) -> models.Paired:
    kinds = [(True, True)] * both + [(True, False)] * only_a + [(False, True)] * only_b + [(False, False)] * neither
    a, b = ([row(f"t{i}", k[side]) for i, k in enumerate(kinds)] for side in (0, 1))
    return models.paired(policy(a, "A"), policy(b, "B", **more))


@pytest.mark.parametrize("counts", [(20, 12, 3, 141), (0, 1, 0, 9), (5, 0, 0, 5), (3, 7, 7, 0), (0, 30, 1, 2)])
def test_mcnemar_is_scipy_s_and_statsmodels_own(counts: tuple[int, int, int, int]) -> None:
    from scipy.stats import binomtest
    from statsmodels.stats.contingency_tables import mcnemar

    both, i, j, neither = counts
    found = two(*counts)
    assert found.p == pytest.approx(mcnemar([[both, i], [j, neither]], exact=True).pvalue)
    assert found.p == pytest.approx(binomtest(i, i + j).pvalue if i + j else 1.0)
    assert (found.both, found.only_a, found.only_b, found.tasks) == (both, i, j, sum(counts))
    assert found.difference.value == pytest.approx((i - j) / sum(counts))


def test_the_sentence_says_no_more_than_interval_and_test() -> None:
    found = two(20, 12, 3, 141)
    low, high = (f"{100 * v:.1f}" for v in (found.difference.low, found.difference.high))
    assert found.sentence == (
        "A solves 12 tasks that B does not, B 3 the other way; "
        f"the difference of 5.1 points (95 % {low} to {high}) is clear of zero."
    )
    assert 0 < float(low) < 2 and 8 < float(high) < 10
    assert two(20, 3, 12, 141).sentence.startswith("B solves 12 tasks that A does not, A 3 the other way; the difference of 5.1")
    assert two(20, 5, 3, 148).sentence.endswith("may be chance.")
    few = two(20, 5, 0, 151)
    assert few.difference.low > 0 and few.p == 0.0625 and few.sentence.endswith("is not settled: the test has p = 0.06.")
    assert two(20, 0, 0, 5).sentence == "A and B solve the same 20 of 25 tasks."
    assert two(0, 1, 0, 0).sentence == (
        "A solves 1 task that B does not, B 0 the other way; the difference of 100.0 points is not settled: the test has p = 1.00."
    )
    assert two(0, 0, 0, 0).sentence == "A and B have no judged task in common."
    assert two(20, 12, 3, 141, grading="paper").sentence.endswith("is clear of zero (the runs differ in grading).")
    assert two(20, 12, 3, 141, sizes="held-out").sentence.endswith("(the runs differ in sizes).")
    assert two(20, 12, 3, 141, sizes="published").differ == (), "which is what a report that says nothing means"


@settings(max_examples=40, deadline=None)
@given(st.tuples(*[st.integers(0, 25)] * 4))
def test_a_sentence_is_as_sure_as_its_interval(counts: tuple[int, int, int, int]) -> None:
    found, mirrored = two(*counts), two(counts[0], counts[2], counts[1], counts[3])
    d = found.difference
    assert 0 < found.p <= 1 and found.p == pytest.approx(mirrored.p)
    if d is not None and d.low is not None:
        assert -1 <= d.low <= d.value <= d.high <= 1
        assert ("clear of zero" in found.sentence) == (not d.low <= 0 <= d.high and found.p < 0.05)
    assert found == two(*counts) and json.dumps(found.to_dict())


def test_several_answers_a_task_and_masked_ones() -> None:
    a = [row(f"t{i}", i % 4 != 0 or s == 1, sample=s) for i in range(40) for s in range(2)]
    b = [row(f"t{i}", i % 4 == 1, sample=s) for i in range(40) for s in range(2)]
    found = models.paired(policy(a, "A"), policy([*b, row("extra", True)], "B"))
    assert found.several and found.tasks == 40 and found.p < 0.01
    assert found.difference.value == pytest.approx(0.875 - 0.25)
    assert found.sentence.startswith("A beside B on 40 tasks with several answers; the difference of 62.5 points (95 % ")
    hidden = [row("t0", masked=True), row("t0", True, sample=1), row("t1", masked=True)]
    one = models.paired(policy(hidden, "A"), policy([row("t0"), row("t1")], "B"))
    assert (one.tasks, one.only_a) == (1, 1)


def test_speed_on_tasks_that_both_solve() -> None:
    a = [fast(f"t{i}", 2.0 + i / 50) for i in range(20)] + [row("x", True)]
    b = [fast(f"t{i}", 1.0 + i / 80) for i in range(15)] + [row(f"t{i}") for i in range(15, 20)] + [fast("x", 9.0)]
    found = models.paired(policy(a, "A", device="H200"), policy(b, "B", device="H200"))
    truth = np.exp(np.mean([math.log((2 + i / 50) / (1 + i / 80)) for i in range(15)]))
    assert found.speed.tasks == 15 and found.speed.value == pytest.approx(truth)
    assert found.speed.low < truth < found.speed.high
    assert models.paired(policy(a, "A", device="H200"), policy(b, "B", device="L20")).speed is None
    assert two(5, 1, 1, 1).speed is None


def test_noise() -> None:
    rows = [fast(f"t{i}", 1.0 + i / 100, 0.03) for i in range(10)]
    found = models.noise(Study((policy(rows, "x"), policy(rows, "eager"))))
    half = math.log(1.03 / 0.97) / 2
    assert found.half_widths.median == pytest.approx(half) and found.half_widths.n == 20
    assert (found.covers.k, found.covers.n) == (4, 10), "intervals of 1.00 to 1.03 hold 1"
    assert models.noise(Study((policy(rows, "eagerly"),))).covers is None
    assert models.noise(Study((policy([row("a", True)]),))) is None
