"""Checkpoints: what can be trained is loaded, what cannot is said at once; a model from nothing is a whole checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kbx_env.envs.prompt import instruction
from kbx_env.errors import UnknownName, UsageError
from kbx_env.spec.catalog import expert_source, load_tasks

pytest.importorskip("trl")
from kbx_env.train import build_model, models  # noqa: E402


def _broken(folder: Path, to: Path, change: Callable[[Path], None]) -> Path:
    shutil.copytree(folder, to)
    change(to)
    return to


def _edit(name: str, **values: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        data = json.loads((folder / name).read_text())
        data = {k: v for k, v in {**data, **values}.items() if v is not None}
        (folder / name).write_text(json.dumps(data))

    return change


def test_a_model_from_nothing_is_a_whole_checkpoint(model_folder: Path) -> None:
    model, tokenizer = models.load(model_folder)
    assert tokenizer.padding_side == "left" and tokenizer.pad_token != tokenizer.eos_token == "<|im_end|>"
    assert len(tokenizer) == 600 == model.get_input_embeddings().weight.shape[0] and models.context_of(model) == 4096
    assert tokenizer.chat_template == models.template_of("qwen3_instruct_2507"), "byte for byte: TRL compares it"
    from trl.chat_template_utils import is_chat_template_prefix_preserving, supports_tool_calling

    assert supports_tool_calling(tokenizer) and is_chat_template_prefix_preserving(tokenizer)
    text = expert_source("math/erfc_sqrt") or ""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == text and len(ids) < 0.6 * len(text), "it has learnt the project's words"
    assert tokenizer.decode(tokenizer("é∑\n\t<think>")["input_ids"]) == "é∑\n\t<think>", "every byte has a token"


def test_training_does_without_an_attention_that_has_no_gradients(model_folder: Path) -> None:
    import torch

    torch.backends.cuda.enable_cudnn_sdp(True)
    models.load(model_folder)
    assert not torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.gpu
@pytest.mark.parametrize("length", [64, 192, 200])
def test_gradients_are_numbers_at_any_length(model_folder: Path, length: int) -> None:
    import torch

    model, _ = models.load(model_folder)
    ids = torch.randint(300, 600, (4, length), device="cuda")
    mask = torch.ones_like(ids)
    mask[1:, :40] = 0  # padding on the left, as GRPO has it
    with torch.autocast("cuda", torch.bfloat16):
        model.to("cuda")(ids, attention_mask=mask, labels=ids).loss.backward()
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)


def test_the_tokenizer_has_seen_no_evaluated_task() -> None:
    seen = set(models._texts())
    for task in load_tasks(split="eval"):
        assert instruction(task, "cpu") not in seen and expert_source(task.id) not in seen


def test_the_same_seed_is_the_same_model(model_folder: Path, tmp_path: Path) -> None:
    sizes = {"hidden": 32, "layers": 1, "heads": 2, "vocab": 600, "context": 4096}
    models._words_core.cache_clear()  # trained anew
    again = models.build(models.Build(str(tmp_path / "a"), **sizes))
    assert (again / "model.safetensors").read_bytes() == (model_folder / "model.safetensors").read_bytes()
    assert (again / "tokenizer.json").read_bytes() == (model_folder / "tokenizer.json").read_bytes()


def test_a_tokenizer_without_padding_gets_some(model_folder: Path, tmp_path: Path) -> None:
    at = _broken(model_folder, tmp_path / "a", _edit("tokenizer_config.json", pad_token=None))
    model, tokenizer = models.load(at, dtype="bfloat16")
    assert tokenizer.pad_token == "<|endoftext|>" and model.config.pad_token_id == tokenizer.pad_token_id
    assert str(model.dtype) == "torch.bfloat16"


def test_what_cannot_be_trained_is_said_at_once(model_folder: Path, tmp_path: Path) -> None:
    def gone(pattern: str) -> Callable[[Path], None]:
        return lambda folder: [p.unlink() for p in folder.glob(pattern)]  # type: ignore[func-returns-value, return-value]

    for i, (change, says) in enumerate((
        (gone("config.json"), "config.json"), (gone("*.safetensors"), "weights"), (gone("tokenizer*"), "tokenizer"),
        (gone("chat_template*"), "chat template"), (_edit("config.json", vocab_size=300), "cannot be loaded|tokens"),
        (_edit("config.json", model_type="made_up"), "cannot be loaded|usable"),
        (_edit("tokenizer_config.json", pad_token=None, eos_token=None), "padding|<"),
        (lambda f: (f / "model.safetensors").write_bytes(b"no") and None, "cannot be loaded"),
        (lambda f: (f / "config.json").rename(f / "adapter_config.json") and None, "adapter"),
    )):  # fmt: skip
        at = _broken(model_folder, tmp_path / str(i), change)
        if says == "padding|<":
            assert models.tokenizer_for(at).pad_token == "<|endoftext|>"
            continue
        with pytest.raises(UsageError, match=says):
            models.load(at)
    with pytest.raises(UsageError, match="nowhere"):
        models.load(tmp_path / "nowhere")
    with pytest.raises(UnknownName, match="int8.*float32"):
        models.load(model_folder, dtype="int8")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hidden": 30, "heads": 4}, "hidden=30"), ({"heads": 4, "kv_heads": 3}, "must divide"), ({"vocab": 100}, "at least"),
        ({"template": "qwen33"}, "qwen3"), ({"layers": 0}, "layers is 0"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_fit_are_said(change: dict[str, object], says: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=says):
        models.build(models.Build(str(tmp_path / "a"), **{"hidden": 64, **change}))  # type: ignore[arg-type]
    assert not (tmp_path / "a").exists()


def test_the_command_builds_and_never_overwrites(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [f"out={tmp_path / 'm'}", "hidden=16", "layers=1", "heads=2", "vocab=300", "context=128"]
    assert build_model.main(argv) == 0 and "300 tokens" in capsys.readouterr().out
    assert build_model.main(argv) == 2 and "not empty" in capsys.readouterr().err
