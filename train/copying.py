"""Demonstrations that teach copying: the same contract under another name, in the prompt and in the answer alike.

A model that sees every function under one name learns the names by heart, and answers an unseen task with a function of another
one. Here names tell nothing, so that the only way to know them is to read them. What such a row shows is right because the same
kernel under its real name was graded correct: names change module-wide onto names that the module does not have.
"""

from __future__ import annotations

import builtins
import dataclasses
import functools
import inspect
import keyword
import random
import re
from collections.abc import Mapping

from kbx_env.train.tokens import parameter_names
from kbx_env.train.vary import with_contract

from kbx_env.spec.catalog import expert_source, load_tasks
from kbx_env.spec.task import Task

PARAMETERS = 0.7
"""Of the copies, how many have other parameters too: names that other tasks' parameters have."""
MADE_UP = 0.3
"""Of the words of a name, how many are cut from two: names of unseen tasks have unseen words."""
_SHORT = 3
"""A parameter of fewer letters keeps its name: it is a word of the contract's prose, or a symbol of its formulas."""
_TRIES = 20


@functools.cache
def words() -> tuple[str, ...]:
    """Words of the names in the train split's signatures and kernels."""
    found: set[str] = set()
    for task in load_tasks(split="train"):
        for name in re.findall(r"[A-Za-z_]\w+", f"{task.entry}{task.signature} {expert_source(task.id) or ''}"):
            found.update(w for w in name.lower().split("_") if w.isalpha() and 2 <= len(w) <= 12)
    return tuple(sorted(found))


def copies(
    task: Task, source: str, count: int, seed: int | str, forbidden: frozenset[str] = frozenset()
) -> list[tuple[Task, str]]:
    """``count`` times the task and the source under new names, fewer where the source's names cannot change.

    Args:
        task: of the train split.
        source: a kernel of it that was graded correct.
        count: how many.
        seed: of the names.
        forbidden: names that are not given.
    """
    draw, found = random.Random(f"{seed} copies"), []
    given, mine = [n for n in parameter_names() if _possible(n) and n not in forbidden], _parameters(task)
    for _ in range(count):
        # Chosen once: names that clash are drawn anew, or few copies would have other parameters.
        some = [p for p in mine if draw.random() < 0.5] or mine[:1] if draw.random() < PARAMETERS else []
        for _ in range(_TRIES):
            names = {task.entry: _name(draw), **dict(zip(some, draw.sample(given, len(some)), strict=True))}
            if any(not _possible(n) or n in forbidden for n in names.values()):
                continue
            text = with_contract(source, task.entry, names)
            if text is not None:
                found.append((_renamed(task, names), text))
                break
    return found


def retold(said: str, wrong: str, task: Task, shown: str, told: Task) -> str | None:
    """A verdict on ``wrong``, a module of ``task``, as it would be on ``shown``, the same module under the names of a copy.

    ``None`` where that cannot be told for certain. Words of a verdict that are English stay, whatever parameters are called.
    """
    lines, theirs = wrong.split("\n"), shown.split("\n")
    if len(lines) != len(theirs) or len(_WORD.findall(wrong)) != len(_WORD.findall(shown)):
        return None
    same, words = dict(zip(lines, theirs, strict=True)), dict[str, set[str]]()
    for one, other in zip(_WORD.findall(wrong), _WORD.findall(shown), strict=True):
        words.setdefault(one, set()).add(other)
    names = dict(zip(task.signature.parameters, told.signature.parameters, strict=True)) | {task.entry: told.entry}

    def renamed(match: re.Match[str]) -> str:
        """Names in a piece of the verdict that speaks of code; where a word stays here and changes there, it is a name."""
        return _WORD.sub(lambda m: names.get(m[0]) or min(words.get(m[0], set()) - {m[0]}, default=m[0]), match[0])

    made, quoted, moved = list[str](), "", list[tuple[int, int]]()
    for line in said.split("\n"):
        if line.strip() and line in same:
            made.append(same[line])
            quoted = line
        elif quoted and line.strip() == "^":
            moved.append((at := len(line) - 1, there := _moved(quoted, same[quoted], at)))
            made.append(" " * there + "^")
        else:
            made.append(_LABEL.sub(renamed, _CODE.sub(renamed, _JOINED.sub(renamed, line))))
    text = "\n".join(made)
    for at, there in moved:
        text = re.sub(rf"\bat (\d+):{at}\b", rf"at \1:{there}", text)
    left = {n for n in names if "_" in n and names[n] != n} & set(_WORD.findall(text)) - set(_WORD.findall(shown))
    lost = {w for q in _CODE.findall(text) for w in _WORD.findall(q)} & (set(words) - set(_WORD.findall(shown)))
    return None if left or lost else text


_WORD = re.compile(r"\w+")
_CODE = re.compile(r"'[^'\n]*'|`[^`\n]*`|(?<=\boutside )\w+")
"""Of a verdict, what is quoted from a module."""
_JOINED = re.compile(r"\b[A-Za-z]\w*_\w+")
"""What has an underscore is no English word."""
_LABEL = re.compile(r"^- .*?(?=: |$)")
"""The case that a line is about, told by sizes and arguments."""


def _moved(line: str, other: str, at: int) -> int:
    """Where a column of a line is in the same line under other names."""
    old = new = 0
    for one, its in zip(re.findall(r"\w+|\W", line), re.findall(r"\w+|\W", other), strict=True):
        if old + len(one) > at:
            break
        old, new = old + len(one), new + len(its)
    return new + at - old


def _name(draw: random.Random) -> str:
    """Like a task's own name: one to four words, now and then a digit or an underscore at the end."""
    made = []
    for _ in range(draw.choices((1, 2, 3, 4), (5, 6, 3, 2))[0]):
        word = draw.choice(words())
        if draw.random() < MADE_UP:
            other = draw.choice(words())
            word = word[: draw.randint(1, len(word))] + other[draw.randint(0, len(other) - 1) :]
        made.append(word)
    if draw.random() < 0.4:
        made.insert(0, "fused")
    return "_".join(made) + draw.choices(("", "_", str(draw.randint(0, 9)), f"{draw.randint(1, 3)}d"), (16, 1, 1, 2))[0]


def _possible(name: str) -> bool:
    return name.isidentifier() and not keyword.iskeyword(name) and not keyword.issoftkeyword(name) and name not in dir(builtins)


def _parameters(task: Task) -> list[str]:
    return [p for p in task.signature.parameters if len(p) >= _SHORT and not p.startswith("_")]


def _renamed(task: Task, names: Mapping[str, str]) -> Task:
    """The task as the prompt tells it. Its id keeps the category."""
    signature = task.signature
    kept = [p.replace(name=names.get(p.name, p.name)) for p in signature.parameters.values()]
    entry, spec = names[task.entry], task.spec
    for old, new in names.items():
        spec = re.sub(rf"\b{re.escape(old)}\b" + (r"(?=\()" if old == task.entry else ""), new, spec)
    told = task.id.split("/")[0]
    return dataclasses.replace(
        task, id=f"{told}/{entry}", entry=entry, signature=inspect.Signature(kept, return_annotation=signature.return_annotation),
        spec=spec,
    )  # fmt: skip
