"""Demonstrations that teach a small model to copy names: the same contract and kernel under made-up names.

A small model that sees every function under one name memorizes the names, and answers an unseen task with the function of
another one. Made-up names can only be read from the prompt. A copy is correct because the same kernel under its real name was
graded correct: names change module-wide onto names that the module does not have.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import functools
import inspect
import keyword
import random
import re
from collections.abc import Mapping

from kbx_env.train.renaming import ModuleNames, occurrences, parameters_of, replaced

from experiments.small_models.line_tokens import parameter_names
from kbx_env.spec.catalog import expert_source, load_tasks
from kbx_env.spec.task import Task

PARAMETERS = 0.7
"""Share of the copies that have other parameters too: names of other tasks' parameters."""
MADE_UP = 0.3
"""Share of the words of a name that are joined from parts of two words: names of unseen tasks have unseen words too."""
_SHORT = 3
"""A parameter with fewer letters keeps its name: it is a word of the contract's prose, or a symbol in its formulas."""
_TRIES = 20
"""Draws of names for one copy, until the names do not clash."""


@functools.cache
def words() -> tuple[str, ...]:
    """Return the words of the names in the train split's signatures and kernels."""
    found: set[str] = set()
    for task in load_tasks(split="train"):
        for name in re.findall(r"[A-Za-z_]\w+", f"{task.entry}{task.signature} {expert_source(task.id) or ''}"):
            found.update(w for w in name.lower().split("_") if w.isalpha() and 2 <= len(w) <= 12)
    return tuple(sorted(found))


def copies(
    task: Task, source: str, count: int, seed: int | str, forbidden: frozenset[str] = frozenset()
) -> list[tuple[Task, str]]:
    """Return a task and its source under new names.

    Args:
        task: a task of the train split.
        source: a kernel of the task that was graded correct.
        count: number of copies; fewer where the source's names cannot change.
        seed: seed of the names.
        forbidden: names that must not be used.

    Returns:
        For each copy the task as its prompt shows it, and the source.
    """
    draw, found = random.Random(f"{seed} copies"), []
    possible, own = [n for n in parameter_names() if _possible(n) and n not in forbidden], _parameters(task)
    for _ in range(count):
        # Chosen once for all tries: otherwise few copies would have other parameters, since these clash more often.
        some = [p for p in own if draw.random() < 0.5] or own[:1] if draw.random() < PARAMETERS else []
        for _ in range(_TRIES):
            names = {task.entry: _name(draw), **dict(zip(some, draw.sample(possible, len(some)), strict=True))}
            if any(not _possible(n) or n in forbidden for n in names.values()):
                continue
            text = with_contract(source, task.entry, names)
            if text is not None:
                found.append((_renamed(task, names), text))
                break
    return found


def with_contract(source: str, entry: str, names: Mapping[str, str]) -> str | None:
    """Return a source with other names for its entry function and that function's parameters.

    Args:
        source: a Python module.
        entry: the entry function.
        names: old names, of the entry or its parameters, and new ones.

    Returns:
        The source; ``None`` where a name cannot change or a new name is taken.

    Raises:
        SyntaxError: the source is no Python.
    """
    free, known, edits = _contract(source, entry)
    if not set(names) <= free or known & set(names.values()) or len(set(names.values())) < len(names):
        return None
    return replaced(source, edits, names)


@functools.lru_cache(maxsize=8)
def _contract(source: str, entry: str) -> tuple[frozenset[str], frozenset[str], list[tuple[int, int, str]]]:
    """Return the names that may change, with the entry's and its parameters'; names that are taken; where names occur."""
    tree = ast.parse(source)
    own = {entry, *(p for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == entry for p in parameters_of(n))}
    module = ModuleNames(tree, None, frozenset(own))
    known = module.bound | module.imported | {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    return frozenset(module.free), frozenset(known), occurrences(source, tree, module)


def translated(feedback: str, wrong: str, task: Task, its_wrong: str, renamed_task: Task) -> str | None:
    """Return the feedback on a wrong module as it would be on the same module under the names of a copy.

    English words of the feedback stay, even where parameters have the same names.

    Args:
        feedback: the feedback.
        wrong: the module of ``task``.
        task: the task.
        its_wrong: the same module under the names of the copy.
        renamed_task: the task under these names.

    Returns:
        The feedback; ``None`` where it cannot be derived for certain.
    """
    lines, its_lines = wrong.split("\n"), its_wrong.split("\n")
    if len(lines) != len(its_lines) or len(_WORD.findall(wrong)) != len(_WORD.findall(its_wrong)):
        return None
    same, words = dict(zip(lines, its_lines, strict=True)), dict[str, set[str]]()
    for one, other in zip(_WORD.findall(wrong), _WORD.findall(its_wrong), strict=True):
        words.setdefault(one, set()).add(other)
    names = dict(zip(task.signature.parameters, renamed_task.signature.parameters, strict=True)) | {task.entry: renamed_task.entry}

    def renamed(match: re.Match[str]) -> str:
        """Rename the names in a piece of the feedback that quotes code: words that changed somewhere in the module."""
        return _WORD.sub(lambda m: names.get(m[0]) or min(words.get(m[0], set()) - {m[0]}, default=m[0]), match[0])

    made, quoted, moved = list[str](), "", list[tuple[int, int]]()
    for line in feedback.split("\n"):
        if line.strip() and line in same:
            made.append(same[line])
            quoted = line
        elif quoted and line.strip() == "^":
            moved.append((column := len(line) - 1, its_column := _moved(quoted, same[quoted], column)))
            made.append(" " * its_column + "^")
        else:
            made.append(_LABEL.sub(renamed, _CODE.sub(renamed, _JOINED.sub(renamed, line))))
    text = "\n".join(made)
    for column, its_column in moved:
        text = re.sub(rf"\bat (\d+):{column}\b", rf"at \1:{its_column}", text)
    left = {n for n in names if "_" in n and names[n] != n} & set(_WORD.findall(text)) - set(_WORD.findall(its_wrong))
    lost = {w for q in _CODE.findall(text) for w in _WORD.findall(q)} & (set(words) - set(_WORD.findall(its_wrong)))
    return None if left or lost else text


_WORD = re.compile(r"\w+")
_CODE = re.compile(r"'[^'\n]*'|`[^`\n]*`|(?<=\boutside )\w+")
"""Pieces of feedback that are quoted from a module."""
_JOINED = re.compile(r"\b[A-Za-z]\w*_\w+")
"""Words with an underscore, which are no English words."""
_LABEL = re.compile(r"^- .*?(?=: |$)")
"""The label of a test case at the start of a line: its sizes and arguments."""


def _moved(line: str, other: str, column: int) -> int:
    """Return where a column of a line is in the same line under other names."""
    old = new = 0
    for one, its in zip(re.findall(r"\w+|\W", line), re.findall(r"\w+|\W", other), strict=True):
        if old + len(one) > column:
            break
        old, new = old + len(one), new + len(its)
    return new + column - old


def _name(draw: random.Random) -> str:
    """Draw a name like those of tasks: one to four words, sometimes with a digit or an underscore at the end."""
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
    """Return whether Python takes a name and it is none of the language's own."""
    return name.isidentifier() and not keyword.iskeyword(name) and not keyword.issoftkeyword(name) and name not in dir(builtins)


def _parameters(task: Task) -> list[str]:
    return [p for p in task.signature.parameters if len(p) >= _SHORT and not p.startswith("_")]


def _renamed(task: Task, names: Mapping[str, str]) -> Task:
    """Return the task as the prompt of a copy shows it. Its id keeps the category."""
    signature = task.signature
    kept = [p.replace(name=names.get(p.name, p.name)) for p in signature.parameters.values()]
    entry, spec = names[task.entry], task.spec
    for old, new in names.items():
        spec = re.sub(rf"\b{re.escape(old)}\b" + (r"(?=\()" if old == task.entry else ""), new, spec)
    category = task.id.split("/")[0]
    return dataclasses.replace(
        task, id=f"{category}/{entry}", entry=entry, spec=spec,
        signature=inspect.Signature(kept, return_annotation=signature.return_annotation),
    )  # fmt: skip
