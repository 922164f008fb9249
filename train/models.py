"""Models to train: a checkpoint on this machine, or a small one with random weights.

A small model has a tokenizer that was trained on this project's own prompts and kernels: enough to try every step from
demonstrations to a report on a machine without a GPU.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kbx_env.baselines.llm.local import tokenizer_of
from kbx_env.train.settings import MISSING

from kbx_env.envs.prompt import instruction
from kbx_env.errors import UnknownName, UsageError
from kbx_env.extras import install_hint
from kbx_env.spec.catalog import expert_source, load_tasks

DTYPES = ("float32", "bfloat16", "float16")
"""Dtypes of weights."""
END, PAD = "<|im_end|>", "<|endoftext|>"
"""The tokens that end an answer and that fill up a batch."""
SPECIAL_TOKENS = (PAD, "<|im_start|>", END)
"""Tokens of small models that decoded text leaves out."""
ADDED_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Words that are one token each and that decoded text shows, as in Qwen's own tokenizers."""
_ALPHABET = 256


def tokenizer_for(folder: str | Path, *, template: str | Path | None = None, trust_remote_code: bool = False) -> Any:
    """Load the tokenizer of a checkpoint, ready for training: with chat template and padding token, padding on the left.

    Args:
        folder: folder of the checkpoint.
        template: file of another chat template; ``None`` for the checkpoint's own.
        trust_remote_code: run Python code of the checkpoint.

    Returns:
        The tokenizer.

    Raises:
        UsageError: no checkpoint, no such template, or the tokenizer has no chat template or no token to pad with.
    """
    tokenizer = tokenizer_of(Path(folder), trust_remote_code)
    if template is not None:
        if not Path(template).is_file():
            raise UsageError(f"template={template}: no such file; give a file with a chat template (Jinja)")
        tokenizer.chat_template = Path(template).read_text(encoding="utf-8")
        try:
            tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False, add_generation_prompt=True)
        except Exception as e:
            raise UsageError(f"template={template} cannot be rendered: {type(e).__name__}: {str(e)[:300]}") from e
    if tokenizer.chat_template is None:
        raise UsageError(f"{folder}: the tokenizer has no chat template; give one with template=FILE, or save one with it")
    if tokenizer.pad_token is None:
        # Labels of padding are masked: a model whose padding is its end token would never learn to end an answer.
        pad = PAD if PAD in tokenizer.get_vocab() and tokenizer.eos_token != PAD else tokenizer.eos_token
        if pad is None:
            raise UsageError(f"{folder}: the tokenizer has neither a padding nor an end token; set pad_token and save it anew")
        tokenizer.pad_token = pad
    tokenizer.padding_side = "left"
    return tokenizer


def load(
    folder: str | Path, *, dtype: str = "float32", quantize: str | None = None, trust_remote_code: bool = False,
    template: str | Path | None = None, init: Mapping[str, Any] | None = None,
) -> tuple[Any, Any]:  # fmt: skip
    """Load a model and its tokenizer to the CPU; a trainer moves the model. Switches off cuDNN's attention in this process.

    Args:
        folder: folder of a checkpoint, as ``save_pretrained`` writes it; nothing is fetched from a hub.
        dtype: dtype of the weights, one of ``DTYPES``.
        quantize: ``4bit`` (NF4, as QLoRA) or ``8bit``: quantise the weights, on the GPU of this process; ``None``: do not.
        trust_remote_code: run Python code of the checkpoint.
        template: file of another chat template.
        init: further arguments of ``from_pretrained``, such as ``attn_implementation``.

    Returns:
        The model and its tokenizer.

    Raises:
        UsageError: the folder is missing or holds no causal language model, model and tokenizer do not fit each other, or an
            argument is refused.
        UnknownName: no such dtype.
    """
    if dtype not in DTYPES:
        raise UnknownName("dtype of a model", dtype, DTYPES)
    folder = Path(folder)
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        raise UsageError(f"{folder} holds an adapter alone; give the folder 'final' of that run, where it is merged")
    tokenizer = tokenizer_for(folder, template=template, trust_remote_code=trust_remote_code)
    import torch
    from transformers import AutoModelForCausalLM

    more = {**(init or {}), **(_quantised(quantize) if quantize else {})}
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), local_files_only=True, trust_remote_code=trust_remote_code, **more
        )
    except Exception as e:
        why = f"{type(e).__name__}: {str(e)[:300]}"
        shown = f" with trainer.model_init_kwargs={dict(init)}" if init else ""
        raise UsageError(f"{folder}: the checkpoint cannot be loaded{shown}: {why}") from e
    embedding = model.get_input_embeddings().weight
    room = getattr(embedding, "ds_shape", embedding.shape)[0]  # ZeRO-3 leaves no part of it in ``shape``
    if len(tokenizer) > room:
        raise UsageError(f"{folder}: the tokenizer has {len(tokenizer)} tokens, the model {room}; they are of different models")
    # torch uses cuDNN's attention in half precision on H100 and H200. Its gradients are NaN for padded batches whose longest row
    # is 64 tokens more than a multiple of 128 (pytorch issue 196678).
    torch.backends.cuda.enable_cudnn_sdp(False)
    model.config.pad_token_id = tokenizer.pad_token_id
    if model.generation_config is not None:
        model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model, tokenizer


QUANTISED = ("4bit", "8bit")
"""Values of ``quantize``."""


def _quantised(quantize: str) -> dict[str, Any]:
    """Return the arguments of ``from_pretrained`` for quantised weights (bitsandbytes)."""
    import os

    import torch
    from transformers import BitsAndBytesConfig

    config = (
        BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16,
            bnb_4bit_quant_storage=torch.bfloat16,  # the same dtype as the other weights, so that FSDP can shard them
        ) if quantize == "4bit" else BitsAndBytesConfig(load_in_8bit=True)
    )  # fmt: skip
    sharded = any(os.environ.get(n, "").lower() == "true" for n in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"))
    place = {} if sharded else {"device_map": {"": int(os.environ.get("LOCAL_RANK", "0"))}}
    return {"quantization_config": config, **place}


def check_quantised(quantize: str | None, lora: bool, cpu: bool) -> None:
    """Check that weights can be quantised.

    Args:
        quantize: ``4bit``, ``8bit`` or ``None``.
        lora: whether an adapter is trained.
        cpu: whether the run is on a CPU.

    Raises:
        UnknownName: another value.
        UsageError: all weights are trained, there is no GPU, or bitsandbytes is not installed.
    """
    if quantize is None:
        return
    if quantize not in QUANTISED:
        raise UnknownName("value of quantize", quantize, QUANTISED)
    if not lora:
        raise UsageError(f"quantize={quantize}: quantised weights cannot be trained, only an adapter can; add lora={{r: 32}}")
    if cpu:
        raise UsageError(f"quantize={quantize} needs a GPU; leave it out on a CPU")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UsageError(f"quantize={quantize} needs bitsandbytes: {install_hint('quantize')}")


def init_of(config: Any, dtype: str | None, default: str) -> tuple[dict[str, Any], str]:
    """Return the arguments of ``from_pretrained`` that ``trainer.model_init_kwargs`` has, and the dtype of the weights.

    Args:
        config: configuration of TRL.
        dtype: the setting ``dtype``; ``None`` if it is not set.
        default: dtype where nothing is set.

    Returns:
        The arguments without those that have a setting of their own, and the dtype.

    Raises:
        UsageError: an argument that has a setting of its own, or two different dtypes.
        UnknownName: no such dtype.
    """
    init = dict(config.model_init_kwargs or {})
    for name, instead in (("quantization_config", "quantize=4bit"), ("load_in_4bit", "quantize=4bit"), ("revision", "model=FOLDER"),
                          ("trust_remote_code", "trainer.trust_remote_code"), ("device_map", "CUDA_VISIBLE_DEVICES"),
                          ("local_files_only", "model=FOLDER")):  # fmt: skip
        if name in init:
            raise UsageError(f"trainer.model_init_kwargs.{name} is set by the script; use {instead} instead")
    given = init.pop("dtype", None) or init.pop("torch_dtype", None)
    if given is not None and dtype is not None and given != dtype:
        raise UsageError(f"dtype={dtype} and trainer.model_init_kwargs.dtype={given} differ; leave one out")
    found = str(dtype or given or default)
    if found not in DTYPES:
        raise UnknownName("dtype of a model", found, DTYPES)
    return init, found


def context_of(model: Any) -> int | None:
    """Return the longest prompt and answer together that a model takes, in tokens; ``None`` where its config does not say."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


@dataclass
class Build:
    """Settings of a small model with random weights."""

    out: str = MISSING
    """Folder of the checkpoint; must be new or empty."""
    hidden: int = 256
    """Width of the residual stream."""
    layers: int = 6
    """Decoder blocks."""
    heads: int = 8
    """Attention heads; must divide the hidden width."""
    kv_heads: int | None = None
    """Heads of keys and values; null: half the attention heads."""
    intermediate: int | None = None
    """Width of the feed-forward layers; null: 3 times the hidden width."""
    vocab: int = 4096
    """Tokens, special ones included."""
    context: int = 8192
    """Tokens of prompt and answer together."""
    template: str = "qwen3_instruct_2507"
    """A chat template that TRL knows by name. The default has no thinking and shows earlier turns as they were generated."""
    seed: int = 0
    """Seed of the weights."""


def build(b: Build, make_tokenizer: Callable[[str], Any] | None = None) -> Path:
    """Write a checkpoint: Qwen3 architecture, random weights, a tokenizer of its own.

    Args:
        b: the settings.
        make_tokenizer: makes the tokenizer from the text of the chat template; by default a byte-level BPE is trained.

    Returns:
        The folder.

    Raises:
        UsageError: the folder is not empty, or sizes do not fit each other.
        UnknownName: no such template.
    """
    out, kv = Path(b.out), b.kv_heads or max(1, b.heads // 2)
    _check(b, kv)
    template = template_of(b.template)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"out={b.out} is not empty; give another folder, or remove it")
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    if make_tokenizer is None:
        tokenizer = wrapped(_words_core(b.vocab - len(ADDED_TOKENS)), template, b.context)
    else:
        tokenizer = make_tokenizer(template)
    torch.manual_seed(b.seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=b.hidden, intermediate_size=b.intermediate or 3 * b.hidden,
        num_hidden_layers=b.layers, num_attention_heads=b.heads, num_key_value_heads=kv, head_dim=b.hidden // b.heads,
        max_position_embeddings=b.context, tie_word_embeddings=True, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(out)
    tokenizer.save_pretrained(out)
    return out


def _check(b: Build, kv_heads: int) -> None:
    for name in ("hidden", "layers", "heads", "context"):
        if getattr(b, name) < 1:
            raise UsageError(f"{name} is {getattr(b, name)}; at least 1")
    if b.hidden % b.heads or b.hidden // b.heads % 2:
        raise UsageError(f"hidden={b.hidden} over heads={b.heads}: each head needs an even whole number of channels")
    if b.heads % kv_heads:
        raise UsageError(f"heads={b.heads} over kv_heads={kv_heads}: must divide")
    least = _ALPHABET + len(SPECIAL_TOKENS) + len(ADDED_TOKENS)
    if b.vocab < least:
        raise UsageError(f"vocab is {b.vocab}; at least {least}: every byte and the special tokens")


def template_of(name: str) -> str:
    """Return the text of a chat template of TRL, byte for byte: TRL recognises templates by comparing their texts.

    Args:
        name: its name in TRL.

    Returns:
        The Jinja source.

    Raises:
        UnknownName: there is none of that name.
        UsageError: TRL is not installed.
    """
    logging.getLogger("trl").setLevel(logging.WARNING)
    try:
        import trl
    except ImportError as e:
        raise UsageError(f"chat templates come with TRL: {install_hint('trl')}") from e
    folder = Path(next(iter(trl.__path__))) / "chat_templates"
    known = [p.stem for p in folder.glob("*.jinja") if not p.stem.endswith("_training")]
    if name not in known:
        raise UnknownName("chat template", name, known)
    return (folder / f"{name}.jinja").read_text(encoding="utf-8")


def _texts() -> Iterator[str]:
    # Of the train split alone: the tokenizer must not know words of evaluated tasks.
    for task in load_tasks(split="train"):
        yield from (instruction(task, "cpu"), expert_source(task.id) or "")


@functools.cache
def _words_core(vocab: int) -> str:
    """Train a byte-level BPE of ``vocab`` tokens and return it as JSON. Cached, since it takes some seconds."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=list(SPECIAL_TOKENS), show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    core.train_from_iterator(_texts(), trainer)
    return str(core.to_str())


def wrapped(core: str, template: str, context: int) -> Any:
    """Return a tokenizer for transformers, with ``ADDED_TOKENS``, end and padding token.

    Args:
        core: a ``tokenizers.Tokenizer`` as JSON.
        template: the chat template.
        context: the longest text, in tokens.

    Returns:
        A ``transformers.PreTrainedTokenizerFast``.
    """
    from tokenizers import AddedToken, Tokenizer
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer.from_str(core)
    made.add_tokens([AddedToken(t, normalized=False) for t in ADDED_TOKENS])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END, pad_token=PAD, model_max_length=context)
    tokenizer.chat_template = template
    return tokenizer
