"""A tokenizer for small models: whole lines of code are tokens, and names have the same tokens in prompt and answer.

It is trained in two stages, as SuperBPE (arXiv 2503.13423): first merges within words, then merges over words but never over the
end of a line. The name after ``def`` and the parameters of tasks are never merged with the text around them, so that a name in the
prompt is written with the same tokens in the answer. A normalizer may shorten the prompt. It belongs to the tokenizer, so that
training, reports and servers all send the shortened prompt.
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
"""Pieces of one kind of character each; merges of the first stage never join two kinds."""
LINES = r"^(?!def )[^\n]*\n?|^def |[A-Za-z]+|[0-9]+|_+|\([^\n]*\n?|[^\n]|\n"
"""Pieces of the second stage: whole lines; of the definition of a function ``def``, the words of its name, and the rest."""
SHARE = 0.3
"""Share of the tokens that the first stage makes at most."""
GLUE = frozenset({"mask", "dtype", "device", "layout"})
"""Parameters that are no tokens of their own, since every kernel has the same words from torch and Triton."""
LEAST = 3
"""A token of the second stage must be in so many documents: one of a single kernel could only be memorized."""


def shortening(task: Task) -> list[tuple[str, str]]:
    """Return regular expressions and their replacements that shorten every task's instruction.

    The task's id stays, and the first paragraph of its contract, and the signature as the first line of the function.

    Args:
        task: any task; all instructions have the same frame.

    Returns:
        Pairs of a regular expression and a replacement.
    """
    signature, rules = f"{task.entry}{task.signature}", list[tuple[str, str]]()
    for backend in ("cpu", "cuda"):
        text = instruction(task, backend)
        head, _, rest = text.partition(task.spec)
        before, _, after = rest.partition(signature)
        title = re.escape(head.partition(task.id)[2]).replace(re.escape(signature), r"[^\n]*").replace("\\\n", r"\n")
        rules += [(title, "\n"), (_exactly(after), ":\n"), (r"(\n\n(?!Rules)[^\n]+(\n[^\n]+)*)*" + _exactly(before), "\ndef ")]
    return list(dict.fromkeys(rules))


@functools.cache
def parameter_names() -> tuple[str, ...]:
    """Return the names of the train split's parameters that are words: shorter ones are symbols, which most lines contain."""
    found = {p for task in load_tasks(split="train") for p in task.signature.parameters}
    return tuple(sorted(p for p in found - GLUE if len(p) >= 3 and not p.startswith("_")))


def _exactly(text: str) -> str:
    """Return a regular expression of the tokenizers library that matches a text."""
    return re.sub(r"([^\w\s,;:'\"`<>=/])", r"\\\1", text).replace("\n", r"\n")


def lines_tokenizer(documents: Sequence[str], vocab: int, special: Sequence[str], short: Sequence[tuple[str, str]] = ()) -> Any:
    """Train a tokenizer.

    Args:
        documents: texts to train on, not shortened.
        vocab: number of tokens at most.
        special: special tokens.
        short: pairs of ``shortening``; empty for prompts in full.

    Returns:
        A ``tokenizers.Tokenizer``.
    """
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
    # Longer names first: the expression takes the first one that matches.
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
    """Return a tokenizer without the tokens that some documents do not need; bytes stay, and the documents keep their tokens.

    Tokens that are only parts of whole lines are removed too. A small model is faster with a small vocabulary.

    Args:
        tokenizer: a ``tokenizers.Tokenizer`` of ``lines_tokenizer``.
        documents: the texts.

    Returns:
        A ``tokenizers.Tokenizer``.
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
        while waiting:  # the merges of a line that has several tokens stay
            waiting = [p for t in waiting for p in made_of.get(t, ())]
            kept.update(waiting)
    ids = {t: n for n, t in enumerate(sorted(kept, key=model["vocab"].__getitem__))}
    model["vocab"], model["ignore_merges"] = ids, True  # a piece that is a token needs no merges
    model["merges"] = [[a, b] for a, b in pairs if {a, b, a + b} <= kept]
    for special in state["added_tokens"]:
        special["id"] = ids[special["content"]]
    return Tokenizer.from_str(json.dumps(state))


def _merges_of(tokenizer: Any) -> Iterator[tuple[str, str]]:
    for pair in json.loads(tokenizer.to_str())["model"]["merges"]:
        yield (pair[0], pair[1]) if not isinstance(pair, str) else tuple(pair.split(" ", 1))  # type: ignore[misc]


def _joined(pieces: dict[tuple[str, ...], int], most: int) -> Iterator[tuple[str, str]]:
    """Yield merges over words, the most frequent pair first.

    Args:
        pieces: the documents of each piece, as bits of a number; a piece is given by its tokens.
        most: number of merges at most.

    Yields:
        The two tokens that are merged.
    """
    counts, done = _PairCounts(pieces), 0
    while counts.heap and done < most:
        n, pair = heapq.heappop(counts.heap)
        if -n != counts.of[pair]:
            continue  # an outdated count
        if counts.documents(pair) < LEAST:
            continue
        done += 1
        yield pair
        counts.merge(pair)


class _PairCounts:
    """How often pairs of neighbouring tokens occur, by number of documents; kept up to date while pairs are merged."""

    def __init__(self, pieces: dict[tuple[str, ...], int]) -> None:
        self._words, self._where = [list(p) for p in pieces], list(pieces.values())
        self._weight = [mask.bit_count() for mask in self._where]
        self.of: dict[tuple[str, str], int] = defaultdict(int)
        self._holders: dict[tuple[str, str], set[int]] = defaultdict(set)
        for i in range(len(self._words)):
            self._count(i, 1)
        self.heap = [(-n, pair) for pair, n in self.of.items()]
        heapq.heapify(self.heap)

    def _count(self, i: int, sign: int) -> set[tuple[str, str]]:
        """Add the pairs of a word to the counts, or take them away; return the pairs."""
        pairs = list(zip(self._words[i], self._words[i][1:], strict=False))
        for pair in pairs:
            self.of[pair] += sign * self._weight[i]
            if sign > 0:
                self._holders[pair].add(i)
            else:
                self._holders[pair].discard(i)
        return set(pairs)

    def documents(self, pair: tuple[str, str]) -> int:
        """Return the number of documents that have a pair."""
        mask = 0
        for i in self._holders[pair]:
            mask |= self._where[i]
        return mask.bit_count()

    def merge(self, pair: tuple[str, str]) -> None:
        """Merge a pair in all words."""
        changed: set[tuple[str, str]] = set()
        for i in sorted(self._holders.pop(pair)):
            changed |= self._count(i, -1)
            word, k = self._words[i], 0
            while k < len(word) - 1:
                if (word[k], word[k + 1]) == pair:
                    word[k : k + 2] = [pair[0] + pair[1]]
                k += 1
            changed |= self._count(i, 1)
        for other in changed - {pair}:
            if self.of[other] > 0:
                heapq.heappush(self.heap, (-self.of[other], other))
