"""A tokenizer for small models: whole lines of code are tokens, names are tokenized alike wherever they are copied from and to.

Two stages, as in SuperBPE (arXiv 2503.13423): merges inside of words first, then merges over words but never over the end of a
line. Names are the exception: the one after ``def``, and the parameters of the tasks. They are never merged with anything around
them, so that a name read in the prompt is written with the same tokens. A normalizer may shorten the prompt: it belongs to the
tokenizer, so that training, reports and servers all send what the model was trained on, and nobody has to know.
"""

from __future__ import annotations

import functools
import heapq
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from kbx_env.envs.prompt import instruction
from kbx_env.spec.catalog import load_tasks
from kbx_env.spec.task import Task

WORDS = r"[A-Za-z]+|[0-9]+|_+| +|\n+|[^\sA-Za-z0-9_]|[^\S \n]+"
"""Pieces of one kind of letter each: merges of the first stage never join two kinds."""
LINES = r"^(?!def )[^\n]*\n?|^def |[A-Za-z]+|[0-9]+|_+|\([^\n]*\n?|[^\n]|\n"
"""Whole lines; of a line that defines a function ``def``, the words of the name, and the rest."""
SHARE = 0.3
"""Of the tokens, how many the first stage may take."""
GLUE = frozenset({"mask", "dtype", "device", "layout"})
"""Parameters whose names are in every kernel anyway, for what they are called in torch and Triton."""
LEAST = 3
"""Documents that must share a token of the second stage: one of a single kernel could only be learned by heart."""


def shortening(task: Task) -> list[tuple[str, str]]:
    """Regular expressions and what they are replaced by, which shorten every task's instruction.

    What stays is the task's id, the first paragraph of its contract, and the signature as the line that begins the function.
    """
    named, told = f"{task.entry}{task.signature}", []
    for backend in ("cpu", "cuda"):
        text = instruction(task, backend)
        head, _, rest = text.partition(task.spec)
        before, _, after = rest.partition(named)
        title = re.escape(head.partition(task.id)[2]).replace(re.escape(named), r"[^\n]*").replace("\\\n", r"\n")
        told += [(title, "\n"), (_exactly(after), ":\n"), (r"(\n\n(?!Rules)[^\n]+(\n[^\n]+)*)*" + _exactly(before), "\ndef ")]
    return list(dict.fromkeys(told))


@functools.cache
def parameter_names() -> tuple[str, ...]:
    """The parameters of the train split's tasks that are words: shorter ones are symbols, and lines are full of them."""
    found = {p for task in load_tasks(split="train") for p in task.signature.parameters}
    return tuple(sorted(p for p in found - GLUE if len(p) >= 3 and not p.startswith("_")))


def _exactly(text: str) -> str:
    return re.sub(r"([^\w\s,;:'\"`<>=/])", r"\\\1", text).replace("\n", r"\n")


def lines_tokenizer(documents: Sequence[str], vocab: int, special: Sequence[str], short: Sequence[tuple[str, str]] = ()) -> Any:
    """A ``tokenizers.Tokenizer`` of at most ``vocab`` tokens; documents are as they come, not shortened yet."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    def splitter(pattern: str) -> Any:
        return pre_tokenizers.Sequence([
            pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        ])  # fmt: skip

    normalizer = normalizers.Sequence([normalizers.Replace(Regex(p), by) for p, by in short]) if short else None
    texts = [normalizer.normalize_str(d) if normalizer is not None else d for d in documents]
    first = Tokenizer(models.BPE())
    first.pre_tokenizer = splitter(WORDS)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    first.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=max(len(alphabet) + len(special), int(SHARE * vocab)), special_tokens=list(special), show_progress=False,
        initial_alphabet=alphabet, min_frequency=2,
    ))  # fmt: skip
    ids = dict(first.get_vocab())
    parts = sorted(ids, key=ids.__getitem__)
    merges = list(_merges_of(first))
    # Longer ones first: of two that fit, the expression takes the one that it names first.
    alone = "|".join(sorted(parameter_names(), key=len, reverse=True))
    lines = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(rf"(?<![\w.])(?:{alone})(?!\w)"), "isolated"),
        pre_tokenizers.Split(Regex(LINES), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    pieces: dict[tuple[str, ...], int] = defaultdict(int)
    known: dict[str, tuple[str, ...]] = {}
    for number, text in enumerate(texts):
        for piece, (start, end) in lines.pre_tokenize_str(text):
            if piece not in known:
                known[piece] = tuple(first.encode(text[start:end]).tokens)
            pieces[known[piece]] |= 1 << number
    for one, other in _joined(pieces, vocab - len(parts)):
        merges.append((one, other))
        if one + other not in ids:
            ids[one + other] = len(ids)
    core = Tokenizer(models.BPE(vocab=ids, merges=merges))
    core.add_special_tokens(list(special))
    if normalizer is not None:
        core.normalizer = normalizer
    core.pre_tokenizer, core.decoder = lines, decoders.ByteLevel()
    return core


def only_used(tokenizer: Any, documents: Sequence[str]) -> Any:
    """The tokenizer with those tokens alone that some documents are made of, and bytes: these documents are tokenized as before.

    What a token was merged from goes too, where it only ever is part of whole lines: a small model spends most of its time on
    rows of a vocabulary that nothing it is shown or asked for has.
    """
    from tokenizers import Tokenizer

    state = json.loads(tokenizer.to_str())
    model, pairs = state["model"], list(_merges_of(tokenizer))
    made_of = {one + other: (one, other) for one, other in reversed(pairs)}
    pieces = set[str]()
    for text in documents:
        if tokenizer.normalizer is not None:
            text = tokenizer.normalizer.normalize_str(text)
        pieces.update(piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text))
    kept = {t for t in model["vocab"] if len(t) == 1} | {t["content"] for t in state["added_tokens"]}
    for piece in pieces:
        parts = [t.value for t in tokenizer.model.tokenize(piece)]
        waiting = parts if len(parts) > 1 else []
        kept.update(parts)
        while waiting:  # of a line in several tokens every step of its merging stays
            waiting = [p for t in waiting for p in made_of.get(t, ())]
            kept.update(waiting)
    ids = {t: n for n, t in enumerate(sorted(kept, key=model["vocab"].__getitem__))}
    model["vocab"], model["ignore_merges"] = ids, True  # a piece that is a token is found as it is
    model["merges"] = [[a, b] for a, b in pairs if {a, b, a + b} <= kept]
    for special in state["added_tokens"]:
        special["id"] = ids[special["content"]]
    return Tokenizer.from_str(json.dumps(state))


def _merges_of(tokenizer: Any) -> Iterator[tuple[str, str]]:
    for pair in json.loads(tokenizer.to_str())["model"]["merges"]:
        yield (pair[0], pair[1]) if not isinstance(pair, str) else tuple(pair.split(" ", 1))  # type: ignore[misc]


def _joined(pieces: dict[tuple[str, ...], int], most: int) -> Iterator[tuple[str, str]]:
    """Merges over words, the most frequent pair first. ``pieces``: of which documents (bits) each piece is."""
    words = [list(p) for p in pieces]
    where = list(pieces.values())
    weight = [mask.bit_count() for mask in where]
    count: dict[tuple[str, str], int] = defaultdict(int)
    holders: dict[tuple[str, str], set[int]] = defaultdict(set)
    for i, word in enumerate(words):
        for pair in zip(word, word[1:], strict=False):
            count[pair] += weight[i]
            holders[pair].add(i)
    heap = [(-n, pair) for pair, n in count.items()]
    heapq.heapify(heap)
    done = 0
    while heap and done < most:
        n, pair = heapq.heappop(heap)
        if -n != count[pair]:
            continue  # an older count of it
        documents = 0
        for i in holders[pair]:
            documents |= where[i]
        if documents.bit_count() < LEAST:
            continue
        done += 1
        yield pair
        changed: set[tuple[str, str]] = set()
        for i in sorted(holders.pop(pair)):
            word = words[i]
            for p in zip(word, word[1:], strict=False):
                count[p] -= weight[i]
                changed.add(p)
                holders[p].discard(i)
            k = 0
            while k < len(word) - 1:
                if (word[k], word[k + 1]) == pair:
                    word[k : k + 2] = [pair[0] + pair[1]]
                k += 1
            for p in zip(word, word[1:], strict=False):
                count[p] += weight[i]
                changed.add(p)
                holders[p].add(i)
        for p in changed - {pair}:
            if count[p] > 0:
                heapq.heappush(heap, (-count[p], p))
