"""Tokens for small models: whole lines, names alike in prompt and answer, a prompt that the tokenizer shortens."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from kbx_env.errors import UnknownName, UsageError
from kbx_env.spec.catalog import expert_source, load_task, load_tasks

pytest.importorskip("trl")
from kbx_env.train import models, rows  # noqa: E402

from experiments.small_models import build_model  # noqa: E402
from experiments.small_models import line_tokens as tokens  # noqa: E402
from experiments.small_models.compact import compact  # noqa: E402
from experiments.small_models.line_tokens import parameter_names  # noqa: E402

SIZES: dict[str, Any] = {"hidden": 16, "layers": 1, "heads": 2, "vocab": 4096, "context": 2048, "tokens": "lines"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = build_model.build(build_model.Build(str(tmp_path_factory.mktemp("tokens") / "short"), prompt="short", **SIZES))
    return models.tokenizer_for(folder)


def _answer(task_id: str, entry: str) -> str:
    return f"```python\n{compact(expert_source(task_id) or '', entry)}```"


def _prompt(tokenizer: Any, task_id: str, backend: str = "cpu") -> str:
    text = tokenizer.apply_chat_template([rows.message(load_task(task_id), backend)], add_generation_prompt=True, tokenize=False)
    return str(tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]))


def test_answers_are_short_and_come_back_as_they_were(tokenizer: Any) -> None:
    lengths = []
    for task in load_tasks(split="train"):
        text = _answer(task.id, task.entry)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids) == text, task.id
        lengths.append(len(ids))
    assert median(lengths) < 500
    ids = tokenizer("import torch\nimport triton.language as tl\n", add_special_tokens=False)["input_ids"]
    assert len(ids) == 2, "a line that is in every kernel is a token"
    text = "é∑\n\t<think>  def f(\n\n\n  x"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_every_prompt_is_shortened(tokenizer: Any, backend: str) -> None:
    for task in load_tasks():
        said = _prompt(tokenizer, task.id, backend)
        paragraph = task.spec.split("\n\n")[0]
        assert said == (
            f"<|im_start|>user\nTask {task.id}\n{paragraph}\ndef {task.entry}{task.signature}:\n<|im_end|>\n<|im_start|>assistant\n"
        ), task.id


def test_a_name_is_tokenized_alike_in_prompt_and_answer(tokenizer: Any) -> None:
    for task in load_tasks(split="eval"):
        line = f"def {task.entry}{task.signature}:\n"
        asked, said = (tokenizer(t + line, add_special_tokens=False)["input_ids"] for t in ("Some words.\n", "    return y\n\n"))
        own = tokenizer(line, add_special_tokens=False)["input_ids"]
        assert asked[-len(own) :] == said[-len(own) :] == own


def test_a_parameter_is_tokenized_alike_wherever_it_stands(tokenizer: Any) -> None:
    """A line that is one token has nothing in it that could be copied."""

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    for name in parameter_names():
        own = ids(name)
        for text in (f"def f({name}, out=None):\n", f"    return pointwise({name}, out=out)\n", f"    n = {name}.numel()\n"):
            said = ids(text)
            assert any(said[k : k + len(own)] == own for k in range(len(said))), (name, text)
    assert len(ids("input_tensor")) == 1 and len(ids("x.input_tensor_size")) > 1


def test_the_full_prompt_stays_where_it_is_not_shortened(tmp_path: Path) -> None:
    tokenizer = models.tokenizer_for(build_model.build(build_model.Build(str(tmp_path / "a"), **{**SIZES, "vocab": 600})))
    (message,) = (rows.message(load_task("math/trunc"), "cpu"),)
    assert message["content"] in _prompt(tokenizer, "math/trunc")


def test_lines_of_demonstrations_become_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line, file = "    quite = unlike * any_other % line\n", tmp_path / "d.jsonl"

    def write(*tasks: str, content: str | None = f"```python\n{line}```") -> str:
        told = [{"role": "assistant", "content": content}]
        file.write_text("".join(
            json.dumps({"prompt": [rows.message(load_task(t), "cpu")], "completion": told, "task": t}) + "\n" for t in tasks
        ))  # fmt: skip
        return str(file)

    def build(**more: Any) -> Any:
        settings = build_model.Build(str(tmp_path / str(more.get("vocab"))), **{**SIZES, **more})
        return models.tokenizer_for(build_model.build(settings))

    monkeypatch.setattr(build_model, "load_tasks", lambda **_: [load_task("math/exp_sqrt")])  # one kernel: a second, not ten
    kept = build(data=write(*["math/exp_sqrt"] * 40), vocab=4000)
    plain = build(vocab=3999)
    assert [len(t(line, add_special_tokens=False)["input_ids"]) > 1 for t in (kept, plain)] == [False, True]
    # Other tokens than theirs are left out, but bytes: whatever is written comes back.
    assert len(kept) < 500 < len(plain)
    text = "def other(λ):\n    return λ * 2.5\n"
    assert kept.decode(kept(text, add_special_tokens=False)["input_ids"]) == text
    with pytest.raises(UsageError, match="outside the train split.*activation/relu"):
        build(data=write("math/exp_sqrt", "activation/relu"), vocab=998)
    with pytest.raises(UsageError, match="lists of messages"):
        build(data=write("math/exp_sqrt", content=None), vocab=997)
    with pytest.raises(UsageError, match="tokens=lines"):
        build(data=str(file), tokens="words", vocab=996)


def test_tokens_that_nothing_is_made_of_are_left_out() -> None:
    sources = [compact(expert_source(t.id) or "", t.entry) for t in load_tasks(split="train")[:12]]
    some = sources[:3]
    whole = tokens.lines_tokenizer(sources * 3, 3000, ["<end>"])
    small = tokens.only_used(whole, some)
    assert small.get_vocab_size() < whole.get_vocab_size() / 2 and small.token_to_id("<end>") is not None
    for text in [*some, "<end>" + some[0]]:
        assert small.encode(text).tokens == whole.encode(text).tokens
    for text in [*sources, "é∑\n\t  def f(\n"]:
        assert small.decode(small.encode(text).ids) == text
    assert sorted(small.get_vocab().values()) == list(range(small.get_vocab_size())), "ids without gaps"


def test_what_does_not_fit_each_other_is_said(tmp_path: Path) -> None:
    for change, says in (({"tokens": "word"}, "words"), ({"prompt": "brief"}, "short")):
        with pytest.raises(UnknownName, match=says):
            build_model.build(build_model.Build(str(tmp_path / "a"), **{**SIZES, **change}))
    with pytest.raises(UsageError, match="tokens=lines"):
        build_model.build(build_model.Build(str(tmp_path / "a"), **{**SIZES, "tokens": "words", "prompt": "short"}))
