"""Supervised fine-tuning: the loss is on completions, a killed run loses nothing, and the result can be reported on."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from kbx_env.eval import report

from kbx_env.errors import UsageError
from kbx_env.spec.catalog import load_tasks

pytest.importorskip("trl")
from kbx_env.train import logs, models, rows, sft  # noqa: E402
from kbx_env.train.settings import read  # noqa: E402

QUICK = [
    "trainer.logging_steps=1", "trainer.disable_tqdm=true", "trainer.per_device_train_batch_size=2", "trainer.learning_rate=5e-3",
]  # fmt: skip


@pytest.fixture
def argv(model_folder: Path, shown: Path, tmp_path: Path) -> list[str]:
    return [f"model={model_folder}", f"data={shown}", f"out={tmp_path / 'out'}", "tasks=erfc_sqrt,index_select", *QUICK]


def _weights(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def test_the_loss_is_on_the_completion_alone(argv: list[str]) -> None:
    trainer = sft.trainer_of(read(sft.Settings, argv))
    assert not trainer.args.bf16 and not trainer.args.gradient_checkpointing, "on a CPU both only cost time"
    tokenizer = trainer.processing_class
    seen = 0
    for batch in trainer.get_train_dataloader():
        for ids, labels, mask in zip(batch["input_ids"], batch["labels"], batch["attention_mask"]):
            ids, labels = ids[mask == 1].tolist(), labels[mask == 1].tolist()
            first = next(i for i, x in enumerate(labels) if x != -100)
            assert all(x == -100 for x in labels[:first]) and labels[first:] == ids[first:]
            prompt, answer = tokenizer.decode(ids[:first]), tokenizer.decode(ids[first:])
            assert prompt.endswith("<|im_end|>\n<|im_start|>assistant\n") and "write a Triton GPU kernel" in prompt
            assert answer.startswith("```python\n") and answer.rstrip().endswith("```<|im_end|>"), "whole, with its end"
            seen += 1
    assert seen == 4


def test_a_killed_run_goes_on_and_loses_nothing(argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    more = ["trainer.max_steps=5", "trainer.save_steps=2"]
    assert sft.main([*argv, *more, f"out={whole}"]) == 0

    class Killed(logs.JsonlLog):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 4:
                raise KeyboardInterrupt  # after the log of step 3, before checkpoint 4

    with monkeypatch.context() as m:
        m.setattr(logs, "JsonlLog", Killed)
        assert sft.main([*argv, *more, f"out={killed}"]) == 130
    assert not (killed / "final").exists()
    assert sft.main([*argv, *more, f"out={killed}"]) == 2, "never into an earlier run by accident"
    assert sft.main([str(killed / "settings.yaml"), "resume=last"]) == 0
    one, other = _weights(whole / "final"), _weights(killed / "final")
    assert one.keys() == other.keys() and all(one[k].equal(other[k]) for k in one)
    first, second = logs.read(whole), logs.read(killed)
    assert [x["step"] for x in first] == [x["step"] for x in second] == [1, 2, 3, 4, 5, 5]
    assert [x.get("loss") for x in first] == [x.get("loss") for x in second] and all(x["seconds"] >= 0 for x in second)
    assert second == sorted(second, key=lambda x: x["seconds"])
    # From a chosen checkpoint, and from the last step, of which nothing is left to do.
    assert sft.main([*argv, *more, f"out={tmp_path / 'chosen'}", f"resume={killed / 'checkpoint-2'}"]) == 0
    assert all(_weights(tmp_path / "chosen/final")[k].equal(one[k]) for k in one)
    before = (killed / "log.jsonl").read_text()
    (killed / "final/model.safetensors").unlink()
    assert sft.main([str(killed / "settings.yaml"), "resume=last"]) == 0 and (killed / "log.jsonl").read_text() == before
    assert all(_weights(killed / "final")[k].equal(one[k]) for k in one)


@pytest.mark.usefixtures("no_figures")
def test_it_learns_and_is_reported_on(argv: list[str], model_folder: Path, tmp_path: Path) -> None:
    assert sft.main([*argv, "trainer.max_steps=8"]) == 0
    final, losses = tmp_path / "out/final", [x["loss"] for x in logs.read(tmp_path / "out") if "loss" in x]
    assert len(losses) == 8 and losses[-1] < losses[0] - 0.3
    _, tokenizer = models.load(final)
    assert tokenizer.chat_template == models.tokenizer_for(model_folder).chat_template
    more = ["--backend", "cpu", "--split", "all", "--tasks", "relu", "--targets", "none", "--max-tokens", "4", "--device", "cpu"]
    assert report.main(["--policy", str(final), *more, "--out", str(tmp_path / "report")]) == 0
    assert json.loads((tmp_path / "report/report.json").read_text())["summary"]["n"] == 1


def test_lora_trains_few_weights_and_is_merged(argv: list[str], model_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    more = ["lora.r=2", "lora.target_modules=all-linear", "trainer.max_steps=2", "trainer.save_steps=1"]
    assert sft.main([*argv, *more]) == 0
    out = tmp_path / "out"
    assert (out / "checkpoint-1/adapter_model.safetensors").is_file() and not (out / "final/adapter_config.json").exists()
    model, _ = models.load(out / "final")
    old, _ = models.load(model_folder)
    name = "model.layers.0.mlp.up_proj.weight"
    assert not model.state_dict()[name].equal(old.state_dict()[name])
    merged = _weights(out / "final")
    assert sft.main([str(out / "settings.yaml"), "resume=last"]) == 0, "at its end: merged anew"
    assert all(_weights(out / "final")[k].allclose(merged[k], atol=1e-6) for k in merged)


def test_what_is_too_long_is_dropped_and_said(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    data = rows.only(rows.load(argv[1].partition("=")[2]), pattern="erfc_sqrt,index_select")
    tokenizer = models.tokenizer_for(argv[0].partition("=")[2])
    lengths = sorted(len(tokenizer.apply_chat_template(r["prompt"] + r["completion"])["input_ids"]) for r in data)
    trainer = sft.trainer_of(read(sft.Settings, [*argv, f"max_length={lengths[1]}"]))
    kept = [len(x) for x in trainer.train_dataset["input_ids"]]
    assert sorted(kept) == lengths[:2] and "dropped 2 of 4 demonstrations" in capsys.readouterr().out
    with pytest.raises(UsageError, match="all 4 demonstrations are longer than 10"):
        sft.trainer_of(read(sft.Settings, [*argv, "max_length=10"]))
    with pytest.raises(UsageError, match="takes 4096"):
        sft.trainer_of(read(sft.Settings, [*argv, "max_length=5000"]))


def test_a_curriculum_begins_with_easy_tasks(argv: list[str], shown: Path) -> None:
    trainer = sft.trainer_of(read(sft.Settings, [*argv, "curriculum=true", "tasks=*"]))
    assert type(trainer.get_train_dataloader().sampler).__name__ != "RandomSampler"
    ordered = rows.by_difficulty(rows.load(shown))
    tokenizer, first = trainer.processing_class, next(iter(trainer.get_train_dataloader()))["input_ids"][0]
    assert f"Task {ordered[0]['task']}:" in tokenizer.decode(first)


def test_wandb_is_a_mirror_that_needs_no_account(argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    for name in [n for n in os.environ if n.startswith("WANDB")]:
        monkeypatch.delenv(name)
    for name in ("WANDB_MODE", "WANDB_DIR", "WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_PROJECT", "WANDB_LOG_MODEL"):
        monkeypatch.setenv(name, "")  # undone after the test, whatever is set meanwhile
        monkeypatch.delenv(name)
    import wandb

    assert sft.main([*argv, "trainer.max_steps=1", "wandb=true"]) == 0
    wandb.teardown()  # its service process too
    assert list((tmp_path / "out/wandb").glob("offline-run-*/*.wandb")) and logs.read(tmp_path / "out")[0]["step"] == 1


def test_no_evaluated_task_is_trained_on(argv: list[str], tmp_path: Path) -> None:
    task = load_tasks(split="eval")[0].id
    row = {"task": task, "category": "math", "difficulty": 1, "variation": "expert",
           "prompt": [{"role": "user", "content": "x"}], "completion": [{"role": "assistant", "content": "y"}]}  # fmt: skip
    (tmp_path / "bad.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(UsageError, match=f"row 1 is of {task}"):
        sft.trainer_of(read(sft.Settings, [*argv, f"data={tmp_path / 'bad.jsonl'}", "tasks=*"]))


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("trainer.learning_rat=1", "learning_rate"), ("trainer.learning_rate=fast", "'fast'"), ("trainer.output_dir=x", "set by"),
        ("lora.rank=3", "rank"), ("resume=nowhere", "nowhere"), ("model=nowhere", "nowhere"), ("data=nowhere.parquet", "nowhere"),
        ("dtype=int8", "int8"), ("trainer.bf16=maybe", "bf16|maybe"), ("tasks=nothing", "nothing"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line_and_leave_nothing(
    more: str, says: str, argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sft.main([*argv, more]) == 2
    error = capsys.readouterr().err
    line = [x for x in error.splitlines() if x.startswith("sft.py: ")]
    assert len(line) == 1 and any(s in line[0] for s in says.split("|")) and not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["sft", "tiny-sft"])
def test_the_shipped_configurations_are_accepted(name: str, tmp_path: Path) -> None:
    from trl import SFTConfig

    file = Path(sft.__file__).parent / f"configs/{name}.yaml"
    s = read(sft.Settings, [str(file), "model=m", "data=d", f"out={tmp_path}"])
    assert isinstance(sft._config(s), SFTConfig)
    sft._adapter(s)


def test_numbers_that_are_not_finite_are_null(tmp_path: Path) -> None:
    class State:
        is_world_process_zero, global_step, epoch = True, 0, 0.5

    log = logs.JsonlLog(tmp_path)
    log.on_train_begin(None, State, None)
    State.global_step = 1
    log.on_log(None, State, None, {"loss": float("nan"), "step": 7, "x": "text"})
    (tmp_path / logs.FILE).open("a").write('{"step": 2, "lo')  # cut off by a kill
    (line,) = logs.read(tmp_path)
    assert line.pop("seconds") >= 0 and line == {"step": 1, "epoch": 0.5, "loss": None, "x": "text"}
