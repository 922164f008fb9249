"""The data of the study as tokens: demonstrations of both arms, and the prompts of the tasks that are evaluated.

Arm ``train`` has the kernels of the benchmark's train split, arm ``both`` has these and the kernels of a generated pack. All
kernels are compact (``small_models/compact.py``), with functions before those that they call, and there are copies under
made-up names. One tokenizer serves both arms. A part of the pack is held out of the demonstrations and evaluated.
"""

from __future__ import annotations

import ast
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from kbx_env.baselines.llm.conversation import Conversation
from kbx_env.train import data, models, rows

from experiments.generated_tasks.files import PACK, TRAIN
from experiments.small_models import answer_prefix, build_model, copying, line_tokens
from experiments.small_models.compact import compact
from experiments.small_models.data import entries
from kbx_env.errors import UsageError
from kbx_env.spec.catalog import expert_source, load_tasks
from kbx_env.spec.packs import BUILTIN
from kbx_env.spec.task import Task
from kbx_env.store import Store

TEMPLATE = """\
{%- for message in messages %}
    {{- "<|im_start|>" + message.role + "\\n" + message.content + "<|im_end|>\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|im_start|>assistant\\n" }}
{%- endif %}"""
"""The usual frame of messages, written out so that the study does not need TRL for it."""
TOKENIZER_TASKS = 400
"""Generated tasks at most whose texts make tokens: more change few tokens, and take minutes."""
CHECKED = 64
"""Kernels of the pack that are graded again in their compact form; the pack's proof is of the original text."""


def callers_first(source: str, entry: str) -> str:
    """Return a compact module with each function after the functions that use it.

    A model then writes a helper after it has written the call.

    Args:
        source: a module, as ``compact`` writes it.
        entry: its entry function.

    Returns:
        The module; unchanged where a statement of the module needs a function before it runs.
    """
    tree = ast.parse(source)
    functions = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)}
    early = {m.id for n in tree.body if not isinstance(n, ast.FunctionDef) for m in ast.walk(n) if isinstance(m, ast.Name)}
    for node in functions.values():
        a = node.args
        parts = [*node.decorator_list, *a.defaults, *filter(None, a.kw_defaults), *filter(None, [node.returns])]
        parts += [x.annotation for x in (*a.posonlyargs, *a.args, *a.kwonlyargs) if x.annotation is not None]
        early |= {m.id for part in parts for m in ast.walk(part) if isinstance(m, ast.Name)}
    if entry not in functions or early & set(functions):
        return source
    order, first = [entry], 0
    while first < len(order):
        for node in ast.walk(functions[order[first]]):
            if isinstance(node, ast.Name) and node.id in functions and node.id not in order:
                order.append(node.id)
        first += 1
    order += [name for name in functions if name not in order]
    others = [n for n in tree.body if not isinstance(n, ast.FunctionDef)]
    imports = [n for n in others if isinstance(n, ast.Import | ast.ImportFrom)]
    rest = [n for n in others if n not in imports]
    # As ``compact``: the three imports, the entry, further imports and constants, then the other functions.
    head = [n for n in imports if isinstance(n, ast.Import) or n.module == "__future__"]
    tree.body = [
        *head, functions[entry], *(n for n in imports if n not in head), *rest, *(functions[n] for n in order[1:])
    ]  # fmt: skip
    return ast.unparse(tree) + "\n"


def rewritten(source: str, entry: str) -> str:
    """Return a kernel as all demonstrations show it."""
    return callers_first(compact(source, entry), entry)


def prepare(
    out: Path, pack: str, *, held: int, vocab: int, context: int, longest: int, copies: tuple[int, int], seed: int, workers: int
) -> None:
    """Make demonstrations, tokenizer and prompts, and write them. What is already in the folder is used again.

    Args:
        out: folder; gets ``base`` (a checkpoint with a small model, for its tokenizer), ``documents-*.npz``, ``prompts.json``.
        pack: folder of a generated pack.
        held: tasks of the pack that are evaluated and not shown.
        vocab: tokens.
        context: tokens of prompt and answer together.
        longest: tokens of the longest demonstration; longer ones are left out.
        copies: copies under made-up names of each kernel of the train split, and of each of the pack.
        seed: of names, and of the choice of the tasks that are held out.
        workers: gradings at a time.

    Raises:
        UsageError: a folder that is no pack, or too few tasks in it.
    """
    if (out / "prompts.json").is_file():
        return
    out.mkdir(parents=True, exist_ok=True)
    shown, ours = load_tasks(split="train", tasks_from=BUILTIN), load_tasks(split="train", tasks_from=pack)
    if len(ours) <= 2 * held:
        raise UsageError(f"{pack} has {len(ours)} tasks; {held} of them are held out, and at least as many have to be left")
    chosen = {t.id for t in random.Random(f"{seed} held").sample(ours, held)}
    left, kept = [t for t in ours if t.id not in chosen], [t for t in ours if t.id in chosen]
    candidates = data.candidates(shown, 0, seed, rewritten)
    some = random.Random(f"{seed} checked").sample(left, min(CHECKED, len(left)))
    checked = data.candidates(some, 0, seed, rewritten)
    store = Store(out / "gradings.sqlite")
    try:
        taken, refused = data.accepted(candidates, data.graded(candidates, workers, store, True, None))
        good, bad = data.accepted(checked, data.graded(checked, workers, store, True, None))
    finally:
        store.close()
    failed = {one.task.id for one in checked} - {one.task.id for one in good}
    pairs = {
        TRAIN: [(one.task, one.source) for one in taken],
        PACK: [(t, rewritten(expert_source(t.id) or "", t.entry)) for t in left if t.id not in failed],
    }
    tokenizer = _tokenizer(out, pairs, vocab, context, seed)
    about: dict[str, Any] = {
        "pack_tasks": len(ours), "held": len(kept), "tokens": len(tokenizer), "refused": dict(refused),
        "pack_kernels_graded_again": len(checked), "of_these_refused": dict(bad), "longest": longest,
    }  # fmt: skip
    for (name, tasks), count in zip(pairs.items(), copies, strict=True):
        about[name] = _write_documents(out / f"documents-{name}.npz", tokenizer, tasks, count, seed, longest)
    conversation, prompts = Conversation(tokenizer), []
    for which, tasks in (("eval", load_tasks(split="eval", tasks_from=BUILTIN)), ("held", kept)):
        for t in tasks:
            messages = [rows.message(t, "cpu")]
            expert = rewritten(expert_source(t.id) or "", t.entry)
            prompts.append({
                "set": which, "task": t.id, "entry": t.entry, "difficulty": t.difficulty, "tokens": conversation.opening(messages),
                "begun": conversation.begun(messages), "expert_tokens": len(tokenizer(expert)["input_ids"]),
            })  # fmt: skip
    (out / "about.json").write_text(json.dumps(about, indent=1) + "\n")
    (out / "prompts.json").write_text(json.dumps(prompts))


def _tokenizer(out: Path, pairs: dict[str, list[tuple[Task, str]]], vocab: int, context: int, seed: int) -> Any:
    """Build the tokenizer from demonstrations of both sources, as ``small_models/build_model.py`` builds it from one."""
    some = random.Random(f"{seed} tokens").sample(pairs[PACK], min(TOKENIZER_TASKS, len(pairs[PACK])))
    texts = [f"{build_model.instruction(t, 'cpu')}\n```python\n{source}```" for t, source in (*pairs[TRAIN], *some)]
    short = line_tokens.shortening(pairs[TRAIN][0][0])
    core = line_tokens.lines_tokenizer(texts, vocab - len(models.ADDED_TOKENS), models.SPECIAL_TOKENS, short)
    tokenizer = models.wrapped(core.to_str(), f"{TEMPLATE}\n{answer_prefix.TEMPLATE}", context)
    answer_prefix.check_template(tokenizer, "of the study")
    tokenizer.save_pretrained(out / "base")
    return tokenizer


def _write_documents(
    path: Path, tokenizer: Any, tasks: Sequence[tuple[Task, str]], copies: int, seed: int, longest: int
) -> dict[str, int]:  # fmt: skip
    """Write the tokens of all demonstrations of one source that are short enough; return counts."""
    texts, prompts, owners = list[str](), list[str](), list[int]()
    for number, (task, source) in enumerate(tasks):
        copied = copying.copies(task, source, copies, f"{seed} {task.id}", entries())
        for renamed, text in [(task, source), *copied]:
            asked = [rows.message(renamed, "cpu")]
            prompts.append(tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False))
            texts.append(tokenizer.apply_chat_template([*asked, data.answer(text)], tokenize=False))
            owners.append(number)
    flat, sizes, heads, kept = list[np.ndarray](), list[int](), list[int](), list[int]()
    for begin in range(0, len(texts), 1000):
        part = slice(begin, begin + 1000)
        both = zip(_ids(tokenizer, texts[part]), _ids(tokenizer, prompts[part]), owners[part], strict=True)
        for whole, prompt, owner in both:
            # The answer begins as the template begins it; otherwise the model would learn something else than it is asked.
            if len(whole) <= longest and whole[: len(prompt)] == prompt:
                flat.append(np.asarray(whole, dtype=np.uint16))
                sizes.append(len(whole))
                heads.append(len(prompt))
                kept.append(owner)
    if not flat:
        raise UsageError(f"no demonstration of {len(texts)} has at most {longest} tokens")
    np.savez_compressed(path, tokens=np.concatenate(flat), sizes=sizes, heads=heads, owners=kept)
    answers = sum(sizes) - sum(heads)
    return {"tasks": len(tasks), "tasks_shown": len(set(kept)), "documents": len(sizes), "of": len(texts), "tokens": sum(sizes),
            "answer_tokens": answers}  # fmt: skip


def _ids(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    return list(tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"])
