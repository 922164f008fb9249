"""Making policies by name, and what the two worthless ones answer."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from kbx_env.baselines.policy import Policy, make_policy, policies

from kbx_env.catalog import load_task, task_ids
from kbx_env.errors import UnknownName, UsageError


def test_every_file_is_a_policy() -> None:
    assert {"eager", "expert", "replay", "zeros"} <= set(policies())
    for name in ("eager", "expert", "zeros"):
        policy = make_policy(name)
        assert isinstance(policy, Policy) and policy.name == name


@pytest.mark.parametrize("spec", ["exprt", "", "policy", "experts", "__init__"])
def test_an_unknown_policy_names_the_known(spec: str) -> None:
    with pytest.raises(UnknownName, match="expert"):
        make_policy(spec)


@pytest.mark.parametrize("spec", ["expert:now", "replay", "replay:/nowhere.jsonl", "python:", "python:json:nothing"])
def test_an_unusable_argument_is_named(spec: str) -> None:
    with pytest.raises(UsageError):
        make_policy(spec)


def test_a_policy_of_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "class Mine:\n    name = 'mine'\n    def act(self, observation):\n        return observation['task']\n"
    (tmp_path / "my_policy_file.py").write_text(text + "broken = 1\n")
    (tmp_path / "my_broken_file.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    assert make_policy("python:my_policy_file:Mine").act({"task": "math/softmax"}) == "math/softmax"
    with pytest.raises(UsageError, match="name and act"):
        make_policy("python:my_policy_file:broken")
    with pytest.raises(UsageError, match="ZeroDivisionError"):
        make_policy("python:my_broken_file:Mine")


@pytest.mark.parametrize("task", task_ids())
def test_the_worthless_answers_are_whole_modules(task: str) -> None:
    for name in ("eager", "zeros"):
        source = make_policy(name).act({"task": task}) or ""
        assert "kbx_env" not in source
        defined = [n.name for n in ast.parse(source).body if isinstance(n, ast.FunctionDef)]
        assert load_task(task).entry in defined


@pytest.mark.parametrize("name", task_ids())
def test_the_torch_fallback_is_really_right(name: str) -> None:
    """It earns nothing because it is torch, not because it is wrong: else it would prove nothing about the firewall."""
    from kbx_env.grading import inputs, judge

    task = load_task(name)
    space: dict = {}
    exec(
        compile(make_policy("eager").act({"task": name}) or "", name, "exec"), space
    )  # our own source, not a submission
    case = next(c for c in task.cases if not c.out and not c.layouts and 0 not in c.axes.values())
    answers, args, seeds = [], {}, []
    for call in range(judge.calls_needed(task, case)):
        args = inputs.draw(task, case, inputs.case_seed(b"test", task.id, "train", 0, 0))
        answers.append((args, call))
        seeds.append(call)
    assert callable(space[task.entry]) and torch.is_grad_enabled() in (True, False) and answers
