"""GRPO over several turns: what is shown, what is masked, who is paid, and when an episode ends."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kbx_env.errors import UsageError
from kbx_env.outcome import Outcome

pytest.importorskip("trl")
from kbx_env.baselines.llm.access import Access  # noqa: E402
from kbx_env.baselines.llm.chat import ChatRequest, Finish, Reply  # noqa: E402
from kbx_env.baselines.llm.conversation import Conversation, Prompting, follow_up  # noqa: E402
from kbx_env.baselines.llm.local import LocalModel  # noqa: E402
from kbx_env.baselines.policy import make_policy  # noqa: E402
from kbx_env.train import grpo, grpo_trainer, models, rollout  # noqa: E402
from kbx_env.train.batch_grader import BatchGrader, GradedAnswer  # noqa: E402
from kbx_env.train.rollout import episode_reward, turn_returns  # noqa: E402
from kbx_env.train.settings import read  # noqa: E402
from kbx_env.train.step_metrics import StepMetrics  # noqa: E402
from kbx_env.train.tool_env import KernelToolEnv  # noqa: E402
from service_stand_in import by_word  # noqa: E402
from test_batch_grader import OTHER, TASK, WRONG  # noqa: E402
from test_grpo import QUICK, steps  # noqa: E402

BAD, GOOD, LOST = ("```python\n" + word + "\n```" for word in ("BAD", "GOOD", "LOST"))


@pytest.fixture
def argv(model_folder: Path, tmp_path: Path) -> list[str]:
    more = ["mode=multi", "max_turns=3", "trainer.max_completion_length=600"]
    return [f"model={model_folder}", f"out={tmp_path / 'out'}", *QUICK, *more]


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as made:
        yield made


def scripted(tokenizer: Any, *lines: str, end: bool = True) -> Callable[..., Any]:
    """A model that says its n-th line in every episode's n-th turn; keeps the prompts that it saw in ``seen``."""

    def generate(trainer: Any, prompts: list[list[int]], most: int) -> Any:
        text = lines[min(len(generate.seen), len(lines) - 1)]  # type: ignore[attr-defined]
        generate.seen.append([list(p) for p in prompts])  # type: ignore[attr-defined]
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        return [[*ids, tokenizer.eos_token_id] if end else list(ids) for _ in prompts], None

    generate.seen = []  # type: ignore[attr-defined]
    return generate


def played(
    model_folder: Path, out: Path, *lines: str, turns: int = 3, length: int = 900, context: int | None = None, end: bool = True,
    tasks: tuple[str, ...] = (TASK, OTHER), **more: Any,
) -> tuple[dict[str, Any], Any, Any]:  # fmt: skip
    """A rollout without a trainer: its result, what the model saw, the tokenizer."""
    tokenizer = models.tokenizer_for(model_folder)
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(num_processes=1), processing_class=tokenizer, state=SimpleNamespace(global_step=0)
    )
    generate = scripted(tokenizer, *lines, end=end)
    with BatchGrader(backend="cpu", workers=2, grade=by_word) as grader:
        play = rollout.Rollout(grader, StepMetrics(out, grader), Conversation(tokenizer), generate, turns, length, context, **more)
        prompts = [[{"role": "user", "content": f"Write {t}", "task": t}] for t in tasks]
        return play(prompts, trainer), generate.seen, tokenizer


def test_wrong_then_right_is_paid_and_ends_early(model_folder: Path, tmp_path: Path) -> None:
    made, seen, tokenizer = played(model_folder, tmp_path, BAD, GOOD, BAD)
    assert len(seen) == 2 and made[rollout.REWARD] == [pytest.approx(1.0)] * 2, "the third turn is not played"
    eos = tokenizer.eos_token_id
    for row, (prompt, ids, mask) in enumerate(zip(made["prompt_ids"], made["completion_ids"], made["env_mask"], strict=True)):
        assert seen[0][row] == prompt and seen[1][row] == (prompt + ids)[: len(seen[1][row])], "nothing is tokenised anew"
        said = [tokenizer.decode([i for i, m in zip(ids[a:b], mask[a:b], strict=True) if m]) for a, b, _ in made["turn_spans"][row]]
        assert [s.removesuffix("<|im_end|>") for s in said] == [BAD, GOOD] and ids[-1] == eos and len(ids) == len(mask)
        shown = tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if not m])
        assert shown.startswith("\n<|im_start|>user\nVerdict: incorrect") and shown.endswith("<|im_end|>\n<|im_start|>assistant\n")
        # The whole is what the template renders of the conversation.
        task = (TASK, OTHER)[row]
        told = shown.removeprefix("\n<|im_start|>user\n").removesuffix("<|im_end|>\n<|im_start|>assistant\n")
        messages = [{"role": r, "content": c} for r, c in (("user", f"Write {task}"), ("assistant", BAD), ("user", told))]
        assert tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) == tokenizer.decode(seen[1][row])
    kept = [json.loads(x) for x in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [x["turns"] for x in kept] == [2, 2] and all("Verdict" in x["text"] and x["verdict"] == "correct" for x in kept)


def test_limits_of_length(model_folder: Path, tmp_path: Path) -> None:
    made, seen, _ = played(model_folder, tmp_path, BAD, BAD, end=False)
    assert len(seen) == 1 and all(all(m) for m in made["env_mask"]), "an answer that was cut off ends its episode"
    made, seen, _ = played(model_folder, tmp_path, BAD, turns=9, length=400)
    assert 1 < len(seen) < 9 and all(len(ids) <= 400 and m[-1] == 1 for ids, m in zip(made["completion_ids"], made["env_mask"]))
    made, seen, _ = played(model_folder, tmp_path, BAD, length=5)
    assert len(seen) == 1 and [len(x) for x in made["completion_ids"]] == [5, 5]
    made, _, _ = played(model_folder, tmp_path, BAD, context=3)
    assert [len(x) for x in made["completion_ids"]] == [1, 1], "a prompt that fills the model still gives a row"
    made, seen, _ = played(model_folder, tmp_path, BAD, length=300, each=4)
    assert len(seen) == 1 and [len(x) for x in made["completion_ids"]] == [4, 4], "a turn has its own limit"
    made, seen, _ = played(model_folder, tmp_path, BAD, each=300)
    assert len(seen) == 3, "a limit that nothing reaches changes nothing"
    made, _, tokenizer = played(model_folder, tmp_path, "", end=False)
    assert {ids[0] for ids in made["completion_ids"]} == {tokenizer.eos_token_id} and made[rollout.REWARD][0] is not None


def test_masked_turns_and_last_turns(model_folder: Path, tmp_path: Path) -> None:
    made, seen, _ = played(model_folder, tmp_path, LOST, LOST, turns=2)
    assert len(seen) == 2 and made[rollout.REWARD] == [None, None] and made["turn_spans"][0][0][2] is None
    made, _, _ = played(model_folder, tmp_path, LOST, BAD, turns=2)
    assert made[rollout.REWARD] == [pytest.approx(WRONG)] * 2
    made, _, _ = played(model_folder, tmp_path, GOOD, BAD, turns=1, episode="last")
    assert made[rollout.REWARD] == [pytest.approx(1.0)] * 2


def graded(base: float | None, potential: float | None = 0.0) -> GradedAnswer:
    return GradedAnswer(None, None if base is None else base + 0.05, base, potential, {}, "", False, False)  # type: ignore[arg-type]


def test_rewards_of_episodes_and_turns() -> None:
    turns = [graded(0.2), graded(None, None), graded(0.8), graded(0.5)]
    assert episode_reward(turns) == 0.8 and episode_reward(turns, "last") == 0.5 and episode_reward(turns[1:2]) is None
    assert episode_reward(turns[:1], several=False) == 0.25, "one turn alone is paid the preset's own reward"
    assert turn_returns(turns, 0.5) == [pytest.approx(0.2 + 0.5 * (0.8 + 0.5 * 0.5)), None, pytest.approx(1.05), 0.5]
    # Shaping moves credit between turns; over the whole episode it adds up to nothing.
    plain, hinted = [graded(0.1), graded(0.1), graded(1.0)], [graded(0.1, 0.1), graded(0.1, 0.3), graded(1.0, 0.2)]
    assert turn_returns(hinted, 0.4)[0] == pytest.approx(turn_returns(plain, 0.4)[0])
    assert turn_returns(hinted, 0.4)[1] == pytest.approx(turn_returns(plain, 0.4)[1] - 0.1)


def test_advantages_of_turns() -> None:
    spans = [[(0, 2, 1.0), (4, 5, 0.0)], [(0, 3, None)], [(0, 1, 2.0)], [(0, 1, 4.0), (2, 3, None)]]
    assert grpo_trainer.turn_advantages(spans, 2, "none") == [[0.5, -0.5], [0.0], [-1.0], [1.0, 0.0]]
    scaled = grpo_trainer.turn_advantages(spans, 2, "group")
    assert scaled[2][0] == pytest.approx(-1 / (2**0.5 + 1e-4)) and scaled[3][1] == 0.0
    assert grpo_trainer.turn_advantages([[(0, 1, None)]], 1, "batch") == [[0.0]]


def test_a_turn_left_out_of_its_own_baseline() -> None:
    spans = [[(0, 2, 1.0), (4, 5, 3.0)], [(0, 3, 0.0), (3, 4, 1.0)], [(0, 1, 2.0)], [(0, 1, None), (2, 3, 4.0)]]
    found = grpo_trainer.turn_advantages(spans, 4, "none", "leave-one-out")
    assert found == [[1.0 - (0.0 + 2.0) / 2, 3.0 - (1.0 + 4.0) / 2], [0.0 - 1.5, 1.0 - 3.5], [2.0 - 0.5], [0.0, 4.0 - 2.0]]
    alone = [[(0, 1, 1.0), (1, 2, 5.0)], [(0, 1, 2.0)], [(0, 1, None)]]
    assert grpo_trainer.turn_advantages(alone, 3, "none", "leave-one-out") == [[-1.0, 3.0], [1.0], [0.0]], "no other second turn"
    assert grpo_trainer.turn_advantages([[(0, 1, 2.0)]], 1, "none", "leave-one-out") == [[0.0]], "nothing to compare with"


@pytest.mark.parametrize("credit", [False, True])
def test_in_the_trainer(credit: bool, argv: list[str], model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = models.tokenizer_for(model_folder)
    monkeypatch.setattr(grpo_trainer, "generate", scripted(tokenizer, BAD, GOOD))
    out: list[Any] = []
    whole = grpo_trainer.KernelTrainer._generate_and_score_completions
    monkeypatch.setattr(
        grpo_trainer.KernelTrainer, "_generate_and_score_completions", lambda self, x: out.append(whole(self, x)) or out[-1]
    )
    grpo.run(read(grpo.Settings, [*argv, f"per_turn_credit={credit}"]), by_word)
    (line,) = steps(tmp_path / "out")
    assert line["correct_rate"] == line["solved_rate"] == 1 and line["turns"] == 2 and line["gradings"] == 8
    assert line["reward"] == pytest.approx(1.0) and line["compile_rate"] == 1
    advantages, mask = out[0]["advantages"], out[0]["tool_mask"] * out[0]["completion_mask"]
    if not credit:
        assert advantages.shape == (4,) and advantages.abs().max() == 0
        return
    first, second = WRONG + 0.4, 1.0
    mean = (first + second) / 2
    assert advantages.shape == mask.shape and bool(((advantages != 0) == (mask == 1)).all()), "feedback earns nothing"
    assert advantages[0, 0].item() == pytest.approx(first - mean) and advantages.max().item() == pytest.approx(second - mean)


def test_the_one_private_call_of_trl(argv: list[str], stack: contextlib.ExitStack) -> None:
    trainer = grpo.trainer_of(read(grpo.Settings, argv), stack, by_word)
    before = trainer.generation_config.max_new_tokens
    ids, logprobs = grpo_trainer.generate(trainer, [[5, 6, 7], [8]], 4)
    assert logprobs is None and [1 <= len(r) <= 4 and all(type(t) is int for t in r) for r in ids] == [True, True]
    assert trainer.generation_config.max_new_tokens == before == 600


def test_by_tool(model_folder: Path, tmp_path: Path) -> None:
    with BatchGrader(backend="cpu", workers=1, grade=by_word) as grader:
        env = KernelToolEnv(grader, 2)
        assert env.reset(prompt=[], task=TASK, seed=3) is None
        assert "Verdict: incorrect" in env.submit("BAD") and env.submit("GOOD").startswith("Solved")
        assert env.submit("GOOD") == "No submission is left." and grader.gradings == 2
        env.reset(task=OTHER)
        assert "incorrect" in env.submit("BAD")
    argv = [f"model={model_folder}", f"out={tmp_path / 'out'}", *QUICK, "mode=tool", "max_turns=2"]
    grpo.run(read(grpo.Settings, argv), by_word)
    (line,) = steps(tmp_path / "out")
    assert line["gradings"] == 4 and line["turns"] == 1 and "tools/call_frequency" in line


FORGETS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}{{ m['content'][:3] }}"
    "{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


def test_templates_that_forget_are_refused(
    argv: list[str], model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    model, tokenizer = models.load(model_folder)
    tokenizer.chat_template = FORGETS
    model.save_pretrained(tmp_path / "m")
    tokenizer.save_pretrained(tmp_path / "m")
    assert grpo.main([*argv, f"model={tmp_path / 'm'}"]) == 2
    (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("grpo.py: ")]
    assert "chat template" in line and not (tmp_path / "out").exists()


DROPS = (  # as Qwen3: earlier answers are shown without their reasoning, and enable_thinking=false writes an empty one
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'].split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "more", "said", "paid"),
    [
        (THINKS, {}, [f"{GOOD}? No.</think>\n{BAD}", f"{BAD}? No.</think>{GOOD}"], 1.0),
        (THINKS, {}, [f"{BAD}</think>\n{BAD}", GOOD], WRONG),  # reasoning that never ends is no answer
        (DROPS, {}, [f"<think>{GOOD}</think>{BAD}", f"<think>{BAD}</think>{GOOD}"], 1.0),
        (DROPS, {"enable_thinking": False}, [BAD, GOOD], 1.0),
    ],
)  # fmt: skip
def test_thinking_models_over_several_turns(
    template: str, more: dict[str, Any], said: list[str], paid: float, model_folder: Path, tmp_path: Path
) -> None:
    tokenizer = models.tokenizer_for(model_folder)
    tokenizer.chat_template = template
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(num_processes=1), processing_class=tokenizer, state=SimpleNamespace(global_step=0)
    )
    generate = scripted(tokenizer, *said)
    conversation = Conversation(tokenizer, prompting=Prompting("Be brief.", more))
    with BatchGrader(backend="cpu", workers=1, grade=by_word) as grader:
        play = rollout.Rollout(grader, StepMetrics(tmp_path, grader), conversation, generate, 2, 2000)
        made = play([[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Write", "task": TASK}]], trainer)
    assert made[rollout.REWARD] == [pytest.approx(paid)]
    first, second = (tokenizer.decode(x[0]) for x in generate.seen)  # type: ignore[attr-defined]
    assert "system\nBe brief." in first and second.startswith(first + said[0] + "<|im_end|>"), "kept as it was generated"
    ending = first[first.rindex("<|im_start|>assistant") :]
    assert second.endswith(ending) and ("</think>" in ending) == bool(more)


def test_how_a_model_was_asked_is_kept(model_folder: Path, argv: list[str], tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text(DROPS)
    more = ["mode=single", "system=Be brief.", f"template={tmp_path / 't.jinja'}", "trainer.max_completion_length=8",
            "trainer.chat_template_kwargs={enable_thinking: false}", "reasoning=['<t>','</t>']"]  # fmt: skip
    seen: list[str] = []

    def grade(task: str, source: bytes, **options: Any) -> Outcome:
        seen.append(source.decode())
        return by_word(task, source)

    grpo.run(read(grpo.Settings, [*argv, *more]), grade)
    final = tmp_path / "out/final"
    assert Prompting.of(final) == Prompting("Be brief.", {"enable_thinking": False}, ("<t>", "</t>"))
    assert Prompting.of(model_folder) == Prompting() and models.tokenizer_for(final).chat_template == DROPS
    model = LocalModel(str(final), device="cpu")
    policy: Any = make_policy(f"hf:{final}", Access(device="cpu"))
    asked = model.tokenizer.decode(model.prompt_ids(ChatRequest(tuple(policy._render("Write", "f")), 8)))
    assert "<|im_start|>system\nBe brief.<|im_end|>" in asked and asked.endswith("<think>\n\n</think>\n\n")
    (final / "prompting.json").write_text("{}")
    with pytest.raises(UsageError, match="prompting.json"):
        Prompting.of(final)


def test_the_report_plays_turns_as_training_did(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kbx_env.envs.episode import Episode
    from kbx_env.envs.prompt import instruction
    from kbx_env.spec.catalog import load_task

    tokenizer = models.tokenizer_for(model_folder)
    seen: list[list[int]] = []

    def complete(self: LocalModel, ask: Any) -> Reply:
        seen.append(self.prompt_ids(ask))
        text = (BAD, GOOD)[len(seen) - 1]
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        return Reply(text, Finish.STOP, prompt_tokens=1, completion_tokens=len(ids), ids=tuple(ids))

    monkeypatch.setattr(LocalModel, "complete", complete)
    task = load_task(TASK)
    policy: Any = make_policy(f"hf:{model_folder},turns=4", Access(device="cpu"))

    def submit(sources: Any) -> list[Outcome]:
        return [by_word(TASK, s.encode()) for s in sources]

    found = policy.run(task, Episode(task, "cpu", submit))
    assert found.source.strip() == "GOOD" and [t.correct for t in found.turns] == [False, True]
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(num_processes=1), processing_class=tokenizer, state=SimpleNamespace(global_step=0)
    )
    generate = scripted(tokenizer, BAD, GOOD)
    with BatchGrader(backend="cpu", workers=1, grade=by_word) as grader:
        play = rollout.Rollout(grader, StepMetrics(tmp_path, grader), Conversation(tokenizer), generate, 4, 4000)
        play([[{"role": "user", "content": instruction(task, "cpu"), "task": TASK}]], trainer)
    assert seen == [x[0] for x in generate.seen]  # type: ignore[attr-defined]
    assert follow_up("x").startswith("x\n")
    for spec in ("turns=0", "turns=x"):
        with pytest.raises(UsageError, match="turns"):
            make_policy(f"hf:{model_folder},{spec}", Access(device="cpu"))
