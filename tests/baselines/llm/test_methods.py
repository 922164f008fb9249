"""The single-shot methods, driven by a scripted model: what they ask, how they sample, and what they hand in."""

from __future__ import annotations

import pytest
from kbx_env.baselines.llm.access import Access
from kbx_env.baselines.llm.caller import Limits
from kbx_env.baselines.policy import Episodic, Policy, make_policy
from scripted import Reply, ScriptedServer

from kbx_env.envs.prompt import instruction
from kbx_env.errors import NoAnswer, UsageError
from kbx_env.spec.catalog import load_task

TASK = load_task("activation/relu")
METHODS = ("autotriton", "claude", "deepseek-coder", "geak", "kernelagent")
RIGHT = "import triton\n\n\ndef relu(input, inplace=False, out=None):\n    return 'right'\n"
WRONG = RIGHT.replace("right", "wrong")


def _access(server: ScriptedServer, **more: object) -> Access:
    return Access(model="m", base_url=server.base_url, limits=Limits(attempts=2, patience=0.01), **more)  # type: ignore[arg-type]


def _fenced(code: str) -> str:
    return f"```python\n{code}```"


def _see(sample: int = 0) -> dict[str, object]:
    return {"task": TASK.id, "prompt": instruction(TASK, "cpu"), "feedback": "", "turn": 0, "sample": sample}


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_made_by_name_and_needs_a_model(name: str) -> None:
    with pytest.raises(UsageError, match="--model NAME"):
        make_policy(name)
    with ScriptedServer([Reply("x")]) as server:
        policy = make_policy(name, _access(server))
        assert isinstance(policy, Episodic if name in ("geak", "kernelagent") else Policy)
        assert policy.name == name and policy.needs.grader_feedback is (name == "geak")  # type: ignore[union-attr]
        other = make_policy(f"{name}:another/model", _access(server))
        assert other.caller.model == "another/model" and other.name == f"{name}:another/model"  # type: ignore[union-attr]


@pytest.mark.parametrize("name", METHODS[:3])
def test_single_shot_asks_once_and_the_task_is_all_there(name: str) -> None:
    said = Reply(f"<think>hm</think>Here.\n{_fenced(RIGHT)}", prompt_tokens=5, completion_tokens=6)
    with ScriptedServer([said]) as server:
        policy = make_policy(name, _access(server))
        assert policy.act(_see()) == RIGHT  # type: ignore[union-attr]
        (asked,) = server.asked
        assert TASK.spec in asked.text and f"relu{TASK.signature}" in asked.text
        spent = policy.spent(TASK.id, 0)  # type: ignore[union-attr]
        assert (spent.calls, spent.prompt_tokens, spent.completion_tokens) == (1, 5, 6)


def test_each_method_samples_in_its_own_way() -> None:
    with ScriptedServer([Reply(_fenced(RIGHT))]) as server:
        for name in METHODS[:3]:
            make_policy(name, _access(server)).act(_see())  # type: ignore[union-attr]
        auto, claude, deepseek = (a.body for a in server.asked)
    assert (auto["temperature"], auto["top_p"], auto["max_tokens"]) == (0.6, 0.95, 16384)
    assert "def relu(" in auto["messages"][0]["content"]
    assert "temperature" not in claude and len(claude["messages"]) == 1
    assert deepseek["temperature"] == 0 and deepseek["messages"][0]["role"] == "system" and deepseek["stop"] == ["<|EOT|>"]


def test_the_coder_s_own_format_for_plain_completions() -> None:
    with ScriptedServer([Reply(RIGHT)]) as server:
        policy = make_policy("deepseek-coder", _access(server, api="completions"))
        assert policy.act(_see()).strip() == RIGHT.strip()  # type: ignore[union-attr]
        prompt = server.asked[0].body["prompt"]
    assert server.asked[0].api == "openai-completions"
    assert prompt.startswith("You are") and prompt.endswith("### Response:\n") and prompt.count("### Instruction:") == 1


def test_claude_over_its_own_api(monkeypatch: pytest.MonkeyPatch) -> None:
    with ScriptedServer([Reply(_fenced(RIGHT))]) as server:
        access = Access(model="m", base_url=server.anthropic_url, api="anthropic")
        assert make_policy("claude", access).act(_see()) == RIGHT  # type: ignore[union-attr]
        assert server.asked[0].api == "anthropic"
    monkeypatch.delenv("ANTHROPIC_API_KEY", raising=False)
    with pytest.raises(UsageError, match="ANTHROPIC_API_KEY"):
        make_policy("claude", Access(model="m"))


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (Reply("I'm sorry, I can't."), "refused"), (Reply("no", finish="refusal"), "refused"), (Reply(""), "empty"),
        (Reply("<think>and on and on", finish="length"), "token limit"), (Reply("A kernel is a program."), "no code"),
    ],
)  # fmt: skip
def test_an_answer_without_a_kernel_says_why(reply: Reply, says: str) -> None:
    with ScriptedServer([reply]) as server, pytest.raises(NoAnswer, match=says):
        make_policy("claude", _access(server)).act(_see())  # type: ignore[union-attr]


def test_samples_differ_by_seed_and_greedy_ones_are_refused() -> None:
    with ScriptedServer([Reply(_fenced(RIGHT))]) as server:
        policy = make_policy("autotriton", _access(server, samples=3))
        assert policy.samples(TASK.id) == 3  # type: ignore[union-attr]
        for sample in range(3):
            policy.act(_see(sample))  # type: ignore[union-attr]
        assert len({a.body["seed"] for a in server.asked}) == 3
        with pytest.raises(UsageError, match="--temperature"):
            make_policy("deepseek-coder", _access(server, samples=3))
        make_policy("deepseek-coder", _access(server, samples=3, temperature=0.8))


def test_a_second_turn_shows_the_feedback() -> None:
    with ScriptedServer([Reply(_fenced(WRONG)), Reply(_fenced(RIGHT))]) as server:
        policy = make_policy("claude", _access(server))
        policy.act(_see())  # type: ignore[union-attr]
        again = {**_see(), "turn": 1, "feedback": "Verdict: incorrect"}
        assert policy.act(again) == RIGHT  # type: ignore[union-attr]
        roles = [m["role"] for m in server.asked[1].messages]
        assert roles == ["user", "assistant", "user"] and "Verdict: incorrect" in server.asked[1].text
