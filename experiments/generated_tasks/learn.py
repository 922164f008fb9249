"""One run of the study: trains a small model with random weights on the demonstrations of an arm, and lets it answer.

    python experiments/generated_tasks/learn.py OUT ARM SEED DEVICE SECONDS

``study.py`` starts it. A run that ends early saves its state and continues when it is started again. A training step has a fixed
number of rows of a fixed length, filled with whole demonstrations that do not see each other.
"""

from __future__ import annotations

import json
import math
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from experiments.generated_tasks.files import ARMS, CHECKPOINT, LOG, PACK, TRAIN, read, run_folder
from kbx_env import jsonl

LOOKAHEAD = 48
"""Demonstrations among which the next one that fits into a row is looked for."""
LOG_EVERY = 20
SAVING_SECONDS = 5.0
"""Kept free at the end of the time for saving."""
Row = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def drawn(documents: dict[str, list[list[tuple[np.ndarray, int]]]], arm: str, share: float, seed: int) -> Iterator[Any]:
    """Yield demonstrations without end: first a task, all equally likely, then one of its copies.

    Args:
        documents: of ``files.read``.
        arm: one of ``ARMS``.
        share: of the tokens in arm ``both`` that are of the generated pack.
        seed: of the draws.

    Yields:
        Tokens, and how many of them are the prompt's.
    """
    draw, spent = random.Random(f"{seed} {arm}"), {TRAIN: 0, PACK: 0}
    while True:
        of_pack = arm == ARMS[1] and spent[PACK] * (1 - share) <= spent[TRAIN] * share
        source = PACK if of_pack else TRAIN
        tokens, head = draw.choice(draw.choice(documents[source]))
        spent[source] += len(tokens)
        yield tokens, head


def packed(stream: Iterator[Any], length: int, pad: int) -> Iterator[Row]:
    """Yield rows of whole demonstrations.

    Args:
        stream: of ``drawn``.
        length: tokens of a row; no demonstration is longer.
        pad: the token that fills up a row.

    Yields:
        Tokens, positions within the demonstration, number of the demonstration (-1 where padded), and whether the token is one
        that has to be learnt.
    """
    waiting = [next(stream) for _ in range(LOOKAHEAD)]
    while True:
        tokens, positions = np.full(length, pad, np.int64), np.zeros(length, np.int64)
        owner, learnt = np.full(length, -1, np.int64), np.zeros(length, bool)
        at, number = 0, 0
        while (k := next((k for k, (t, _) in enumerate(waiting) if len(t) <= length - at), None)) is not None:
            one, head = waiting[k]
            waiting[k : k + 1] = []
            waiting.append(next(stream))
            end = at + len(one)
            tokens[at:end], positions[at:end], owner[at:end] = one, np.arange(len(one)), number
            learnt[at + head : end] = True
            at, number = end, number + 1
        yield tokens, positions, owner, learnt


def rate_at(step: int, steps: int, peak: float) -> float:
    """Return the learning rate: a linear rise over a twentieth of the steps, then half a cosine."""
    warm = max(1, steps // 20)
    return peak * min(1.0, (step + 1) / warm) * (0.5 + 0.5 * math.cos(math.pi * step / steps))


def model_of(s: dict[str, Any], base: Path, seed: int) -> Any:
    """Return a model with random weights, in the architecture of ``train/build_model.py``, and the tokenizer in a folder."""
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    tokenizer = PreTrainedTokenizerFast.from_pretrained(base)
    torch.manual_seed(seed)
    torch.backends.cuda.enable_cudnn_sdp(False)  # as train/models.py, which says why
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=s["hidden"], intermediate_size=3 * s["hidden"], num_hidden_layers=s["layers"],
        num_attention_heads=s["heads"], num_key_value_heads=max(1, s["heads"] // 2), head_dim=s["hidden"] // s["heads"],
        max_position_embeddings=s["context"], tie_word_embeddings=True, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    )  # fmt: skip
    return Qwen3ForCausalLM(config), tokenizer


def visible(owners: Any) -> Any:
    """Return which tokens each token sees: earlier ones of its own demonstration.

    Args:
        owners: number of the demonstration of each token, shape (rows, length).

    Returns:
        A mask of bools, shape (rows, 1, length, length).
    """
    import torch

    causal = torch.ones(owners.shape[1], owners.shape[1], dtype=torch.bool, device=owners.device).tril()
    return ((owners[:, :, None] == owners[:, None, :]) & causal)[:, None]


def train(out: Path, s: dict[str, Any], arm: str, seed: int, device: str, until: float) -> Any:
    """Train; returns model and tokenizer, or ``None`` if the time is over and the state is saved."""
    import torch
    import torch.nn.functional as F

    folder, cuda = run_folder(out, arm, seed), device.startswith("cuda")
    model, tokenizer = model_of(s, out / "data/base", seed)
    model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=s["lr"], betas=(0.9, 0.98), weight_decay=0.1, fused=cuda)
    first, seen, answer_tokens = 0, 0, 0
    if (folder / CHECKPOINT).is_file():
        state = torch.load(folder / CHECKPOINT, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first, seen, answer_tokens = (int(state[k]) for k in ("step", "tokens", "answer_tokens"))
    else:
        (folder / LOG).unlink(missing_ok=True)
    rows = packed(drawn(read(out / "data").documents, arm, s["share"], seed), s["length"], tokenizer.pad_token_id)
    for _ in range(first * s["rows"]):  # the same rows as in a run without an interruption
        next(rows)
    began, losses = time.monotonic(), list[Any]()
    for step in range(first, s["steps"]):
        if time.time() > until - SAVING_SECONDS:
            _save(folder, model, optimizer, step, seen, answer_tokens)
            return None
        tokens, positions, owner, learnt = (np.stack(x) for x in zip(*(next(rows) for _ in range(s["rows"])), strict=True))
        target = np.flatnonzero(learnt[:, 1:])  # over the rows without their last column
        inputs, places, owners = (torch.from_numpy(x).to(device, non_blocking=True) for x in (tokens, positions, owner))
        at = torch.from_numpy(target).to(device, non_blocking=True)
        mask = visible(owners)
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, s["steps"], s["lr"])
        with torch.autocast("cuda" if cuda else "cpu", dtype=torch.bfloat16, enabled=cuda):
            hidden = model.model(input_ids=inputs, attention_mask=mask, position_ids=places, use_cache=False).last_hidden_state
            chosen = hidden[:, :-1].reshape(-1, hidden.shape[-1]).index_select(0, at)
            logits = model.lm_head(chosen)
        loss = F.cross_entropy(logits.float(), inputs[:, 1:].reshape(-1).index_select(0, at))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        seen, answer_tokens = seen + int((owner >= 0).sum()), answer_tokens + len(target)
        if (step + 1) % LOG_EVERY == 0 or step + 1 == s["steps"]:
            loss_mean = round(float(torch.stack(losses).mean()), 5)
            row = {"step": step + 1, "loss": loss_mean, "tokens": seen, "answer_tokens": answer_tokens,
                   "seconds": round(time.monotonic() - began, 2)}  # fmt: skip
            jsonl.append(folder / LOG, row)
            losses.clear()
    _save(folder, model, optimizer, s["steps"], seen, answer_tokens)
    return model.eval(), tokenizer


def _save(folder: Path, model: Any, optimizer: Any, step: int, tokens: int, answer_tokens: int) -> None:
    import torch

    part = folder / f"{CHECKPOINT}.part"
    counts = {"step": step, "tokens": tokens, "answer_tokens": answer_tokens}
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), **counts}, part)
    part.replace(folder / CHECKPOINT)


def answers(model: Any, tokenizer: Any, s: dict[str, Any], prompts: list[dict[str, Any]], seed: int) -> list[dict[str, Any]]:
    """Let a model answer: once greedily, and ``samples`` times at the temperature, all in one batch.

    Args:
        model: the model, on its device.
        tokenizer: its tokenizer.
        s: settings of the study.
        prompts: of ``files.read``.
        seed: of the draws.

    Returns:
        For each answer its task, set, number (0 is the greedy one), source, and whether it ended by itself.
    """
    import torch
    from transformers import LogitsProcessor, LogitsProcessorList

    from kbx_env.envs.answer import strip_fences

    asked = [(p, k) for p in prompts for k in range(1 + s["samples"])]
    device, pad = model.device, tokenizer.pad_token_id
    greedy = torch.tensor([k == 0 for _, k in asked], device=device)
    width = max(len(p["tokens"]) for p in prompts)
    ids = torch.tensor([[pad] * (width - len(p["tokens"])) + p["tokens"] for p, _ in asked], device=device)

    class Chosen(LogitsProcessor):
        """Scales by the temperature; of a greedy row leaves the largest score alone."""

        def __call__(self, _: Any, scores: Any) -> Any:
            only = scores >= scores.max(-1, keepdim=True).values
            return torch.where(greedy[:, None], scores.masked_fill(~only, -math.inf), scores / s["temperature"])

    torch.manual_seed(1000 + seed)
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16, enabled=device.type == "cuda"):
        made = model.generate(
            input_ids=ids, attention_mask=torch.tensor([[0] * (width - len(p["tokens"])) + [1] * len(p["tokens"])
                                                        for p, _ in asked], device=device),
            max_new_tokens=s["answer"], do_sample=True, top_k=0, top_p=1.0, logits_processor=LogitsProcessorList([Chosen()]),
            pad_token_id=pad, eos_token_id=tokenizer.eos_token_id,
        )[:, width:].tolist()  # fmt: skip
    found = []
    for (p, k), row in zip(asked, made, strict=True):
        text = p["begun"] + tokenizer.decode([t for t in row if t != pad], skip_special_tokens=True)
        found.append({"set": p["set"], "task": p["task"], "sample": k, "ended": tokenizer.eos_token_id in row,
                      "tokens": sum(t != pad for t in row), "source": strip_fences(text, p["entry"])})  # fmt: skip
    return found


def main(argv: list[str]) -> int:
    """Train and answer; exit status 0 when the answers are written, 3 when the time was over before."""
    out, arm, seed, device, seconds = Path(argv[0]), argv[1], int(argv[2]), argv[3], float(argv[4])
    import torch

    until, folder = time.time() + seconds, run_folder(out, arm, seed)
    s = json.loads((out / "settings.json").read_text())
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(max(1, int(s["threads"])))
    trained = train(out, s, arm, seed, device, until)
    if trained is None:
        return 3
    began = time.monotonic()
    found = answers(*trained, s, read(out / "data").prompts, seed)
    jsonl.append(folder / LOG, {"answers": len(found), "seconds": round(time.monotonic() - began, 2)})
    jsonl.write(folder / "answers.jsonl.part", found)
    (folder / "answers.jsonl.part").replace(folder / "answers.jsonl")
    if not s["keep"]:
        (folder / CHECKPOINT).unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
