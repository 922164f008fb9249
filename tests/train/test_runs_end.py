"""The end of a run: sharded weights are gathered by all processes, and checkpoints in parts are not taken for whole ones."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kbx_env.errors import UsageError

pytest.importorskip("trl")
from kbx_env.train import merge, runs  # noqa: E402


def trainer_of(model: Any, processes: int, main: bool, fsdp: bool, called: list[Any]) -> Any:
    """A trainer of one process, which notes what it is asked."""
    plugin = SimpleNamespace(set_state_dict_type=lambda kind: called.append(kind))
    return SimpleNamespace(
        model=model, is_fsdp_enabled=fsdp, is_world_process_zero=lambda: main,
        save_model=lambda path: called.append(Path(path).name),
        processing_class=SimpleNamespace(save_pretrained=lambda path: called.append("tokenizer")),
        accelerator=SimpleNamespace(
            unwrap_model=lambda m: m, wait_for_everyone=lambda: called.append("wait"), num_processes=processes,
            state=SimpleNamespace(fsdp_plugin=plugin),
        ),
    )  # fmt: skip


S = SimpleNamespace(model="base", dtype=None, lora={"r": 2}, trainer={"use_cpu": True})


@pytest.mark.parametrize("main", [True, False])
def test_every_process_sends_its_part_of_an_adapter(main: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []
    monkeypatch.setattr(merge, "merge_apart", lambda s: called.append((s.model, Path(s.adapter).name, Path(s.out).name, s.dtype)))
    peft = SimpleNamespace(merge_and_unload=lambda: pytest.fail("merged from parts"))
    runs.finish(trainer_of(peft, 2, main, True, called), tmp_path / "final", S)
    gathered = ["FULL_STATE_DICT", "adapter", "wait"]  # without the first, the trainer would write nothing
    assert called == gathered + ([("base", "adapter", "final", "float32"), "tokenizer"] if main else [])


def test_a_sharded_model_is_written_whole(tmp_path: Path) -> None:
    called: list[Any] = []
    runs.finish(trainer_of(object(), 2, False, True, called), tmp_path / "final", S)
    assert called == ["FULL_STATE_DICT", "final", "wait"]


def test_a_checkpoint_in_parts_is_not_whole(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model_fsdp_0").mkdir()
    with pytest.raises(UsageError, match="in parts"):
        runs.finish_from(trainer_of(object(), 1, True, False, []), tmp_path, tmp_path / "final", S)


@pytest.mark.full
def test_a_merge_that_failed_says_that_the_adapter_is_kept(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is whole, but was not merged: .*nowhere"):
        merge.merge_apart(merge.Settings(str(tmp_path / "nowhere"), str(tmp_path / "adapter"), str(tmp_path / "out")))
