"""The generator: every family, expressions and their derivatives, duplicates, and whole packs."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import re
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kbx_env.eval import task_checks

from kbx_env.__main__ import main
from kbx_env.errors import UsageError
from kbx_env.generate import build, duplicates, expressions
from kbx_env.generate.duplicates import Known
from kbx_env.generate.expressions import OPS, Node, adjoints, draw, leaf, live, statements
from kbx_env.generate.families import families, optimizers, rows
from kbx_env.spec import packs
from kbx_env.spec.catalog import expert_source, load_task

SEEDS = 8
SMALL = build.Settings(2, 7, families=("pointwise",), difficulties=(1, 2), name="small")


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(packs.SELECTED, "")
    monkeypatch.setenv(packs.REGISTERED, "")
    yield
    for name in [m for m in sys.modules if m.startswith(packs.MODULES)]:
        del sys.modules[name]


class _Tl:
    """tl with torch's functions, for statements of kernels."""

    abs, exp, log, erf, sin, cos, sigmoid, sqrt_rn = (
        torch.abs, torch.exp, torch.log, torch.erf, torch.sin, torch.cos, torch.sigmoid, torch.sqrt,
    )  # fmt: skip

    @staticmethod
    def where(c: torch.Tensor, a: Any, b: Any) -> torch.Tensor:
        return torch.where(c, torch.as_tensor(a, dtype=torch.float64), torch.as_tensor(b, dtype=torch.float64))

    @staticmethod
    def maximum(a: torch.Tensor, b: Any) -> torch.Tensor:
        return torch.maximum(a, torch.as_tensor(b, dtype=torch.float64))

    @staticmethod
    def minimum(a: torch.Tensor, b: Any) -> torch.Tensor:
        return torch.minimum(a, torch.as_tensor(b, dtype=torch.float64))


class _Libdevice:
    """libdevice with torch's functions."""

    tanh, expm1, log1p = torch.tanh, torch.expm1, torch.log1p


def _mish_slope(z: torch.Tensor) -> torch.Tensor:
    t = torch.tanh(torch.nn.functional.softplus(z))
    return t + z * torch.sigmoid(z) * (1.0 - t * t)


NAMES = {"tl": _Tl, "libdevice": _Libdevice, "_softplus": torch.nn.functional.softplus, "_mish_slope": _mish_slope}
POINTS = torch.linspace(-4, 4, 41, dtype=torch.float64) + 1e-3


@pytest.mark.parametrize("name", OPS)
def test_torch_triton_bounds_and_slopes_of_an_operation_agree(name: str) -> None:
    parts = [leaf("a"), leaf("b")][: len(OPS[name].slopes)]
    node = Node(name, tuple(parts))
    values = {"a": POINTS.clone().requires_grad_(), "b": POINTS.flip(0).mul(0.7).requires_grad_()}
    want = eval(node.written("torch"), {"torch": torch, "F": torch.nn.functional, **values})
    lines = statements(node)
    back, grads = adjoints(node, lines, "seed")
    scope: dict[str, Any] = {**NAMES, **{k: v.detach() for k, v in values.items()}, "seed": torch.ones_like(POINTS)}
    for line in (*lines.body, *back):
        exec(line, scope)
    torch.testing.assert_close(scope[lines.result], want.detach())
    low, high = node.bounds()
    assert low <= want.min() and want.max() <= high
    if OPS[name].smooth:
        for part, grad in zip(parts, torch.autograd.grad(want.sum(), [values[p.name] for p in parts])):
            torch.testing.assert_close(scope[grads[part.name]] + torch.zeros_like(grad), grad)


def test_drawn_expressions_use_all_leaves_and_stay_bounded() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        tree = draw(rng, [leaf(n) for n in "xyz"[: seed % 3 + 1]], seed % 9 + 2)
        assert set(tree.leaves()) == set("xyz"[: seed % 3 + 1])
        assert all(max(map(abs, n.bounds())) <= expressions.LARGEST for n in tree.walk())
        text = expressions.formula(tree)
        assert text.count("(") == text.count(")"), text


@pytest.mark.parametrize("name", ["tanh", "elu", "log1psq", "softplus", "mish"])
def test_kernels_keep_the_precision_of_small_values(name: str) -> None:
    """``log(1 + z * z)`` of a small z is log(1) = 0 in fp32, and ``exp(z) - 1`` has few digits left."""
    small = -torch.logspace(-6, -1, 40, dtype=torch.float32)
    node = Node(name, (leaf("a"),))
    exact = eval(node.written("torch"), {"torch": torch, "F": torch.nn.functional, "a": small.double()})
    lines = statements(node)
    tl = type("tl", (_Tl,), {"where": torch.where, "maximum": lambda a, b: a.clamp_min(b), "minimum": lambda a, b: a.clamp_max(b)})
    scope: dict[str, Any] = {"tl": tl, "libdevice": _Libdevice, "a": small}
    for helper in expressions.HELPERS.values():
        exec(helper.replace("@triton.jit\n", ""), scope)
    for line in lines.body:
        exec(line, scope)
    assert ((scope[lines.result].double() - exact) / exact).abs().max() < 1e-6


@pytest.mark.parametrize(
    ("text", "sensible"),
    [
        ("square(abs(x))", False), ("cos(neg(x))", False), ("damped(abs(x), y)", True), ("damped(x, abs(y))", False),
        ("sub(x, neg(y))", False), ("silu(neg(x))", True), ("relu(square(x))", False), ("elu(sigmoid(x))", False),
        ("square(hypot(x, y))", False), ("damped(hypot(x, y), y)", True),
        ("clamp(sin(x))", False), ("clamp(x)", True), ("abs(neg(square(x)))", False), ("maximum(charbonnier(x), sin(y))", False),
    ],
)  # fmt: skip
def test_no_operation_is_lost_on_its_operand(text: str, sensible: bool) -> None:
    made = {op: (lambda *parts, op=op: Node(op, parts)) for op in OPS}
    assert expressions._sensible(eval(text, made | {n: leaf(n) for n in "xy"})) is sensible


def test_formulas_have_no_parentheses_around_a_call() -> None:
    x = leaf("x")
    square, neg = (lambda a: Node("square", (a,))), (lambda a: Node("neg", (a,)))
    total = Node("add", (Node("sin", (x,)), Node("cos", (x,))))
    assert expressions.formula(square(Node("sin", (x,)))) == "sin(x)^2"
    assert expressions.formula(square(total)) == "(sin(x) + cos(x))^2"
    assert expressions.formula(neg(total)) == "-(sin(x) + cos(x))" and expressions.formula(neg(x)) == "-x"
    assert expressions.formula(square(Node("abs", (x,)))) == "(|x|)^2"
    assert expressions.formula(square(neg(x))) == "(-x)^2"


def test_statements_that_reach_no_result_are_removed() -> None:
    assert live(["a = load_x", "b = load_y", "c = a + 1", "d = b"], ["c"]) == ["a = load_x", "c = a + 1"]


@pytest.mark.parametrize(("words", "name"), [(("min",), "min_reduce"), (("abs", "sum"), "abs_sum"), (("total",), "total_reduce")])
def test_a_function_hides_nothing_that_its_kernel_uses(words: tuple[str, ...], name: str) -> None:
    draft = replace(next(d for d in map(build.Settings(1, 1, families=("reduce",)).candidate, range(9))), words=words)
    draft = replace(draft, expert=draft.expert + "total = BLOCK.total_sum\n")
    assert draft.entry(set()) == name and draft.entry({name}) == f"{name}_2"


def test_functions_of_a_softmax_know_the_sign_of_its_values() -> None:
    """relu of a log-softmax is zero: every cheap answer passes."""
    settings = build.Settings(1, 41, families=("softmax",))
    summaries = [settings.candidate(k).summary for k in range(300)]
    assert any("log(sum(exp" in s for s in summaries)
    assert not [s for s in summaries if re.search(r"max\(p, 0\)|\|p\||min\(max\(p, -3\), 3\)", s) and "log(sum(exp" in s]


@pytest.mark.parametrize("family", ["reduce", "backward_reduce"])
def test_a_variance_has_rows_of_two_elements(family: str) -> None:
    """The exact answer for one element is zero; a kernel that rounds a product and a difference once is infinitely wrong."""
    settings = build.Settings(1, 5, families=(family,))
    drafts = [settings.candidate(k) for k in range(60)]
    for draft in drafts:
        alone = re.search(r'"N": 1\b', draft.fields["cases"]) is not None
        assert alone == ("var" not in draft.words)
        assert f"N is at least {1 if alone else 2}" in " ".join(draft.details)
    assert 0 < sum("var" in d.words for d in drafts) < 60


@pytest.mark.parametrize("family", ["scan", "reduce", "pick"])
def test_what_stands_behind_a_statistic_knows_its_sign(family: str) -> None:
    """No |r| or max(r, 0) where r is the maximum of values that are positive."""
    settings = build.Settings(1, 8, families=(family,))
    bodies = [settings.candidate(k).body for k in range(300)]
    positive = [b for b in bodies if re.match(r"z = (torch\.(sigmoid|square|exp|sqrt|log1p)|F\.softplus)\(", b[0])]
    assert len(positive) > 10
    assert not [b for b in positive if re.search(r"(torch\.abs|torch\.relu|F\.elu)\(r\)", b[-1]) and "logsumexp" not in b[1]]


def test_the_difference_of_a_statistic_and_an_element_is_not_zero_in_every_row() -> None:
    settings = build.Settings(1, 3, families=("pick",))
    drafts = [d for d in (settings.candidate(k) for k in range(300)) if "r - t" in d.body[-1]]
    assert drafts
    for draft in drafts:
        assert '"N": 1}' not in draft.fields["cases"] and "N is at least 2" in " ".join(draft.details)


def test_a_backward_pass_makes_only_the_passes_it_needs() -> None:
    row = rows.Row(("x",), leaf("x"), "last", "f32")
    assert row.passes("variance", "z - s / n").count("for k0") == 1 and "stat" not in row.passes("variance", "z - s / n")
    assert row.passes("variance").count("for k0") == 2 and row.passes("sum", "upstream") == ""
    assert row.passes("logsumexp", "tl.exp(z - m) / s").count("for k0") == 2


DEFAULT = ("backward_norm",)


@pytest.mark.parametrize("family", [pytest.param(f, marks=[] if f in DEFAULT else [pytest.mark.full]) for f in families()])
def test_a_family_draws_tasks_without_faults(tmp_path: Path, family: str) -> None:
    settings = build.Settings(SEEDS, 3, families=(family,), name=f"f_{family}")
    builder = build._Builder(settings, tmp_path / family, 1, lambda *numbers: None)
    builder._open()
    seen, levels, texts = 0, set(), set()
    for candidate, _ in zip(builder._candidates(), range(SEEDS)):
        levels.add(candidate.draft.difficulty)
        texts.add(" ".join([candidate.draft.summary, *candidate.draft.details]))
        compile(candidate.draft.expert_file(candidate.entry), "expert", "exec")
        if candidate.twin is None and seen < 2:
            seen += 1
            task = load_task(candidate.task)
            found = [f for check in (task_checks._signature, task_checks._examples, task_checks._cases) for f in check(task)]
            assert found == [], found
    assert seen and len(levels) > 1 and len(texts) > SEEDS // 2


def test_one_candidate_of_a_seed_is_always_the_same() -> None:
    first, second = (build.Settings(5, 11) for _ in range(2))
    assert [first.candidate(k) for k in range(20)] == [second.candidate(k) for k in range(20)]
    assert build.Settings(5, 12).candidate(0) != first.candidate(0)


def _write(root: Path, name: str, signature: str, body: str) -> str:
    assert main(["new-task", f"activation/{name}", "--pack", str(root)]) == 0
    file = root / "activation" / f"{name}.py"
    text = file.read_text().replace("(input, slope=1.0):", f"{signature}:").replace("input * torch.sigmoid(slope * input)", body)
    text = text.replace('{"input": T("*")}', '{"input": T("*"), "other": T("*")}') if "other" in signature else text
    file.write_text(text)
    return f"activation/{root.name}.{name}"


def test_probes_never_tell_equal_results_apart() -> None:
    draw = random.Random(0)
    special = [0.0, -0.0, 1.0, math.inf, -math.inf, math.nan, 1e300, 1e-13]
    equals = 0
    for _ in range(2000):
        shapes = [draw.choice([(), (0,), (1,), (2,), (5,), (2, 3)]) for _ in range(draw.randint(1, 2))]
        drawn = [(s, [draw.choice(special) for _ in range(math.prod(s))]) for s in shapes]
        one = tuple(torch.tensor(values, dtype=torch.float64).reshape(s) for s, values in drawn)
        noise = draw.choice([0.0, 0.9e-9, 1e-9, 1.1e-9, 1e-3])
        other = tuple((t * (1 + noise)).reshape(draw.choice([t.shape, (t.numel(),)])) for t in one)
        same = duplicates.equal(one, other)
        equals += same
        assert duplicates.near(duplicates.probes(one), duplicates.probes(other)) or not same
    assert equals > 300
    two = (torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64),)
    assert not duplicates.near(duplicates.probes(two), duplicates.probes((two[0] + 1,))), "most results are told apart"
    assert not duplicates.near(duplicates.probes(two), duplicates.probes((two[0].reshape(1, 3),)))


def test_equal_functions_are_found_by_their_values(tmp_path: Path) -> None:
    root = tmp_path / "twins"
    names = [
        _write(root, "one", "(input, slope=1.0)", "torch.nn.functional.gelu(input)"),
        _write(root, "two", "(input, slope=1.0)", "input / (1 + torch.exp(-input))"),
        _write(root, "three", "(input, slope=1.0)", "input * torch.sigmoid(input)"),
        _write(root, "four", "(input, other, slope=1.0)", "torch.tanh(input) - other"),
        _write(root, "five", "(other, input, slope=1.0)", "other.tanh() - input"),
        _write(root, "six", "(input, other, slope=1.0)", "input.tanh() + other"),
    ]
    packs.find(str(root))
    known = Known()
    found = [known.twin(load_task(n)) for n in names]
    assert found[0] in ("activation/gelu", "activation/gelu_fp16", "activation/gelu_bf16") and found[1] is None
    assert found[2] == names[1] and found[3] is None and found[4] == names[3] and found[5] is None


def test_processes_that_prove_are_replaced_and_every_proof_is_done(monkeypatch) -> None:
    monkeypatch.setattr(build, "prove", os.getpid)
    monkeypatch.setattr(build, "_start", os.getpid)
    monkeypatch.setattr(build, "RENEWED", 2)
    with contextlib.closing(build._Provers(1)) as provers:
        waiting = [provers.submit() for _ in range(5)]  # more than a process is given
        ids = [future.result(60) for future in waiting]
    assert ids[0] == ids[1] and ids[2] == ids[3] and len(set(ids)) == 3


class _Slow:
    """Stands for the processes: a result is there when it is asked for. Counts what was given until the first result."""

    given = early = 0

    def __init__(self, workers: int) -> None:
        pass

    def submit(self, *args: object) -> Future[tuple[list[str], str, float]]:
        _Slow.given += 1
        return _Slow._Later()

    def close(self) -> None:
        pass

    class _Later(Future[tuple[list[str], str, float]]):
        def result(self, timeout: float | None = None) -> tuple[list[str], str, float]:
            _Slow.early = _Slow.early or _Slow.given
            return [], "1", 0.1


def test_processes_have_work_while_the_oldest_proof_runs_and_hardly_more_than_the_pack_needs(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(build, "_Provers", _Slow)
    card = build.build(build.Settings(30, 7, families=("pointwise",), name="slow"), tmp_path / "out", 2, lambda *numbers: None).card
    assert card["tasks"] == 30
    assert _Slow.early == build.AHEAD * 2 and 30 <= _Slow.given <= 34


def _repeated(*args: object) -> None:
    """Takes the place of ``prove``. A function of a module, so that it reaches a worker process."""
    raise AssertionError("a proof was repeated")


@pytest.mark.full
def test_a_pack_is_generated_resumed_and_graded(tmp_path: Path, monkeypatch, grader) -> None:
    out = tmp_path / "out"
    result = build.build(SMALL, out, 1, lambda *numbers: None)
    card = json.loads((out / packs.CARD).read_text())
    assert card == json.loads(json.dumps(result.card)) and card["tasks"] == 2 and card["families"] == {"pointwise": 2}
    rows = [json.loads(line) for line in (out / build.KERNELS).read_text().splitlines()]
    for row in rows:
        assert row["predict"] == expert_source(row["task"])
        outcome = grader.grade(row["task"], row["predict"], backend="cpu", targets=("sm_90",), split="eval")
        assert outcome.correct, outcome.message
    # Proofs are kept: another run proves nothing and writes the same.
    before = {p: p.read_bytes() for p in out.rglob("*.py")}
    kept = (out / build.PROOFS).read_text()
    monkeypatch.setattr(build, "prove", _repeated)
    assert build.build(SMALL, out, 1, lambda *numbers: None).card == result.card
    with pytest.raises(UsageError, match="holds a pack of other settings"):
        build.build(build.Settings(3, 7), out, 1, lambda *numbers: None)
    assert before == {p: p.read_bytes() for p in out.rglob("*.py")} and kept == (out / build.PROOFS).read_text()


def test_kernels_of_optimizers_take_numbers_that_the_host_computed() -> None:
    """In fp32 the difference 1 - 0.99 is wrong by 25 units, and a kernel that forms it was refused among 33 million numbers."""
    drafts = [optimizers.optimizer(random.Random(k), 1 + k % 5) for k in range(80)]
    assert not [d.words for d in drafts if re.search(r"1\.0 - [a-z]", d.expert.split("def ENTRY")[0])]
    shared = [d for d in drafts if "one_beta2" in d.expert]
    assert shared and all("float(1.0 - beta2)" in d.expert and "double precision" in d.details[-1] for d in shared)
    plain = [d for d in drafts if d.words[0] == "sgd" and "decoupled_decay" not in d.words]
    assert plain and all("double" not in d.details[-1] for d in plain)


def test_bad_settings_are_named(tmp_path: Path, capsys) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("x")
    base = ["generate", "--seed", "1", "--out", str(tmp_path / "full")]
    for more, said in (
        (["--count", "0"], "--count is 0"), (["--count", "1", "--difficulty", "6"], "difficulty 6"),
        (["--count", "1", "--difficulty", "x"], "--difficulty 'x'"), (["--count", "1", "--families", "nrom"], "did you mean: norm"),
        (["--count", "1", "--workers", "0"], "--workers is 0"), (["--count", "1"], "is not empty"),
    ):  # fmt: skip
        assert main([*base, *more]) == 2 and said in capsys.readouterr().err
