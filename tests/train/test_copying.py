"""Demonstrations under made-up names: prompt and answer agree, and what the kernel means stays."""

from __future__ import annotations

import ast
import re

import pytest
from kbx_env.train.vary import with_contract

from kbx_env.spec.catalog import expert_source, load_task, load_tasks

pytest.importorskip("datasets")
from kbx_env.train import data  # noqa: E402
from kbx_env.train.compact import compact  # noqa: E402
from kbx_env.train.copying import copies, words  # noqa: E402

from kbx_env.outcome import Cases, Outcome, Stage, Verdict  # noqa: E402


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
    own = [r for r in made.dataset if r["variation"] == data.EXPERT]
    assert len(own) == 2 and all("#" not in r["completion"][0]["content"] for r in own)
    for row in made.dataset:
        if row["variation"] != data.EXPERT:
            assert re.fullmatch(r"copy-\d-expert", row["variation"]) and row["task"] in {t.id for t in tasks}
            (name,) = re.findall(r"defines `(\w+)\(", row["prompt"][0]["content"])
            assert f"\ndef {name}(" in row["completion"][0]["content"] and name not in data.eval_entries()


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
