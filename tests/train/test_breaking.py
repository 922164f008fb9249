"""Wrong versions of right kernels: different, repeatable, in the same place under other names, and shown with their verdicts."""

from __future__ import annotations

import ast
import dataclasses
import inspect
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
from kbx_env.train import breaking, data  # noqa: E402
from kbx_env.train.compact import compact  # noqa: E402
from kbx_env.train.copying import copies, retold  # noqa: E402

SOME = ("math/erfc_sqrt", "loss/cross_entropy", "matrixmultiply/tril_mm_and_scale", "fusion/fused_cos_signbit")


def short(task: str) -> str:
    return compact(expert_source(task) or "", load_task(task).entry)


@pytest.mark.parametrize("task", SOME)
def test_each_version_has_one_fault_of_its_kind(task: str) -> None:
    source = short(task)
    found = breaking.broken(source, 10, 0)
    assert [kind for kind, _ in found[:5]] == list(breaking.KINDS) and len({text for _, text in found}) == 10
    assert found == breaking.broken(source, 10, 0) != breaking.broken(source, 10, 1) and found[:4] == breaking.broken(source, 4, 0)
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
    for kind, wrong in breaking.broken(source, 40, seed):
        assert wrong.startswith(head) and (repr(text) in wrong or kind == "line")
        if kind != "bracket":
            ast.parse(wrong)


@pytest.mark.parametrize("task_id", SOME)
def test_a_copy_is_broken_in_the_same_place(task_id: str) -> None:
    task, source = load_task(task_id), short(task_id)
    mine = breaking.broken(source, 8, "s")
    for told, text in copies(task, source, 3, 1):
        theirs = breaking.broken(text, 8, "s")
        assert [k for k, _ in theirs] == [k for k, _ in mine]
        for (_, one), (_, other) in zip(mine, theirs, strict=True):
            # The same letters are gone or new: what differs besides is names.
            assert len(one) - len(source) == len(other) - len(text)
            assert one.count("\n") == other.count("\n") and told.entry in other


def test_a_verdict_on_a_copy_speaks_of_the_copy() -> None:
    task = load_task("loss/cross_entropy")
    parameters = [p.replace(name="seen" if p.name == "target" else p.name) for p in task.signature.parameters.values()]
    told = dataclasses.replace(task, entry="g", signature=inspect.Signature(parameters))
    here, there = "    return k(target_0, target=target + zz)", "    return k(seen_0, target=seen + zz)"
    wrong, shown = f"def cross_entropy(input, target, out):\n{here}\n", f"def g(input, seen, out):\n{there}\n"

    def said(line: str, name: str, case: str) -> str:
        at = line.index("zz")
        return (
            f"Reason: line 2: CompilationError: at 2:{at}:\n{line}\n{' ' * at}^\nNameError('zz is not defined')\n"
            f"Reason: name '{name}' is not defined; list index out of range, an out-of-bounds load\n"
            f"- *=(3,) {case} strided: the target"
        )

    assert retold(said(here, "target_0", "target"), wrong, task, shown, told) == said(there, "seen_0", "seen")
    assert retold("", wrong, task, shown + "\n", told) is None, "not the same module"


def test_nothing_to_break_is_no_fault() -> None:
    assert breaking.broken("import torch\n", 5, 0) == [] and breaking.broken("def f(x):\n    return 1\n", 0, 0) == []


def judge(task: str, source: bytes, **options: Any) -> Outcome:
    """Right as it is; a name with an end behind it is a crash, a bracket less malformed, another line too slow; else right."""
    text, common = source.decode(), (Stage.CORRECT, "cpu", "contract", Fault.POLICY)
    entry = load_task(task).entry
    try:
        ast.parse(text)
    except SyntaxError as e:
        return Outcome(task, Verdict.MALFORMED, *common, f"line {e.lineno}: syntax error in {entry}")
    if "    pass\n" in text:
        return Outcome(task, Verdict.TIMEOUT, *common, "slow")
    if text != short(task):
        return Outcome(task, Verdict.INCORRECT, *common, f"wrong values of {entry}", cases=Cases(0, 1))
    return Outcome(task, Verdict.CORRECT, Stage.EVIDENCE, "cpu", "contract", cases=Cases(1, 1))


def repairs(**more: Any) -> Any:
    tasks = load_tasks(split="train", pattern="erfc_sqrt,fused_cos_signbit")
    given = {"variations": 0, "style": "compact", "progress": False, "grade": judge, **more}
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
        outcome = judge(row["task"], strip_fences(wrong["content"]).encode())
        assert outcome.verdict in data.MENDED, "what timed out is not shown"
        assert reply["content"] == follow_up(feedback(outcome)) and asked["content"].startswith(f"Task {row['task']}:")
    assert repairs(repairs=0).to_list() == [r for r in plain if "repair" not in r["variation"]]


def test_copies_take_wrong_versions_by_turns_in_their_own_names() -> None:
    every = repairs(repairs=6, copies=3)
    rows = [r for r in every if r["task"] == "fusion/fused_cos_signbit" and r["variation"].startswith("copy")]
    several = [r for r in rows if "repair" in r["variation"]]
    assert len(rows) == 2 * len(several) == 6 and len({r["variation"].split("repair-")[1] for r in several}) > 1
    for row in several:
        whole = "".join(m["content"] for m in row["prompt"] + row["completion"])
        assert "fused_cos_signbit" not in whole.split("Contract")[-1], "the real name is told nowhere"
        name = row["completion"][0]["content"].split("def ")[1].split("(")[0]
        assert f"def {name}(" in row["prompt"][1]["content"] and name in row["prompt"][2]["content"]


def test_a_negative_number_is_refused() -> None:
    with pytest.raises(UsageError, match="repairs is -1"):
        repairs(repairs=-1)
