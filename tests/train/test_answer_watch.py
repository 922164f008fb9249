"""Answers are handed in as they end, by every way of generating, and nothing stays changed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("trl")
import torch  # noqa: E402
from kbx_env.baselines.llm.conversation import Conversation  # noqa: E402
from kbx_env.train import grpo, grpo_setup, models  # noqa: E402
from kbx_env.train.answer_watch import EVERY, AnswerWatch  # noqa: E402
from kbx_env.train.settings import read  # noqa: E402
from service_stand_in import by_word  # noqa: E402
from test_grpo import QUICK, steps  # noqa: E402


class Grader:
    """Notes what it is given early."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, str]] = []

    def begin(self, task: str, text: str) -> None:
        self.begun.append((task, text))


@pytest.fixture
def watch(model_folder: Path) -> Any:
    grader: Any = Grader()
    made = AnswerWatch(grader, Conversation(models.tokenizer_for(model_folder)))
    made.expect([([5, 6, 7], "a/long", ""), ([8], "a/short", "<think>")])
    return SimpleNamespace(watch=made, grader=grader, decode=made.conversation.decode)


def test_transformers_tell_it_while_they_generate(watch: Any, model_folder: Path) -> None:
    model, tokenizer = models.load(model_folder)
    end, at = tokenizer.eos_token_id, []

    def ends(input_ids: Any, scores: Any) -> Any:
        """The second answer ends after 3 tokens, the first one never."""
        scores[:, end] = -1e9
        if input_ids.shape[1] == 6:
            scores[1, end] = 1e9
        at.append((input_ids.shape[1] - 3, list(watch.grader.begun)))
        return scores

    with watch.watch.watching(model, [end]):
        made = model.generate(
            input_ids=torch.tensor([[5, 6, 7], [0, 0, 8]]), attention_mask=torch.tensor([[1, 1, 1], [0, 0, 1]]),
            max_new_tokens=3 * EVERY, do_sample=False, logits_processor=[ends],
        )  # fmt: skip
    told = [("a/short", "<think>" + watch.decode(made[1, 3:7].tolist()))]
    assert watch.grader.begun == told and [n for n, seen in at if seen][0] == EVERY, "long before the batch has ended"
    assert "generate" not in vars(model), "nothing stays changed"


def test_continuous_batching_and_vllm_tell_it(watch: Any) -> None:
    results = [
        SimpleNamespace(prompt_ids=[8], generated_tokens=[9, 10], is_finished=lambda: True), None,
        SimpleNamespace(prompt_ids=[1], generated_tokens=[9], is_finished=lambda: True),
        SimpleNamespace(prompt_ids=[5, 6, 7], generated_tokens=[9], is_finished=lambda: False),
    ]  # fmt: skip
    manager = SimpleNamespace(get_result=lambda timeout=None: results.pop(0))

    class Model:
        @contextlib.contextmanager
        def continuous_batching_context_manager(self, **settings: Any) -> Iterator[Any]:
            yield manager

    model, get = Model(), manager.get_result
    with watch.watch.watching(model, [0]), model.continuous_batching_context_manager() as got:
        for _ in range(4):
            got.get_result(timeout=1)
    assert watch.grader.begun == [("a/short", "<think>" + watch.decode([9, 10]))] and manager.get_result is get and not vars(model)
    done = SimpleNamespace(finished=True, prompt_token_ids=[5, 6, 7], outputs=[SimpleNamespace(token_ids=(11, 12))])
    engine = SimpleNamespace(step=lambda: [done, SimpleNamespace(finished=False)])
    step = engine.step
    with watch.watch.stepping(engine):
        assert len(engine.step()) == 2
    assert watch.grader.begun[1:] == [("a/long", watch.decode([11, 12]))] and engine.step is step


@pytest.mark.parametrize("mode", ["single", "multi"])
def test_in_a_run(mode: str, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers end at once here; all of them are being graded when the reward is asked for."""
    seen: list[int] = []
    begin = grpo_setup.BatchGrader.begin
    monkeypatch.setattr(grpo_setup.BatchGrader, "begin", lambda self, task, text: (seen.append(1), begin(self, task, text))[1])

    def everything_ends(self: Any, model: Any, ends: Any) -> Any:
        return original(self, model, range(10**6))

    original = AnswerWatch.watching
    monkeypatch.setattr(AnswerWatch, "watching", everything_ends)
    monkeypatch.setattr("kbx_env.train.answer_watch.EVERY", 1)

    def grade(task: str, source: bytes, **options: Any) -> Any:
        time.sleep(0.01)
        return by_word(task, source)

    more = [f"mode={mode}", "max_turns=1", f"model={model_folder}"]
    grpo.run(read(grpo.Settings, [*QUICK, *more, f"out={tmp_path / 'on'}"]), grade)
    assert len(seen) == 4
    grpo.run(read(grpo.Settings, [*QUICK, *more, f"out={tmp_path / 'off'}", "overlap=false"]), grade)
    assert len(seen) == 4
    on, off = (steps(tmp_path / name)[0] for name in ("on", "off"))
    assert on["reward"] == off["reward"] and on["gradings"] == off["gradings"] == 4
