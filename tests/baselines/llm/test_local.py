"""Checkpoints on this machine: loaded and sampled for real, from a folder with random weights."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from kbx_env.baselines.llm.access import Access
from kbx_env.baselines.llm.chat import CallFailed, ChatRequest, Finish
from kbx_env.baselines.policy import make_policy
from kbx_env.eval import report

from kbx_env.errors import UsageError

pytest.importorskip("transformers")
from kbx_env.baselines.llm.local import LocalModel  # noqa: E402
from tiny import save  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def model(folder: Path) -> LocalModel:
    return LocalModel(str(folder), "cpu")


def _ask(text: str, **more: object) -> ChatRequest:
    return ChatRequest(({"role": "user", "content": text},), **{"max_tokens": 12, "temperature": 0.8, "seed": 1, **more})  # type: ignore[arg-type]


def test_an_answer_counts_its_tokens(model: LocalModel) -> None:
    reply = model.complete(_ask("Write a kernel."))
    assert reply.prompt_tokens == len(model.prompt_ids(_ask("Write a kernel."))) and 0 < (reply.completion_tokens or 0) <= 12
    assert reply.finish is (Finish.LENGTH if reply.completion_tokens == 12 else Finish.STOP)


def test_an_answer_depends_on_its_seed_and_not_on_its_batch(model: LocalModel) -> None:
    asks = [_ask(f"{'word ' * i}?", seed=i, max_tokens=8 + i) for i in range(6)]
    alone = [model.complete(a).text for a in asks]
    with ThreadPoolExecutor(6) as pool:
        together = [r.text for r in pool.map(model.complete, asks)]
    assert alone == together and len(set(alone)) == 6
    assert model.complete(_ask("?", seed=1)).text == model.complete(_ask("?", seed=1)).text
    assert model.complete(_ask("?", seed=1)).text != model.complete(_ask("?", seed=2)).text


def test_greedy_is_greedy_and_a_tiny_nucleus_is_too(model: LocalModel) -> None:
    greedy = model.complete(_ask("?", temperature=0.0, seed=3)).text
    assert greedy == model.complete(_ask("?", temperature=0.0, seed=4)).text
    assert greedy == model.complete(_ask("?", temperature=1.0, top_p=1e-9, seed=5)).text


def test_a_stop_text_ends_an_answer(model: LocalModel) -> None:
    whole = model.complete(_ask("?", max_tokens=30)).text
    middle = whole[len(whole) // 2]
    reply = model.complete(_ask("?", max_tokens=30, stop=(middle,)))
    assert reply.text == whole[: whole.index(middle)] and reply.finish is Finish.STOP


def test_a_prompt_that_does_not_fit_fails_alone(tmp_path: Path) -> None:
    model = LocalModel(str(save(tmp_path, length=64)), "cpu")
    with ThreadPoolExecutor(2) as pool:
        long, short = pool.submit(model.complete, _ask("word " * 200)), pool.submit(model.complete, _ask("?"))
        assert short.result().completion_tokens
        with pytest.raises(CallFailed, match="the model takes 64"):
            long.result()


@pytest.mark.usefixtures("no_figures")
def test_a_folder_is_a_policy_and_is_reported(folder: Path, tmp_path: Path) -> None:
    argv = ["--policy", str(folder), "--backend", "cpu", "--split", "all", "--tasks", "relu,softmax", "--targets", "none"]
    argv += ["--max-tokens", "16", "--device", "cpu", "--out", str(tmp_path / "out")]
    assert report.main(argv) == 0
    data = json.loads((tmp_path / "out/report.json").read_text())
    assert data["summary"]["n"] == 2 and data["summary"]["spent"]["calls"] == 2
    assert all(r["verdict"] == "malformed" for r in data["tasks"]), "noise is no kernel, and says so"
    assert make_policy(f"hf:{folder}", Access(samples=2)).sampling.temperature == 0.8  # type: ignore[union-attr]


def test_a_method_can_ask_a_folder(folder: Path) -> None:
    policy = make_policy("autotriton", Access(model=f"hf:{folder}", device="cpu", max_tokens=8))
    assert policy.caller.model == str(folder)  # type: ignore[union-attr]


def test_what_is_no_checkpoint_is_said_at_once(folder: Path, tmp_path: Path) -> None:
    def broken(name: str, *gone: str) -> str:
        copy = tmp_path / name
        shutil.copytree(folder, copy)
        for pattern in gone:
            for path in copy.glob(pattern):
                path.unlink()
        return str(copy)

    for path, says in (
        (str(tmp_path / "nowhere"), "nowhere"), (broken("a", "config.json"), "config.json"),
        (broken("b", "*.safetensors"), "weights"), (broken("c", "tokenizer*"), "tokenizer"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=says):
            make_policy(f"hf:{path}", Access())
    with pytest.raises(UsageError, match="--device"):
        make_policy(f"hf:{folder}", Access(device="quantum"))
    with pytest.raises(UsageError, match="hf:FOLDER"):
        make_policy("hf", Access())
    damaged = Path(broken("d"))
    (damaged / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(UsageError, match="cannot be loaded"):
        LocalModel(str(damaged), "cpu").complete(_ask("?"))
    with pytest.raises(UsageError, match="chat template"):
        LocalModel(str(save(tmp_path / "e", template=False)), "cpu").complete(_ask("?"))
