"""Wrong versions of right kernels: different, repeatable, in the same place under other names, and shown with their verdicts."""

from __future__ import annotations

import ast
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kbx_env.envs.answer import strip_fences
from kbx_env.envs.prompt import feedback
from kbx_env.errors import UsageError
from kbx_env.outcome import Cases, Fault, Outcome, Stage, Verdict
from kbx_env.spec.catalog import expert_source, load_task, load_tasks

pytest.importorskip("datasets")
from kbx_env.baselines.llm.conversation import follow_up  # noqa: E402
from kbx_env.train import data, mutation  # noqa: E402

SOME = ("math/erfc_sqrt", "loss/cross_entropy", "matrixmultiply/tril_mm_and_scale", "fusion/fused_cos_signbit")


def expert(task: str) -> str:
    return expert_source(task) or ""


@pytest.mark.parametrize("task", SOME)
def test_each_version_has_one_fault_of_its_kind(task: str) -> None:
    source = expert(task)
    found = mutation.broken(source, 10, 0)
    assert [kind for kind, _ in found[:5]] == list(mutation.KINDS) and len({text for _, text in found}) == 10
    assert found == mutation.broken(source, 10, 0) != mutation.broken(source, 10, 1) and found[:4] == mutation.broken(source, 4, 0)
    for kind, text in found:
        if kind == "bracket":
            with pytest.raises(SyntaxError):
                ast.parse(text)
        else:
            assert ast.dump(ast.parse(text)) != ast.dump(ast.parse(source))


@given(st.integers(0, 10**6), st.sampled_from(["", "é", "'ü ∑' # ß"]))
@settings(max_examples=60, deadline=None)
def test_places_are_counted_in_letters_not_bytes(seed: int, text: str) -> None:
    head = "import torch\n\n\ndef f(x, dim=-1):\n"
    source = f"{head}    y = {text!r}; z = x + g(x, 3) * 2\n    if dim < 0:\n        z = 1\n        dim = 2\n    return z\n"
    for kind, wrong in mutation.broken(source, 40, seed):
        assert wrong.startswith(head) and (repr(text) in wrong or kind == "line")
        if kind != "bracket":
            ast.parse(wrong)


def test_nothing_to_break_is_no_fault() -> None:
    assert mutation.broken("import torch\n", 5, 0) == [] and mutation.broken("def f(x):\n    return 1\n", 0, 0) == []


def grader(task: str, source: bytes, **options: Any) -> Outcome:
    """Right as it is; a name with an end behind it is a crash, a bracket less malformed, another line too slow; else right."""
    text, common = source.decode(), (Stage.CORRECT, "cpu", "contract", Fault.POLICY)
    entry = load_task(task).entry
    try:
        ast.parse(text)
    except SyntaxError as e:
        return Outcome(task, Verdict.MALFORMED, *common, f"line {e.lineno}: syntax error in {entry}")
    if "    pass\n" in text:
        return Outcome(task, Verdict.TIMEOUT, *common, "slow")
    if text != expert(task):
        return Outcome(task, Verdict.INCORRECT, *common, f"wrong values of {entry}", cases=Cases(0, 1))
    return Outcome(task, Verdict.CORRECT, Stage.EVIDENCE, "cpu", "contract", cases=Cases(1, 1))


def repairs(**more: Any) -> Any:
    tasks = load_tasks(split="train", pattern="erfc_sqrt,fused_cos_signbit")
    given = {"variations": 0, "progress": False, "grade": grader, **more}
    return data.demonstrations(tasks, **given).dataset


def test_a_repair_shows_the_wrong_answer_and_its_verdict() -> None:
    plain = repairs(repairs=6)
    kinds = Counter(v.split("-")[0] for v in plain["variation"])
    assert kinds["expert"] == 2 and 4 <= kinds["repair"] <= 10
    for row in plain:
        right = row["completion"][0]["content"]
        if not row["variation"].startswith("repair-"):
            assert len(row["prompt"]) == 1
            continue
        asked, wrong, reply = row["prompt"]
        assert [m["role"] for m in row["prompt"]] == ["user", "assistant", "user"] and wrong["content"] != right
        outcome = grader(row["task"], strip_fences(wrong["content"]).encode())
        assert outcome.verdict in data.MISTAKES, "what timed out is not shown"
        assert reply["content"] == follow_up(feedback(outcome)) and asked["content"].startswith(f"Task {row['task']}:")
    assert repairs(repairs=0).to_list() == [r for r in plain if "repair" not in r["variation"]]


def test_a_negative_number_is_refused() -> None:
    with pytest.raises(UsageError, match="repairs is -1"):
        repairs(repairs=-1)
