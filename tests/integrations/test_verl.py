"""verl: the reward function as its reward manager calls it, the exported rows as its data set reads them, an agent loop."""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from service_stand_in import by_word

from kbx_env.integrations import verl as adapter

TASK, WRONG = "random/logspace", 0.1 + 0.3 * 0.5


def test_the_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "train.parquet"
    assert adapter.main([str(file), "--category", "random", "--backend", "cpu", "--agent"]) == 0
    made = pyarrow.parquet.read_table(file).to_pylist()
    (row,) = [r for r in made if r["extra_info"]["task"] == TASK]
    assert row["reward_model"] == {"style": "rule", "ground_truth": TASK} and row["agent_name"] == adapter.AGENT
    assert row["prompt"][0]["role"] == "user" and f"{len(made)} prompts" in capsys.readouterr().out
    assert adapter.main([str(tmp_path / "x.csv")]) == 2 and "must end in" in capsys.readouterr().err
    assert adapter.main([str(file), "--split", "no"]) == 2


def test_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def grade(task: str, source: bytes, **options: Any) -> Any:
        tried.append(source)
        return by_word(task, source)

    options = {"backend": "cpu", "workers": 1, "grade": grade, "reward_router_address": "x"}

    async def scores() -> list[dict[str, Any]]:
        return [await adapter.compute_score("kbx_env", word, TASK, {}, **options) for word in ("GOOD", "BAD", "LOST")]

    good, bad, lost = asyncio.run(scores())
    assert good["score"] == 1.0 and bad["score"] == WRONG and lost["score"] == 0.0 and lost["masked"] == 1.0
    assert tried.count(b"LOST") == adapter.TRIES and bad["term_cases"] == 0.5
    assert set(good) == set(bad) == set(lost) and lost["term_cases"] != lost["term_cases"], "the same names, NaN where unknown"


def test_the_real_reward_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("verl.experimental.reward_loop.reward_manager", reason="needs the extra verl")
    import torch
    from omegaconf import OmegaConf
    from verl import DataProto
    from verl.experimental.reward_loop.reward_manager import get_reward_manager_cls
    from verl.trainer.ppo.reward import get_custom_reward_fn

    options = {"backend": "cpu", "workers": 1}
    settings = {"path": "pkg://kbx_env.integrations.verl", "name": "compute_score", "reward_kwargs": options}
    score = get_custom_reward_fn(OmegaConf.create({"reward": {"custom_reward_function": settings}}))
    assert inspect.iscoroutinefunction(score)

    class Tokenizer:
        def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
            return "".join(map(chr, ids))

    text = "# no kernel"
    ids = torch.tensor([[ord(c) for c in text]])
    data = DataProto.from_dict(
        tensors={"responses": ids, "attention_mask": torch.ones_like(ids)},
        non_tensors={"data_source": ["kbx_env"], "reward_model": [{"ground_truth": TASK}], "extra_info": [{"task": TASK}]},
    )

    async def run() -> dict[str, Any]:
        manager = get_reward_manager_cls("naive")(OmegaConf.create({}), Tokenizer(), score)
        return await manager.run_single(data)

    found = asyncio.run(run())  # a real grading: no entry function, so the screen ends it
    assert found["reward_score"] == 0.0 and found["reward_extra_info"]["masked"] == 0.0
    assert found["reward_extra_info"]["term_compiles"] == 0.0


def test_the_agent_loop(grader: Any, tmp_path: Path) -> None:
    pytest.importorskip("verl.experimental.agent_loop.agent_loop", reason="needs the extra verl")
    pytest.importorskip("omegaconf")
    import hydra
    from kbx_env.train import models
    from omegaconf import OmegaConf
    from verl.experimental.agent_loop.agent_loop import DictConfigWrap
    from verl.workers.rollout.replica import TokenOutput

    from kbx_env.integrations import verl_agent

    folder = models.build(models.Build(str(tmp_path / "tiny"), hidden=32, layers=1, heads=2, vocab=600, context=4096))
    tokenizer = models.tokenizer_for(str(folder))
    asked = []

    class Engine:
        def __init__(self, words: list[str]) -> None:
            self.words = iter(words)

        async def generate(self, request_id: str, prompt_ids: list[int], sampling_params: Any, **more: Any) -> Any:
            asked.append((request_id, list(prompt_ids)))
            ids = tokenizer.encode(next(self.words), add_special_tokens=False) + [tokenizer.eos_token_id]
            return TokenOutput(token_ids=ids, log_probs=[-1.0] * len(ids))

    config = OmegaConf.create({
        "actor_rollout_ref": {"rollout": {"prompt_length": 4000, "response_length": 1000}}, "data": {}, "algorithm": {}
    })  # fmt: skip

    def play(words: list[str], turns: int = 2) -> Any:
        async def run() -> Any:
            loop = verl_agent.KernelAgentLoop(
                trainer_config=DictConfigWrap(config), server_manager=Engine(words), tokenizer=tokenizer, processor=None,
                dataset_cls=None, data_config=DictConfigWrap(config.data), max_turns=turns, grader=grader,
            )  # fmt: skip
            row = {"raw_prompt": [{"role": "user", "content": "Write it."}], "extra_info": {"task": TASK}}
            return await loop.run({}, **row)

        return asyncio.run(run())

    out = play(["BAD", "GOOD"])
    assert out.reward_score == 1.0 and out.num_turns == 4 and out.extra_fields["reward_extra_info"]["correct"] == 1.0
    assert len(out.response_ids) == len(out.response_mask) == len(out.response_logprobs)
    learnt = tokenizer.decode([i for i, m in zip(out.response_ids, out.response_mask) if m])
    shown = tokenizer.decode([i for i, m in zip(out.response_ids, out.response_mask) if not m])
    assert "BAD" in learnt and "GOOD" in learnt and "Verdict: incorrect" in shown and "GOOD" not in shown
    assert asked[1][1][: len(asked[0][1])] == asked[0][1], "the second prompt begins with the first, token for token"
    lost = play(["LOST"], turns=1)
    assert lost.reward_score == 0.0 and set(lost.response_mask) == {0}
    assert hydra.utils.get_class("kbx_env.integrations.verl_agent.KernelAgentLoop") is verl_agent.KernelAgentLoop
