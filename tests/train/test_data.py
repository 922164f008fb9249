"""Training data: the prompt that a policy sends, and demonstrations that were graded, of the train split alone."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from kbx_env.baselines.llm.access import Access
from kbx_env.baselines.llm.chat import ChatRequest, Finish, Reply
from kbx_env.baselines.llm.local import LocalModel
from kbx_env.baselines.policy import make_policy

from kbx_env.envs.answer import strip_fences
from kbx_env.envs.kernel_env import KernelEnv
from kbx_env.errors import UnknownName, UsageError
from kbx_env.outcome import Cases, Fault, Outcome, Stage, Verdict
from kbx_env.spec.catalog import expert_source, load_task, load_tasks, splits
from kbx_env.store import Store

pytest.importorskip("datasets")
from kbx_env.train import data, models, rows  # noqa: E402

FEW = "erfc_sqrt,index_select"


def approve(task: str, source: bytes, **options: object) -> Outcome:
    return Outcome(task, Verdict.CORRECT, Stage.EVIDENCE, "cpu", "contract", cases=Cases(1, 1))


def refuse_renamed(task: str, source: bytes, **options: object) -> Outcome:
    if source.decode() == expert_source(task):
        return approve(task, source)
    return Outcome(task, Verdict.INCORRECT, Stage.CORRECT, "cpu", "contract", Fault.POLICY, "wrong")


def test_a_prompt_is_token_for_token_what_the_policy_sends(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[LocalModel, ChatRequest]] = []

    def complete(self: LocalModel, ask: ChatRequest) -> Reply:
        asked.append((self, ask))
        return Reply("```python\nx = 1\n```", Finish.STOP)

    monkeypatch.setattr(LocalModel, "complete", complete)
    policy: Any = make_policy(f"hf:{model_folder}", Access(device="cpu"))
    tokenizer = models.tokenizer_for(model_folder)
    tasks = load_tasks(split="train", pattern=FEW)
    for row in data.prompts(tasks, "cpu"):
        env = KernelEnv(backend="cpu", task=row["task"], split="all")
        observation, _ = env.reset()
        policy.act(observation)
        env.close()
        model, ask = asked[-1]
        mine = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True)
        mine = mine["input_ids"] if isinstance(mine, Mapping) else mine
        assert list(mine) == model.prompt_ids(ask), "the key more changes nothing"
        assert row["prompt"][-1]["task"] == row["task"] == load_task(row["task"]).id


@pytest.mark.parametrize("template", ["qwen3", "qwen3_instruct_2507", "qwen2_5", "llama3", "deepseek_r1_distill"])
def test_templates_do_not_look_at_the_key_more(model_folder: Path, template: str) -> None:
    tokenizer = models.tokenizer_for(model_folder)
    tokenizer.chat_template, tokenizer.bos_token = models.template_of(template), "<|endoftext|>"
    (row,) = data.prompts(load_tasks(pattern="erfc_sqrt"), "cuda")
    plain = [{k: m[k] for k in ("role", "content")} for m in row["prompt"]]
    one, other = (tokenizer.apply_chat_template(p, add_generation_prompt=True, tokenize=False) for p in (row["prompt"], plain))
    assert one == other and plain[0]["content"] in one


def test_rows_repeat_with_seeds_of_their_own() -> None:
    tasks = load_tasks(pattern=FEW)
    made = data.prompts(tasks, "cpu", repeats=3, seed=1)
    assert len(made) == 6 and len(set(made["seed"])) == 6 and all(0 <= s < 2**31 for s in made["seed"])
    assert made["seed"] == data.prompts(tasks, "cpu", repeats=3, seed=1)["seed"] != data.prompts(tasks, "cpu", repeats=3)["seed"]
    assert made["task"] == [t.id for t in tasks] * 3
    for wrong in ({"repeats": 0}, {"backend": "auto"}):
        with pytest.raises(UsageError):
            data.prompts(tasks, **{"backend": "cpu", **wrong})  # type: ignore[arg-type]


def test_demonstrations_are_answers_to_the_same_prompt(shown: Path) -> None:
    made = data.load(shown)
    assert set(made.column_names) == {"prompt", "completion", "task", "category", "difficulty", "variation"}
    for row in made:
        (asked,) = data.prompts([load_task(row["task"])], "cpu")
        assert row["prompt"] == [{k: asked["prompt"][0][k] for k in ("role", "content")}]
        (answer,) = row["completion"]
        assert answer["role"] == "assistant" and answer["content"].startswith("```python\n") and answer["content"].endswith("\n```")
        if row["variation"] == data.EXPERT:
            assert strip_fences(answer["content"]).strip() == (expert_source(row["task"]) or "").strip()


def test_no_task_of_the_eval_split_gets_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evaluated = load_tasks(split="eval")
    for tasks in (evaluated[:1], [*load_tasks(split="train", pattern=FEW), evaluated[-1]]):
        with pytest.raises(UsageError, match=tasks[-1].id):
            data.demonstrations(tasks, grade=approve, progress=False)
    name = evaluated[0].id.split("/")[1]
    assert data.main([f"out={tmp_path / 'out'}", f"tasks={name}"]) == 2 and "train" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_no_text_defines_a_function_of_the_eval_split(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = {t.entry for t in load_tasks(split="eval")}
    assert entries == data.eval_entries() and len(entries) > 50
    made = data.demonstrations(load_tasks(split="train"), variations=1, grade=approve, progress=False)
    assert set(made.dataset["task"]) == {t for t, s in splits().items() if s == "train"} - set(made.without)
    for row in made.dataset:
        tree = ast.parse(strip_fences(row["completion"][0]["content"]))
        assert not {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)} & entries
    # And where one did, it would be left out.
    (task,) = load_tasks(split="train", pattern="erfc_sqrt")
    monkeypatch.setattr(data, "varied", lambda *a: [("bad", f"def {evaluated_name()}(x):\n    return x\n")])
    made = data.demonstrations([task], grade=approve, progress=False)
    assert made.dataset["variation"] == [data.EXPERT] and "eval split" in str(made.refused)


def evaluated_name() -> str:
    return load_tasks(split="eval")[0].entry


def test_what_is_not_correct_is_refused_and_counted() -> None:
    tasks = load_tasks(split="train", pattern=FEW)
    made = data.demonstrations(tasks, variations=3, grade=refuse_renamed, progress=False)
    assert list(made.dataset["variation"]) == [data.EXPERT] * 2 and made.refused == {"incorrect": 6} and made.without == ()


def test_gradings_are_kept(tmp_path: Path) -> None:
    tasks, asked = load_tasks(split="train", pattern=FEW), []

    def grade(task: str, source: bytes, **options: object) -> Outcome:
        asked.append(source)
        if len(asked) == 4:
            raise KeyboardInterrupt
        return approve(task, source)

    store = Store(tmp_path / "s.sqlite")
    with pytest.raises(KeyboardInterrupt):
        data.demonstrations(tasks, variations=3, store=store, grade=grade, progress=False)
    made = data.demonstrations(tasks, variations=3, store=store, grade=grade, progress=False)
    assert len(made.dataset) == 8 and len(asked) == 9, "eight, and the one that was interrupted"
    again = data.demonstrations(tasks, variations=3, store=store, progress=False)  # no grader is started
    assert again.dataset.to_list() == made.dataset.to_list()
    store.close()


@pytest.mark.parametrize("form", rows.FORMATS)
def test_the_command_writes_what_it_reads(form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [f"out={tmp_path}", "tasks=erfc_sqrt", "variations=1", f"format={form}"]
    if form == "parquet":
        assert data.main(argv) == 0, "graded for real"
        said = capsys.readouterr().out
        assert "demonstrations.parquet: 2 rows" in said and "refused: none" in said
        assert data.main([str(tmp_path / "settings.yaml")]) == 0, "repeatable"
    else:
        made = data.demonstrations(load_tasks(pattern="erfc_sqrt"), grade=approve, progress=False, variations=1)
        for name, dataset in (("demonstrations", made.dataset), ("prompts", data.prompts(load_tasks(pattern=FEW), "cpu"))):
            data.write(dataset, tmp_path / name, form)
            data.write(dataset, tmp_path / name, form)  # over an earlier one
    for name, count in (("demonstrations", 2), ("prompts", 1 if form == "parquet" else 2)):
        found = data.load(tmp_path / f"{name}.{form}")
        assert len(found) == count and found[0]["prompt"][0]["role"] == "user" and "math/erfc_sqrt" in found["task"]


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    good = {"task": "math/erfc_sqrt"}
    for lines, says in (
        ([good, {"x": 1}], "row 2 has no column 'task'"), ([good, good, {"task": "math/nothing"}], "row 3"), ([], "no rows"),
        ([good, {"task": None}], "row 2 has no task"),
    ):  # fmt: skip
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
        with pytest.raises(UsageError, match=says):
            data.load(tmp_path / "a.jsonl")
    (tmp_path / "b.parquet").write_text("no parquet")
    (tmp_path / "c.jsonl").write_text("{\n")
    (tmp_path / "d.csv").write_text("task\n")
    (tmp_path / "e").mkdir()
    names = (("b.parquet", "parquet"), ("c.jsonl", "row 1 is no JSON"), ("d.csv", ".jsonl"), ("e", "arrow"), ("f", "no data"))
    for name, says in names:
        with pytest.raises(UsageError, match=says):
            data.load(tmp_path / name)


def test_easy_rows_first_and_filters(shown: Path) -> None:
    made = data.load(shown)
    ordered = data.by_difficulty(made)
    assert ordered["difficulty"] == sorted(made["difficulty"]) and sorted(ordered["task"]) == sorted(made["task"])
    assert set(data.only(made, category="math")["category"]) == {"math"}
    assert set(data.only(made, pattern="Lion,index/*")["task"]) == {"optimizer/Lion", "index/index_select"}
    with pytest.raises(UnknownName, match="no.*row|pattern"):
        data.only(made, pattern="nothing")
    with pytest.raises(UnknownName, match="category"):
        data.only(made, category="cooking")


@pytest.mark.parametrize(
    ("argv", "says"),
    [(["format=csv"], "csv"), (["tasks=nothing"], "nothing"), (["workers=0"], "workers"), (["backend=tpu"], "tpu"),
     (["style=compact"], "unknown setting"), (["copies=2"], "unknown setting")],
)
def test_bad_usage_is_one_line(argv: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert data.main([f"out={tmp_path}", "tasks=erfc_sqrt", *argv]) == 2
    error = capsys.readouterr().err
    assert error.startswith("data.py: ") and says in error and error.count("\n") == 1
