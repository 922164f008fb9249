"""Demonstrations under made-up names: prompt and answer agree, and what the kernel means stays."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections import Counter
from typing import Any

import pytest

from kbx_env.envs.answer import strip_fences
from kbx_env.envs.prompt import feedback
from kbx_env.errors import UsageError
from kbx_env.outcome import Cases, Fault, Outcome, Stage, Verdict
from kbx_env.spec.catalog import expert_source, load_task, load_tasks

pytest.importorskip("datasets")
from kbx_env.baselines.llm.conversation import follow_up  # noqa: E402
from kbx_env.train import data as train_data  # noqa: E402
from kbx_env.train import mutation  # noqa: E402

from experiments.small_models import data  # noqa: E402
from experiments.small_models.compact import compact  # noqa: E402
from experiments.small_models.copying import copies, translated, with_contract, words  # noqa: E402

SOME = ("math/erfc_sqrt", "loss/cross_entropy", "matrixmultiply/tril_mm_and_scale", "fusion/fused_cos_signbit")


def approve(task: str, source: bytes, **options: object) -> Outcome:
    return Outcome(task, Verdict.CORRECT, Stage.EVIDENCE, "cpu", "contract", cases=Cases(1, 1))


@pytest.mark.parametrize("task_id", ["math/erfc_sqrt", "math/cos", "random/logspace", "optimizer/Lion", "reduce/mean"])
def test_prompt_and_answer_have_the_same_new_name(task_id: str) -> None:
    task, seen = load_task(task_id), set()
    source = compact(expert_source(task_id) or "", task.entry)
    made = copies(task, source, 6, 0)
    assert len(made) == 6 and [t for _, t in made] == [t for _, t in copies(task, source, 6, 0)]
    for told, text in made:
        (found,) = (n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef) and n.name == told.entry)
        arguments = [a.arg for a in (*found.args.posonlyargs, *found.args.args, *found.args.kwonlyargs)]
        assert arguments == list(told.signature.parameters) and told.id == f"{task_id.split('/')[0]}/{told.entry}"
        assert not re.search(rf"(?<!\w|\.|=){task.entry}\(", text), "nothing calls it by its old name"
        names = dict(zip(told.signature.parameters, task.signature.parameters, strict=True)) | {told.entry: task.entry}
        assert with_contract(text, told.entry, {n: o for n, o in names.items() if n != o}) == source
        seen.add(told.entry)
    assert len(seen) > 4


def test_a_name_that_a_text_speaks_of_does_not_change() -> None:
    source = "def f(x, mode):\n    return {'mode': x}\n"
    assert with_contract(source, "f", {"f": "g"}) == "def g(x, mode):\n    return {'mode': x}\n"
    assert with_contract(source, "f", {"mode": "kind"}) is None
    assert with_contract(source, "f", {"f": "x"}) is None, "a name that is taken"
    assert with_contract("def sum(input):\n    return torch.sum(input=input)\n", "sum", {"sum": "all_of", "input": "given"}) == (
        "def all_of(given):\n    return torch.sum(input=given)\n"
    )


def test_copies_are_rows_that_say_so_and_are_not_graded() -> None:
    graded: list[bytes] = []

    def grade(task: str, source: bytes, **options: object) -> Outcome:
        graded.append(source)
        return approve(task, source)

    tasks = load_tasks(split="train", pattern="erfc_sqrt,cos")
    made = data.demonstrations(tasks, variations=0, copies=3, style="compact", grade=grade, progress=False)
    assert len(graded) == 2 and len(made.dataset) == 8
    own = [r for r in made.dataset if r["variation"] == train_data.EXPERT]
    assert len(own) == 2 and all("#" not in r["completion"][0]["content"] for r in own)
    for row in made.dataset:
        if row["variation"] != train_data.EXPERT:
            assert re.fullmatch(r"copy-\d-expert", row["variation"]) and row["task"] in {t.id for t in tasks}
            (name,) = re.findall(r"defines `(\w+)\(", row["prompt"][0]["content"])
            assert f"\ndef {name}(" in row["completion"][0]["content"] and name not in train_data.eval_entries()


def test_names_are_made_of_the_train_splits_words() -> None:
    assert len(words()) > 500 and all(w.isalpha() and w.islower() for w in words())
    assert {"libdevice", "input", "softmax"} <= set(words())


def test_compact_keeps_what_is_called() -> None:
    source = (
        '"""A module."""\nfrom __future__ import annotations\nimport math\nimport torch, triton\nLIMIT = 3\n\n\n'
        'def used(x):  # a comment\n    """Text."""\n    return triton.cdiv(x,\n        LIMIT)\n\n\n'
        "def inner():\n    pass\n\n\ndef unused():\n    return inner() + math.pi\n\n\ndef f(x):\n    return used(x)\n"
    )
    assert compact(source, "f") == (
        "from __future__ import annotations\nimport torch\nimport triton\nimport triton.language as tl\n\n"
        "def f(x):\n    return used(x)\nLIMIT = 3\n\ndef used(x):\n    return triton.cdiv(x, LIMIT)\n"
    ), "the entry first"
    for task in load_tasks(split="train"):
        text = compact(expert_source(task.id) or "", task.entry)
        assert compact(text, task.entry) == text and len(text) <= len(expert_source(task.id) or "")


@pytest.mark.parametrize("head", [
    "EPS = 1e-5\n\ndef f(x, eps=EPS):\n", "from torch import Tensor\n\ndef f(x: Tensor):\n",
    "import functools\n\n@functools.cache\ndef f(x):\n", "def f(x):\n    return 1\nold = f\n\ndef f(x):\n",
])  # fmt: skip
def test_an_entry_that_needs_the_module_stays_where_it_is(head: str) -> None:
    text = compact(f"import torch\nimport triton\n{head}    return g(x)\n\ndef g(x):\n    return x\n", "f")
    module: dict[str, object] = {}
    exec(text, module)
    assert module["f"](3) == 3  # type: ignore[operator]
    if "old" in head:
        assert module["old"](3) == 1  # type: ignore[operator]


def test_most_copies_have_other_parameters() -> None:
    task = load_task("math/mul")
    made = copies(task, compact(expert_source(task.id) or "", task.entry), 60, 0)
    changed = sum(list(told.signature.parameters) != list(task.signature.parameters) for told, _ in made)
    assert len(made) == 60 and 30 < changed < 55


def short(task: str) -> str:
    return compact(expert_source(task) or "", load_task(task).entry)


@pytest.mark.parametrize("task", SOME)
def test_each_version_has_one_fault_of_its_kind(task: str) -> None:
    source = short(task)
    found = mutation.broken(source, 10, 0)
    assert [kind for kind, _ in found[:5]] == list(mutation.KINDS) and len({text for _, text in found}) == 10
    assert found == mutation.broken(source, 10, 0) != mutation.broken(source, 10, 1) and found[:4] == mutation.broken(source, 4, 0)
    for kind, text in found:
        if kind == "bracket":
            with pytest.raises(SyntaxError):
                ast.parse(text)
        else:
            assert ast.dump(ast.parse(text)) != ast.dump(ast.parse(source))


@pytest.mark.parametrize("task_id", SOME)
def test_a_copy_is_broken_in_the_same_place(task_id: str) -> None:
    task, source = load_task(task_id), short(task_id)
    mine = mutation.broken(source, 8, "s")
    for told, text in copies(task, source, 3, 1):
        theirs = mutation.broken(text, 8, "s")
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

    assert translated(said(here, "target_0", "target"), wrong, task, shown, told) == said(there, "seen_0", "seen")
    assert translated("", wrong, task, shown + "\n", told) is None, "not the same module"


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
    if text != short(task):
        return Outcome(task, Verdict.INCORRECT, *common, f"wrong values of {entry}", cases=Cases(0, 1))
    return Outcome(task, Verdict.CORRECT, Stage.EVIDENCE, "cpu", "contract", cases=Cases(1, 1))


def repairs(**more: Any) -> Any:
    tasks = load_tasks(split="train", pattern="erfc_sqrt,fused_cos_signbit")
    given = {"variations": 0, "style": "compact", "progress": False, "grade": grader, **more}
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
        assert outcome.verdict in train_data.MISTAKES, "what timed out is not shown"
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
