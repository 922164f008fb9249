"""Answers that the chat template begins: the model goes on, and what is graded is whole, in training and in a report alike."""

from __future__ import annotations

import ast
import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kbx_env.errors import UsageError
from kbx_env.spec.catalog import expert_source, load_task, load_tasks

pytest.importorskip("trl")
from kbx_env.baselines.llm.chat import ChatRequest  # noqa: E402
from kbx_env.baselines.llm.conversation import Conversation, follow_up  # noqa: E402
from kbx_env.baselines.llm.local import LocalModel  # noqa: E402
from kbx_env.train import models, rollout, rows  # noqa: E402
from kbx_env.train.batch_grader import BatchGrader  # noqa: E402
from kbx_env.train.reward_fn import reward_of  # noqa: E402
from kbx_env.train.settings import read  # noqa: E402
from kbx_env.train.step_metrics import SAMPLES  # noqa: E402
from test_copying import approve, repairs  # noqa: E402

from experiments.small_models import build_model, data, grpo, sft  # noqa: E402
from experiments.small_models.answer_prefix import AnswerPrefix, PrefixedGrader, PrefixedMetrics  # noqa: E402
from experiments.small_models.compact import compact  # noqa: E402
from kbx_env.outcome import Cases, Evidence, Outcome, Stage, Verdict  # noqa: E402

NAME = "math/erfc_sqrt"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("begun") / "model"
    sizes: dict[str, Any] = {"hidden": 32, "layers": 1, "heads": 2, "vocab": 600, "context": 4096}
    return build_model.build(build_model.Build(str(out), **sizes, tokens="lines", prompt="short", answer="begun"))


@pytest.fixture(scope="module")
def talk(folder: Path) -> Conversation:
    return Conversation(models.tokenizer_for(folder))


def right(task: str) -> Outcome:
    return Outcome(task, Verdict.CORRECT, Stage.EVIDENCE, "cpu", "contract", cases=Cases(4, 4, (), 4, 4), evidence=Evidence(1))


def told(name: str = NAME) -> list[dict[str, str]]:
    return [rows.message(load_task(name), "cpu")]


def parts(talk: Conversation) -> tuple[str, str]:
    """What the template says of the right answer, and what is left to say."""
    whole = f"```python\n{compact(expert_source(NAME) or '', load_task(NAME).entry)}```"
    begun = talk.begun(told())
    assert whole.startswith(begun) and begun
    return begun, whole.removeprefix(begun)


def test_all_tasks_are_begun_as_compact_demonstrations_begin(talk: Conversation) -> None:
    for task in load_tasks(split="all"):
        begun = talk.begun([rows.message(task, "cuda")])
        assert begun.endswith(f"\n\ndef {task.entry}{task.signature}:\n")
        assert f"```python\n{compact(expert_source(task.id) or '', task.entry)}".startswith(begun), task.id
        assert talk.decode(talk.opening([rows.message(task, "cuda")])).endswith(begun)


def test_other_templates_and_other_questions_are_not_begun(talk: Conversation, model_folder: Path) -> None:
    assert Conversation(models.tokenizer_for(model_folder)).begun(told()) == ""
    assert talk.begun([{"role": "user", "content": "Which task?"}]) == ""
    assert talk.begun([{"role": "system", "content": "Be brief."}, *told()]) == talk.begun(told())


def test_a_later_answer_is_begun_too(talk: Conversation) -> None:
    begun, rest = parts(talk)
    end = [min(talk.ends)]
    ids = [*talk.opening(told()), *talk.answered(begun + rest, None, begun), *talk.follow_up("Wrong.", told()[0]["content"])]
    shown = talk._tokenizer.decode(ids)
    assert shown.count(begun) == 2 and shown.endswith(begun) and end[0] in ids
    messages = [*told(), {"role": "assistant", "content": begun + rest},
                {"role": "user", "content": "Wrong.\n\nAnswer with the whole corrected module."}]  # fmt: skip
    assert ids == talk.opening(messages), "as the template renders it, and nothing tokenised anew"


def test_what_is_graded_is_whole_in_both_modes(folder: Path, talk: Conversation, tmp_path: Path) -> None:
    begun, rest = parts(talk)
    graded: list[bytes] = []

    def grade(task: str, source: bytes, **options: Any) -> Any:
        graded.append(source if isinstance(source, bytes) else source.encode())
        return right(task)

    tokenizer = models.tokenizer_for(folder)
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(num_processes=1), processing_class=tokenizer, state=SimpleNamespace(global_step=0)
    )
    prompts = [[{**told()[0], "task": NAME}]]
    prefix = AnswerPrefix(tokenizer)
    with BatchGrader(backend="cpu", workers=1, grade=grade) as plain:
        grader: Any = PrefixedGrader(plain, prefix)
        metrics = PrefixedMetrics(tmp_path, plain, 4, prefix)

        def generate(trainer: Any, prompts: list[list[int]], most: int) -> Any:
            return [[*tokenizer(rest, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id] for _ in prompts], None

        play = rollout.Rollout(grader, metrics, talk, generate, 2, 900)
        made = play(prompts, trainer)
        assert made[rollout.REWARD] == [pytest.approx(1.0)]
        assert talk.decode(made["completion_ids"][0]) == rest, "what the template said is not trained on"
        single = reward_of(grader, metrics, Conversation(tokenizer))
        assert single(prompts, [""], made["completion_ids"], [NAME], trainer.state) == [pytest.approx(1.0)]
        assert grader.gradings == 2
    samples = [json.loads(line)["text"] for line in (tmp_path / SAMPLES).read_text().splitlines()]
    assert len(samples) == 2 and all(text.startswith(begun + rest) for text in samples), "kept whole"
    assert graded and all(s.decode().startswith("import torch\nimport triton\n") and b"def erfc_sqrt(" in s for s in graded)


def test_a_checkpoint_answers_with_the_whole(folder: Path, talk: Conversation) -> None:
    model = LocalModel(str(folder), "cpu")
    reply = model.complete(ChatRequest(tuple(told()), max_tokens=5, temperature=0.8, seed=1))
    assert reply.text.startswith(talk.begun(told())) and 0 < (reply.completion_tokens or 0) <= 5
    model.close()


@pytest.mark.parametrize("style", ["compact", "plain"])
def test_demonstrations_must_begin_so_too(folder: Path, tmp_path: Path, style: str) -> None:
    tasks = load_tasks(split="train", pattern="erfc_sqrt,index_select")
    made = data.demonstrations(tasks, variations=0, copies=2, style=style, grade=approve, progress=False)
    file = rows.write(made.dataset, tmp_path / "demonstrations", "parquet")
    settings = read(sft.Settings, [f"model={folder}", f"data={file}", f"out={tmp_path / 'out'}"])
    if style == "plain":
        with pytest.raises(UsageError, match="does not begin as the chat template"):
            sft.trainer_of(settings)
        return
    trainer = sft.trainer_of(settings)
    tokenizer = trainer.processing_class
    for batch in trainer.get_train_dataloader():
        for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
            first = next(i for i, x in enumerate(labels.tolist()) if x != -100)
            assert tokenizer.decode(ids[:first]).endswith("):\n") and tokenizer.decode(ids[first:]).startswith("    ")


def test_grpo_grades_whole_answers(folder: Path, tmp_path: Path) -> None:
    graded: list[bytes] = []

    def grade(task: str, source: bytes, **options: Any) -> Outcome:
        graded.append(source)
        return right(task)

    words = [f"model={folder}", f"out={tmp_path / 'out'}", "tasks=erfc_sqrt", "backend=cpu", "targets=none", "trainer.use_cpu=true",
             "trainer.max_steps=1", "trainer.num_generations=2", "trainer.per_device_train_batch_size=2",
             "trainer.max_completion_length=8", "trainer.save_steps=100"]  # fmt: skip
    settings = read(grpo.Settings, words)
    with contextlib.ExitStack() as stack:
        grpo.trainer_of(settings, stack, grade).train()
    texts = [json.loads(line)["text"] for line in (tmp_path / "out" / SAMPLES).read_text().splitlines()]
    assert graded and all(b"def erfc_sqrt(" in source for source in graded)
    assert texts and all(text.startswith("```python\nimport torch\n") for text in texts)


def test_what_a_beginning_does_not_go_with_is_said(folder: Path, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden": 32, "layers": 1, "heads": 2, "vocab": 600, "context": 4096, "answer": "begun"}
    with pytest.raises(UsageError, match="tokens=lines"):
        build_model.build(build_model.Build(str(tmp_path / "a"), **sizes))
    with pytest.raises(UsageError, match="template=qwen3:"):
        build_model.build(build_model.Build(str(tmp_path / "b"), **sizes, tokens="lines", prompt="short", template="qwen3"))
    with pytest.raises(UsageError, match="no tool can be called"):
        s = read(grpo.Settings, [f"model={folder}", f"out={tmp_path}", "mode=tool", "trainer.use_cpu=true"])
        grpo.load(s, grpo.setup.config_of_run(s))


@pytest.mark.parametrize("template", ["phi3", "qwen3_instruct_2507"])
def test_later_turns_with_other_templates(folder: Path, template: str) -> None:
    """Some show something where no answer is asked for."""
    tokenizer = models.tokenizer_for(folder)
    tokenizer.chat_template = models.template_of(template)
    if template == "phi3":
        tokenizer.eos_token = "<|endoftext|>"
    talk = Conversation(tokenizer, range(len(tokenizer)))  # whatever ends an answer there
    assert talk.begun(told()) == ""
    assert "Wrong." in tokenizer.decode(talk.follow_up("Wrong.", told()[0]["content"]))


@pytest.mark.parametrize("task", [t.id for t in load_tasks(split="train")])
def test_a_compact_expert_may_stand_first(task: str) -> None:
    """What the module does when it is imported must not read the entry's name: it stands elsewhere then."""
    entry = load_task(task).entry
    for node in ast.parse(expert_source(task) or "").body:
        if not isinstance(node, ast.FunctionDef):
            assert entry not in {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}, ast.unparse(node)


def test_sft_sees_the_tokens_that_a_rollout_sees(talk: Conversation, folder: Path) -> None:
    tokenizer = models.tokenizer_for(folder)
    row = next(r for r in repairs(repairs=6) if "repair" in r["variation"])
    asked, wrong, reply = row["prompt"]
    said = reply["content"].removesuffix(follow_up(""))
    first = talk.answered(wrong["content"], None, talk.begun([asked]))
    played = [*talk.opening([asked]), *first, *talk.follow_up(said, asked["content"])]
    shown = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False)
    assert played == tokenizer(shown, add_special_tokens=False)["input_ids"]
    assert row["completion"][0]["content"].startswith(talk.begun([asked]))
