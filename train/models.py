"""Models to train: a checkpoint on this machine, or a small one from nothing.

A model from nothing has random weights and a tokenizer that was trained on this project's own prompts and kernels: enough to
try the whole way from demonstrations to a report on a machine without a GPU.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kbx_env.baselines.llm.conversation import Conversation
from kbx_env.baselines.llm.local import tokenizer_of
from kbx_env.train.compact import HEAD, compact
from kbx_env.train.settings import MISSING
from kbx_env.train.tokens import lines_tokenizer, only_used, shortening

from kbx_env.envs.prompt import instruction
from kbx_env.errors import UnknownName, UsageError
from kbx_env.spec.catalog import expert_source, load_tasks, splits

DTYPES = ("float32", "bfloat16", "float16")
END, PAD = "<|im_end|>", "<|endoftext|>"
_SPECIAL = (PAD, "<|im_start|>", END)
_PLAIN = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""One token each, but shown in decoded text, as in Qwen's own tokenizers."""
_ALPHABET = 256
_FRAME = f"<|im_start|>system\nuser\nassistant\n{END}\n"
"""What chat templates put around messages."""
TOKENS, PROMPTS, ANSWERS = ("words", "lines"), ("full", "short"), ("free", "begun")
BEGUN = """\
{%- if add_generation_prompt %}
    {%- set asked = messages | selectattr("role", "equalto", "user") | first %}
    {%- if asked is defined and asked.content is string and "\\n\\nSignature\\n    " in asked.content %}
        {{- "```python\\nHEAD\\ndef " }}
        {{- asked.content.split("\\n\\nSignature\\n    ")[1].split("\\n\\nContract\\n")[0] + ":\\n" }}
    {%- endif %}
{%- endif %}""".replace("HEAD", HEAD.replace("\n", "\\n"))
"""Behind a chat template: it begins each answer to an instruction of ours as all compact demonstrations begin."""


def tokenizer_for(folder: str | Path) -> Any:
    """The tokenizer of a checkpoint, ready for training: with chat template and padding token, padding on the left.

    Raises:
        UsageError: no checkpoint, or its tokenizer has no template, or nothing to pad with.
    """
    tokenizer = tokenizer_of(Path(folder))
    if tokenizer.chat_template is None:
        raise UsageError(f"{folder}: the tokenizer has no chat template; save one with it (chat_template.jinja)")
    if tokenizer.pad_token is None:
        # Padding with the end token would teach a model never to end: its labels would be masked.
        pad = PAD if PAD in tokenizer.get_vocab() and tokenizer.eos_token != PAD else tokenizer.eos_token
        if pad is None:
            raise UsageError(f"{folder}: the tokenizer has neither a padding nor an end token; set pad_token and save it anew")
        tokenizer.pad_token = pad
    tokenizer.padding_side = "left"
    return tokenizer


def load(folder: str | Path, *, dtype: str = "float32") -> tuple[Any, Any]:
    """A model and its tokenizer, on the CPU: a trainer moves the model. The process does without cuDNN's attention from then on.

    Args:
        folder: of a checkpoint, as ``save_pretrained`` writes it; nothing is fetched from a hub.
        dtype: of the weights, one of ``DTYPES``.

    Raises:
        UsageError: the folder is missing or no checkpoint of a causal language model, or its parts do not fit each other.
        UnknownName: no such type.
    """
    if dtype not in DTYPES:
        raise UnknownName("dtype of a model", dtype, DTYPES)
    folder = Path(folder)
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        raise UsageError(f"{folder} holds an adapter alone; give the folder 'final' of that run, where it is merged")
    tokenizer = tokenizer_for(folder)
    import torch
    from transformers import AutoModelForCausalLM

    try:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), local_files_only=True)
    except Exception as e:
        raise UsageError(f"{folder}: the checkpoint cannot be loaded: {type(e).__name__}: {str(e)[:300]}") from e
    room = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > room:
        raise UsageError(f"{folder}: the tokenizer has {len(tokenizer)} tokens, the model {room}; they are of different models")
    # cuDNN's attention, which torch takes on H100 and H200 where it computes in half precision, has gradients that are no numbers
    # for batches with padding whose longest row is 64 tokens more than a multiple of 128 (pytorch issue 196678).
    torch.backends.cuda.enable_cudnn_sdp(False)
    model.config.pad_token_id = tokenizer.pad_token_id
    if model.generation_config is not None:
        model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model, tokenizer


def context_of(model: Any) -> int | None:
    """Tokens that a model takes, prompt and answer together; ``None`` where it does not say."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


@dataclass
class Build:
    """A model from nothing."""

    out: str = MISSING
    """Folder of the checkpoint; must be new or empty."""
    hidden: int = 256
    """Width of the residual stream."""
    layers: int = 6
    """Decoder blocks."""
    heads: int = 8
    """Attention heads; they divide the width."""
    kv_heads: int | None = None
    """Heads of keys and values; null: half the heads."""
    intermediate: int | None = None
    """Width of the feed-forward layers; null: 3 times the hidden width."""
    vocab: int = 4096
    """Tokens, special ones included."""
    context: int = 8192
    """Tokens of prompt and answer together."""
    tokens: str = "words"
    """lines: frequent whole lines of code are one token (train/tokens.py); train it on demonstrations with style=compact."""
    prompt: str = "full"
    """short: the tokenizer leaves out the rules and all but the first paragraph of the contract; only with tokens=lines."""
    answer: str = "free"
    """begun: the chat template begins every answer with the imports and the line that defines the entry function, and the model
    goes on from there; only with tokens=lines; train it on demonstrations with style=compact. Not with mode=tool, and asked of
    servers an answer lacks its beginning: ask such a checkpoint as hf:FOLDER."""
    data: str | None = None
    """Demonstrations whose lines become tokens too, only with tokens=lines: answers like them are then a few tokens a line, other
    tokens than theirs are left out, and a model that is to learn these and nothing else is small and quick, as experiments on
    rewards want it (train/doubtful.py)."""
    template: str = "qwen3_instruct_2507"
    """A chat template that TRL knows by name. This one has no thinking, and shows earlier turns as they were generated."""
    seed: int = 0
    """Of the weights."""


def build(b: Build) -> Path:
    """Write a checkpoint: Qwen3 architecture, random weights, a byte-level BPE of its own. Returns the folder.

    Raises:
        UsageError: the folder is not empty, or sizes that do not fit each other.
        UnknownName: no such template.
    """
    out, kv = Path(b.out), b.kv_heads or max(1, b.heads // 2)
    least = _ALPHABET + len(_SPECIAL) + len(_PLAIN)
    for name in ("hidden", "layers", "heads", "context"):
        if getattr(b, name) < 1:
            raise UsageError(f"{name} is {getattr(b, name)}; at least 1")
    if b.hidden % b.heads or b.hidden // b.heads % 2:
        raise UsageError(f"hidden={b.hidden} over heads={b.heads}: each head needs an even whole number of channels")
    if b.heads % kv:
        raise UsageError(f"heads={b.heads} over kv_heads={kv}: must divide")
    if b.vocab < least:
        raise UsageError(f"vocab is {b.vocab}; at least {least}: every byte and the special tokens")
    for kind, given, accepted in (("tokens", b.tokens, TOKENS), ("prompt", b.prompt, PROMPTS), ("answer", b.answer, ANSWERS)):
        if given not in accepted:
            raise UnknownName(kind, given, accepted)
    if b.prompt == "short" and b.tokens != "lines":
        raise UsageError("prompt=short is done by the tokenizer of tokens=lines; give both")
    if b.answer == "begun" and b.tokens != "lines":
        raise UsageError("answer=begun needs tokens=lines: other tokens reach over the end of what the template has begun")
    if b.data is not None and b.tokens != "lines":
        raise UsageError(f"data={b.data} is for the lines of demonstrations; give tokens=lines with it")
    template = template_of(b.template) + (f"\n{BEGUN}" if b.answer == "begun" else "")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"out={b.out} is not empty; give another folder, or remove it")
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = _trained(b, template)
    if b.answer == "begun":
        _check_begun(b, tokenizer)
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


def _check_begun(b: Build, tokenizer: Any) -> None:
    """A prompt must be what prompt and answer together begin with, or a model is trained on what it is never asked."""
    messages = [{"role": "user", "content": instruction(load_tasks(split="train")[0], "cpu")}]
    begun = Conversation(tokenizer).begun(messages)
    asked = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    whole = tokenizer.apply_chat_template([*messages, {"role": "assistant", "content": f"{begun}    pass"}], tokenize=False)
    if not begun or not whole.startswith(asked):
        raise UsageError(f"answer=begun does not go with template={b.template}: earlier answers are shown otherwise")


def template_of(name: str) -> str:
    """The text of a chat template that TRL knows. Byte for byte its own: TRL recognises templates by comparing them.

    Raises:
        UnknownName: there is none of that name.
        UsageError: TRL is not installed.
    """
    logging.getLogger("trl").setLevel(logging.WARNING)
    try:
        import trl
    except ImportError as e:
        raise UsageError('chat templates come with TRL: pip install "kbx_env[trl]"') from e
    folder = Path(next(iter(trl.__path__))) / "chat_templates"
    known = [p.stem for p in folder.glob("*.jinja") if not p.stem.endswith("_training")]
    if name not in known:
        raise UnknownName("chat template", name, known)
    return (folder / f"{name}.jinja").read_text(encoding="utf-8")


def _texts() -> Iterator[str]:
    # The train split alone: nothing of an evaluated task is in the model, not even its words.
    for task in load_tasks(split="train"):
        yield from (instruction(task, "cpu"), expert_source(task.id) or "")


def _shown(data: str) -> list[list[str]]:
    """The messages of each demonstration of a file."""
    from kbx_env.train import rows

    shown = rows.load(data)
    if evil := sorted({t for t in shown["task"] if splits()[t] != "train"}):
        raise UsageError(f"{data}: rows of tasks outside the train split, whose words no model may know: {', '.join(evil[:5])}")
    if not {"prompt", "completion"} <= set(shown.column_names):
        raise UsageError(f"{data}: no columns prompt and completion; give demonstrations")
    pairs = zip(shown["prompt"], shown["completion"], strict=True)
    try:
        found = [[m["content"] for m in (*asked, *told)] for asked, told in pairs]
    except TypeError as e:
        raise UsageError(f"{data}: prompt and completion are lists of messages, as train/data.py writes them") from e
    if not all(isinstance(text, str) for row in found for text in row):
        raise UsageError(f"{data}: prompt and completion are lists of messages with text")
    return found


def _kernels() -> list[str]:
    """One document for each task of the train split, as ``data.py style=compact`` shows it."""
    found = []
    for task in load_tasks(split="train"):
        source = expert_source(task.id)
        if source is not None:
            found.append(f"{instruction(task, 'cpu')}\n```python\n{compact(source, task.entry)}```")
    return found


@functools.cache
def _core(tokens: str, prompt: str, room: int, data: str | None, written: int = 0) -> str:
    """What a tokenizer of so many tokens has learnt, as JSON; some seconds, once a process."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if tokens == "lines":
        short = shortening(load_tasks(split="train")[0]) if prompt == "short" else ()
        shown = [] if data is None else _shown(data)
        made = lines_tokenizer([*("\n".join(row) for row in shown), *_kernels()], room, _SPECIAL, short)
        return str((only_used(made, [_FRAME, *(text for row in shown for text in row)]) if shown else made).to_str())
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=room, special_tokens=list(_SPECIAL), show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    core.train_from_iterator(_texts(), trainer)
    return str(core.to_str())


def _trained(b: Build, template: str) -> Any:
    from tokenizers import AddedToken, Tokenizer
    from transformers import PreTrainedTokenizerFast

    # The data's own time: a file may be written anew.
    written = Path(b.data).stat().st_mtime_ns if b.data is not None and Path(b.data).exists() else 0
    core = Tokenizer.from_str(_core(b.tokens, b.prompt, b.vocab - len(_PLAIN), b.data, written))
    core.add_tokens([AddedToken(t, normalized=False) for t in _PLAIN])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END, pad_token=PAD, model_max_length=b.context)
    tokenizer.chat_template = template
    return tokenizer
