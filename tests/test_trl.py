"""TRL's own trainers with our reward function, prompts and tool environment."""

from __future__ import annotations

import asyncio
import functools
import importlib
import multiprocessing
import os
import pickle
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")
pytest.importorskip("omegaconf")
from kbx_env.train import models  # noqa: E402
from service_stand_in import StandIn, by_word  # noqa: E402

from kbx_env.envs.kernel_env import KernelEnv  # noqa: E402
from kbx_env.envs.prompt import instruction  # noqa: E402
from kbx_env.errors import UnknownName, UsageError  # noqa: E402
from kbx_env.spec.catalog import load_task, load_tasks  # noqa: E402
from kbx_env.trl import AsyncKernelReward, KernelReward, KernelTools, answer_of, prompts  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
TASK = "random/logspace"
WRONG = 0.1 + 0.3 * 0.5
"""What the default preset pays for a kernel that compiles and passes half of the telling cases."""


class Hooks:
    """What TRL passes to a reward function that wants to log."""

    def __init__(self) -> None:
        self.metrics, self.columns = dict[str, float](), dict[str, list[Any]]()

    def __call__(self) -> dict[str, Any]:
        return {"log_metric": self.metrics.__setitem__, "log_extra": self.columns.__setitem__}


def test_rewards_terms_and_masked_answers() -> None:
    hooks = Hooks()
    messages = [[{"role": "assistant", "content": f"Here:\n```python\n# {word}\n```"}] for word in ("GOOD", "BAD", "LOST")]
    with KernelReward(backend="cpu", workers=1, grade=by_word) as reward:
        found = reward(prompts=[[]] * 3, completions=messages, completion_ids=[[1]] * 3, task=[TASK] * 3, seed=[0] * 3, **hooks())
        again = reward(["p"], ["GOOD"], task=[TASK])
    assert found == [1.0, WRONG, None] and again == [1.0] and reward.__name__ == "kernel_reward"
    assert hooks.columns["task"] == [TASK] * 3 and hooks.columns["verdict"] == ["correct", "incorrect", "infra_fault"]
    assert hooks.columns["cases"] == [1.0, 0.5, None]
    assert hooks.metrics["kernel/terms/cases"] == 0.75 and hooks.metrics["kernel/masked_rate"] == pytest.approx(1 / 3)
    assert hooks.metrics["kernel/correct_rate"] == 0.5 and "kernel/speedup" not in hooks.metrics


def test_async_rewards_are_the_same() -> None:
    hooks = Hooks()
    reward = AsyncKernelReward(backend="cpu", workers=1, grade=by_word)
    found = asyncio.run(reward(["p"] * 3, ["GOOD", "BAD", "LOST"], task=[TASK] * 3, **hooks()))
    reward.close()
    assert found == [1.0, WRONG, None] and hooks.metrics["kernel/correct_rate"] == 0.5


def test_a_pickled_copy_has_workers_of_its_own() -> None:
    reward = KernelReward(backend="cpu", workers=1, grade=by_word)
    assert reward(["p"], ["GOOD"], task=[TASK]) == [1.0]
    copy = pickle.loads(pickle.dumps(reward))
    assert copy._grader is None and copy(["p"], ["BAD"], task=[TASK]) == [WRONG] and copy._grader is not reward.start()
    grader = reward.start()
    assert reward.start() is grader, "workers are kept between calls"
    reward.close()
    assert reward.start() is not grader
    reward.close(), copy.close()
    partial = pickle.loads(pickle.dumps(functools.partial(KernelTools, reward, max_turns=2)))
    env = partial()
    env.reset(task=TASK)
    assert "incorrect" in env.submit("BAD")


def test_the_task_may_stand_in_the_prompt_alone() -> None:
    (row,) = prompts(tasks="logspace", backend="cpu")
    with KernelReward(backend="cpu", workers=1, grade=by_word) as reward:
        assert reward([row["prompt"]], ["GOOD"]) == [1.0]
        with pytest.raises(UsageError, match="no column 'task'"):
            reward(["text"], ["GOOD"])


@pytest.mark.parametrize(
    "completion, text",
    [("x", "x"), ([], ""), ([{"role": "assistant", "content": None}], ""),
     ([{"role": "assistant", "content": "a"}, {"role": "tool", "content": "b"}], "b"),
     ([{"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}], "a")],
)  # fmt: skip
def test_the_text_of_a_completion(completion: Any, text: str) -> None:
    assert answer_of(completion) == text


@pytest.mark.parametrize(
    "options, said",
    [
        ({"preset": "defualt"}, "did you mean|accepted"), ({"backend": "gpu"}, "unknown backend"), ({"no": 1}, "unknown option"),
        ({"workers": 0}, "workers is 0"), ({"url": "http://x", "gpus": [0]}, "give one of them"),
        ({"token": "x"}, "give its url"), ({"gpus": [], "backend": "cuda"}, "at least one GPU"),
        ({"gpus": [0], "backend": "cpu"}, "cuda or auto"), ({"wall": -1}, "wall is -1"),
    ],
)  # fmt: skip
def test_bad_options_are_refused_when_it_is_made(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        KernelReward(**options)


def test_by_a_service(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("httpx")
    monkeypatch.setattr("kbx_env.executor.pools.remote.Client", StandIn)
    with KernelReward(url="http://x", token="secret") as reward:
        assert reward(["p"] * 3, ["GOOD", "BAD", "GONE"], task=[TASK] * 3) == [1.0, WRONG, None]
        assert reward.start().backend == "cpu" and reward.start()._options["backend"] == "cpu"
        with pytest.raises(UsageError, match="no such option"):  # every other answer would be refused too
            reward(["p"], ["REFUSED"], task=[TASK])
    with pytest.raises(UsageError, match="wrong token"):
        KernelReward(url="http://x", token="no")(["p"], ["GOOD"], task=[TASK])


def test_by_a_real_service(tmp_path: Path) -> None:
    pytest.importorskip("fastapi")
    pytest.importorskip("prometheus_client")
    from grading_service import Grader, running

    grade = Grader()
    with running(tmp_path, grade) as server, KernelReward(url=server.url) as reward, AsyncKernelReward(url=server.url) as other:
        found = reward(["p"] * 4, ["# right", "# wrong", "# lost", "# right"], task=[TASK] * 4)
        assert found[0] == found[3] > found[1] and found[2] is None  # type: ignore[operator]
        copy = pickle.loads(pickle.dumps(reward))
        assert copy(["p"], ["# right"], task=[TASK]) == [found[0]]
        assert asyncio.run(other(["p"], ["# wrong"], task=[TASK])) == [found[1]]
        with pytest.raises(UsageError, match="sizes"):
            KernelReward(url=server.url, sizes="no")
        copy.close()
    assert sorted(source for _, source, _ in grade.calls if source != b"# lost") == [b"# right", b"# wrong"], "each once"
    assert {call[2]["split"] for call in grade.calls} == {"train"}


def test_prompts() -> None:
    data = prompts("eval", "math", backend="cuda", repeats=2)
    assert len(data) == 2 * len(load_tasks(split="eval", category="math")) and set(data["category"]) == {"math"}
    row = data[0]
    assert row["prompt"] == [{"role": "user", "content": instruction(load_task(row["task"]), "cuda"), "task": row["task"]}]
    (row,) = prompts(tasks="logspace", backend="cpu", system="Be brief.", template="{{x}} {entry}: {signature}")
    task = load_task(TASK)
    assert [m["role"] for m in row["prompt"]] == ["system", "user"] and row["prompt"][0]["content"] == "Be brief."
    assert row["prompt"][1]["content"] == f"{{x}} {task.entry}: {task.signature}"
    assert {"task", "seed", "category", "difficulty"} <= set(row)


@pytest.mark.parametrize("template", ["{task", "{nothing}", "{}", "{task.no}"])
def test_a_template_that_cannot_be_filled_in(template: str) -> None:
    with pytest.raises(UsageError, match="fields are {instruction}, {task}"):
        prompts(tasks="logspace", backend="cpu", template=template)


def test_an_episode_by_tool() -> None:
    with KernelReward(backend="cpu", workers=1, grade=by_word) as reward:
        env = KernelTools(reward, max_turns=2)
        assert env.reset(prompt=[], task=TASK, seed=3) is None
        assert "Verdict: incorrect" in env.submit("BAD") and env.get_reward() == WRONG
        assert env.submit("GOOD").startswith("Solved") and env.submit("GOOD") == "No submission is left."
        assert env.get_reward() == 1.0
        env.reset(task=TASK)
        assert env.get_reward() == WRONG, "no submission counts as an empty one"
        env.reset(task=TASK)
        env.submit("LOST")
        assert env.get_reward() is None
        with pytest.raises(UsageError, match="no column 'task'"):
            env.reset(prompt=[])
        with pytest.raises(UnknownName, match="episode"):
            KernelTools(reward, episode="first")
        with pytest.raises(UsageError, match="at least 1"):
            KernelTools(reward, max_turns=0)


def _config(out: Path, **more: Any) -> Any:
    from trl import GRPOConfig

    return GRPOConfig(
        str(out), max_steps=1, num_generations=2, per_device_train_batch_size=2, max_completion_length=8, use_cpu=True,
        report_to=[], logging_steps=1, save_strategy="no", disable_tqdm=True, bf16=False, gradient_checkpointing=False, **more,
    )  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("models") / "tiny"
    return models.build(models.Build(str(out), hidden=32, layers=1, heads=2, vocab=600, context=4096))


@pytest.mark.parametrize("kind", [KernelReward, pytest.param(AsyncKernelReward, marks=pytest.mark.full)])
def test_a_step_of_grpo(kind: type[KernelReward], tiny: Path, tmp_path: Path) -> None:
    from trl import GRPOTrainer

    with kind(backend="cpu", workers=1, grade=by_word) as reward:
        trainer = GRPOTrainer(str(tiny), reward, _config(tmp_path), train_dataset=prompts(tasks="logspace", backend="cpu"))
        trainer.train()
    (line, *_) = trainer.state.log_history
    assert line["rewards/kernel_reward/mean"] == pytest.approx(WRONG) and line["kernel/terms/cases"] == 0.5
    assert line["kernel/masked_rate"] == 0.0 and list(trainer._logs["extra"]["verdict"]) == ["incorrect"] * 2


def test_a_step_with_the_tool(tiny: Path, tmp_path: Path) -> None:
    from trl import GRPOTrainer

    with KernelReward(backend="cpu", workers=1, grade=by_word) as reward:
        trainer = GRPOTrainer(
            str(tiny), args=_config(tmp_path), train_dataset=prompts(tasks="logspace", backend="cpu"),
            environment_factory=functools.partial(KernelTools, reward),
        )  # fmt: skip
        trainer.train()
    assert trainer.state.log_history[0]["rewards/KernelTools/mean"] == pytest.approx(WRONG)
    assert [t.__name__ for t in trainer.tools] == ["submit"]


def test_kernel_env_refuses_a_row_of_data() -> None:
    env = KernelEnv(task=TASK, backend="cpu", grade=by_word)
    with pytest.raises(UsageError, match=r"no argument 'prompt'.*use kbx_env\.trl\.KernelTools"):
        env.reset(prompt=[], task=TASK)


@pytest.mark.full
def test_kernel_env_as_environment_factory_says_what_to_use(tiny: Path, tmp_path: Path) -> None:
    from trl import GRPOTrainer

    with pytest.raises(UsageError, match=r"use kbx_env\.trl\.KernelTools"):
        GRPOTrainer(
            str(tiny), args=_config(tmp_path), train_dataset=prompts(tasks="logspace", backend="cpu"),
            environment_factory=KernelEnv, reward_funcs=[lambda environments, **_: [0.0] * len(environments)],
        ).train()  # fmt: skip


@pytest.mark.full
def test_the_example_runs_three_steps(tiny: Path, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, ROOT / "examples/trl_grpo.py", tiny], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("kernel/terms/correct") == 3 and (tmp_path / "runs/trl/final/model.safetensors").is_file()


def test_asynchronous_grpo_takes_what_it_needs() -> None:
    """Its worker process gets pickled objects, and asks for the names and kinds of reward functions by these helpers."""
    utils = importlib.import_module("trl.trainer.utils")
    assert utils.get_callable_name(pickle.loads(pickle.dumps(KernelReward(backend="cpu")))) == "kernel_reward"
    assert not utils.is_async_callable(KernelReward(backend="cpu")) and utils.is_async_callable(AsyncKernelReward(backend="cpu"))


@pytest.mark.full
def test_in_the_process_of_an_asynchronous_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's asynchronous trainer sends the reward to a spawned process that sees no GPU, and calls it there."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    arguments = {"prompts": ["p"] * 2, "completions": ["GOOD", "BAD"], "completion_ids": [[1]] * 2, "task": [TASK] * 2}
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawned) as pool:
        for reward in (KernelReward("default", "cpu", workers=1, grade=by_word), AsyncKernelReward(backend="cpu", grade=by_word)):
            assert pool.submit(_called, reward, arguments).result(120) == [1.0, WRONG]


def _called(reward: Any, arguments: dict[str, Any]) -> Any:
    found = reward(**arguments)
    return asyncio.run(found) if asyncio.iscoroutine(found) else found
