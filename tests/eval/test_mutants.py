"""The mutation run: small changes that keep the source readable, the same ones for every run."""

from __future__ import annotations

import ast

from kbx_env.eval import mutants

from kbx_env.spec.catalog import expert_source, task_ids

SOURCE = """import triton
import triton.language as tl


@triton.jit
def _k(x, y, n, B: tl.constexpr):
    o = tl.program_id(0) * B + tl.arange(0, B)
    v = tl.load(x + o, mask=o < n, other=0.0).to(tl.float32)
    tl.store(y + o, tl.maximum(v, -1.5), mask=o < n)


def f(x):
    y = x.contiguous()
    if y.numel():
        _k[(1,)](x, y, 8, B=16, num_warps=4)
    return y
"""


def test_each_kind_of_change_is_found_and_leaves_python() -> None:
    found = mutants.mutants(SOURCE)
    kinds = {m.kind for m in found}
    assert kinds >= {"comparison", "operator", "constant", "sign", "mask", "function", "dtype", "branch", "stride"}
    for mutant in found:
        changed = mutant.applied(SOURCE)
        assert changed != SOURCE and SOURCE[mutant.start :].startswith(mutant.before)
        ast.parse(changed)
    assert not any(m.before == "16" or m.before == "4" for m in found), "knobs are left alone"


def test_the_choice_depends_on_seed_and_task_alone() -> None:
    text = expert_source("reduce/sum")
    assert text is not None
    first, again, other = (mutants.chosen("reduce/sum", text, 5, seed) for seed in (1, 1, 2))
    assert first == again != other and len(first) == 5


def test_a_place_that_is_reached_raises() -> None:
    kernel = mutants.crashed(
        SOURCE, SOURCE.split("\n").index("    tl.store(y + o, tl.maximum(v, -1.5), mask=o < n)") + 1
    )
    assert kernel is not None and mutants.CRASH in kernel
    host = mutants.crashed(SOURCE, SOURCE.split("\n").index("    y = x.contiguous()") + 1)
    assert host is not None and 'raise RuntimeError("reached")' in host
    assert mutants.crashed(SOURCE, 1) is None


def test_survivors_are_listed_by_kind() -> None:
    row = {"task": "a/b", "kind": "sign", "line": 3, "before": "-1", "after": "1", "code": "x | y", "reached": True}
    row |= {"why": None, "seconds": 1.5}
    text = mutants.table(
        [row | {"survives": True}, row | {"survives": False}, row | {"survives": False, "reached": False},
         row | {"survives": False, "why": "a block size"}]
    )  # fmt: skip
    assert "| sign | 3 | 1 | 1 | 1 |" in text and "x \\| y" in text
    assert "| a block size | 1 |" in text and "1 further mutants" in text and "6 s of grading" in text


def test_every_rule_of_equivalent_mutants_belongs_to_a_change_of_the_experts_and_has_a_reason() -> None:
    """A rule outlives its code unnoticed otherwise, and could hide another change later."""
    rules = mutants.equivalents()
    lines: dict[tuple[str, str], list[str]] = {}
    for task in task_ids():
        for mutant in {(m.function, m.code) for m in mutants.mutants(expert_source(task) or "")}:
            lines.setdefault(mutant, []).append(task)
    for rule in rules:
        assert set(rule) == {"function", "code", "before", "after", "tasks", "why"} and rule["why"].endswith("."), rule
        tasks = lines.get((rule["function"], rule["code"]), [])
        assert tasks, f"no expert has this line: {rule}"
        if rule["tasks"] != "*":
            assert set(rule["tasks"].split(",")) <= set(tasks), rule


def test_a_mutant_is_equivalent_by_function_line_change_and_task() -> None:
    rule = {
        "function": "f",
        "code": "if n:",
        "before": "n",
        "after": "True",
        "tasks": "math/*",
        "why": "An empty grid.",
    }
    mutant = mutants.Mutant("branch", 3, "n", "True", 40, "f", "if n:")
    assert mutants.matches(rule, "math/erf", mutant) and mutants.matches(rule | {"after": "*"}, "math/erf", mutant)
    assert not mutants.matches(rule, "reduce/sum", mutant)
    assert not mutants.matches(rule | {"after": "False"}, "math/erf", mutant)
    found = {m.function for m in mutants.mutants(SOURCE)}
    assert found == {"_k", "f"}


def test_every_mutant_comes_once_and_shared_changes_last() -> None:
    jobs = list(mutants._jobs("reduce/*", None, 1, ()))
    assert len({(task, m.start, m.after) for task, _, m, _ in jobs}) == len(jobs)
    assert {task for task, *_ in jobs} == {t for t in task_ids() if t.startswith("reduce/")}
    changes = [(m.function, m.code, m.before, m.after, m.start - text.rfind("\n", 0, m.start)) for _, text, m, _ in jobs]
    different = len(set(changes))
    assert different < len(jobs), "experts share functions"
    assert len(set(changes[:different])) == different
