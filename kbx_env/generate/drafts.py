"""A draft: everything about one generated task, and how it becomes the text of its files."""

from __future__ import annotations

import builtins
import inspect
import keyword
import random
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kbx_env.protocol.wire import DTYPES

WIDTH = 116
"""Columns of a contract's text."""
DTYPE_WORDS = {
    "f32": ("fp32", "float32"),
    "f16": ("fp16", "float16"),
    "bf16": ("bf16", "bfloat16"),
    "i64": ("int64",),
    "i8": ("int8",),
}
"""Names of dtypes in contracts."""


@dataclass(frozen=True)
class Draft:
    """One generated task.

    Attributes:
        family: that drew it.
        category: of the task.
        words: words of the function's name.
        parameters: of the signature, in order; with defaults as Python writes them.
        body: statements of the reference.
        helpers: functions that the reference calls.
        summary: first sentence of the contract.
        details: further paragraphs.
        examples: arguments of example calls, as Python writes them.
        takes: dtype by tensor parameter, for the examples.
        fields: arguments of ``@task`` as Python writes them.
        imports: further import lines of the task.
        definitions: functions of the task file that its cases need.
        expert: source of the kernel; ``ENTRY`` stands for the function's name.
        size: measure of the graph: number of primitives, where backward passes count twice.
    """

    family: str
    category: str
    words: tuple[str, ...]
    parameters: str
    body: tuple[str, ...]
    summary: str
    details: tuple[str, ...]
    examples: tuple[str, ...]
    takes: Mapping[str, str]
    fields: Mapping[str, str]
    expert: str
    size: int
    helpers: str = ""
    imports: tuple[str, ...] = ()
    definitions: str = ""
    hard: int = 0

    @property
    def difficulty(self) -> int:
        """From 1 (one simple kernel) to 5: what the family needs, and the size of the graph."""
        return max(1, min(5, self.hard + (self.size + 1) // 3))

    def entry(self, taken: set[str]) -> str:
        """Return a name that is not taken yet, and that the kernel's file does not need for something else.

        A function named ``min`` would hide Python's ``min`` from its own file.
        """
        name = "_".join(dict.fromkeys(self.words))
        used = set(re.findall(r"(?<![.\w])[A-Za-z_]\w*", "\n".join([self.expert, *self.body, self.helpers])))
        if name in used or name in dir(builtins) or keyword.iskeyword(name):
            name = f"{name}_{self.family}"
        found, k = name, 2
        while found in taken:
            found, k = f"{name}_{k}", k + 1
        return found

    def reference(self, name: str, contract: str = "") -> str:
        """Return the source of the reference function.

        Args:
            name: of the function.
            contract: its docstring.

        Returns:
            The function, with the functions that it calls before it.
        """
        text = f'    """{contract}\n    """\n' if contract else ""
        return f"def {name}({self.parameters}):\n{text}" + "".join(f"    {line}\n" for line in self.body)

    def task_file(self, name: str) -> str:
        """Return the task file.

        Args:
            name: of the function.

        Returns:
            Its text.
        """
        fields = {"difficulty": str(self.difficulty), **self.fields}
        declared = "".join(f"    {k}={v},\n" for k, v in fields.items())
        lines = ["import torch", "import torch.nn.functional as F", *sorted(self.imports), ""]
        used = "\n".join([*fields.values(), self.definitions])
        names = [n for n in SPEC_NAMES if _uses(used, n)]
        laws = [n for n in ("Close", "Exact") if _uses(used, n)]
        lines += [f"from kbx_env.spec.criteria import {', '.join(laws)}"]
        lines += [f"from kbx_env.spec.task import {', '.join([*names, 'task'])}"]
        text = "\n".join(lines).replace(
            "import torch.nn.functional as F\n", "" if "F." not in self._code() else "import torch.nn.functional as F\n"
        )
        text += "\n\n\n" + (self.definitions + "\n\n" if self.definitions else "")
        text += self.helpers + ("\n\n" if self.helpers else "")
        return (
            f'"""{self.category}/{name}: generated, family {self.family}."""\n\n{text}@task(\n{declared})\n'
            + self.reference(name, textwrap.indent(self.contract(name), "    ").strip())
        )

    def _code(self) -> str:
        return self.helpers + "".join(self.body)

    def expert_file(self, name: str) -> str:
        """Return the kernel's file; ``name`` is that of the function."""
        return re.sub(r"\n\n+(?= )", "\n", self.expert).replace("ENTRY", name)

    def contract(self, name: str) -> str:
        """Return the docstring of the task; ``name`` is that of the function."""
        shown = [f"Example: {name}({e}) = {self._result(name, e)}" for e in self.examples]
        lines = [_fill(line, "    ") for line in shown]
        paragraphs = [
            _fill(self.summary),
            "\n".join(lines),
            *(_fill(d) for d in self.details if d),
        ]
        return "\n\n".join(paragraphs)

    def _result(self, name: str, example: str) -> str:
        """Return the result of an example call as text."""
        call: Callable[..., Any] = self.function(name)
        bound: dict[str, Any] = {}
        signature = inspect.signature(call)

        def take(*args: Any, **kwargs: Any) -> None:
            bound.update(signature.bind(*args, **kwargs).arguments)

        eval(f"take({example})", {"take": take})
        for key, value in bound.items():
            if key in self.takes:
                dtype = DTYPES[self.takes[key]]
                bound[key] = torch.tensor(value, dtype=torch.float64 if dtype.is_floating_point else dtype)
        found = call(**bound)
        if isinstance(found, tuple):
            return "(" + ", ".join(_shown(f) for f in found) + ")"
        return _shown(found)

    def function(self, name: str = "f") -> Callable[..., Any]:
        """Return the reference as a function."""
        scope: dict[str, Any] = {}
        code = "import torch\nimport torch.nn.functional as F\n\n" + self.helpers + "\n" + self.reference(name)
        exec(compile(code, f"<{name}>", "exec"), scope)
        return scope[name]


SPEC_NAMES = ("Case", "Constant", "Cost", "HalfNormal", "Ints", "Normal", "Outlier", "T", "Uniform")
"""Names of ``spec.task`` that drafts use."""


def _uses(text: str, name: str) -> bool:
    return re.search(rf"\b{name}\(", text) is not None


def _shown(value: torch.Tensor) -> str:
    """Return a tensor as nested lists of numbers with six digits."""

    def number(v: Any) -> str:
        if isinstance(v, list):
            return "[" + ", ".join(map(number, v)) + "]"
        return f"{v + 0.0:.6g}" if isinstance(v, float) else str(v)  # + 0.0: no negative zero

    return number(value.tolist())


@dataclass
class Voice:
    """Chooses among phrasings of the same meaning.

    Attributes:
        rng: makes the choices.
    """

    rng: random.Random = field(default_factory=random.Random)

    def one(self, *phrases: str) -> str:
        """Return one of the phrasings."""
        return self.rng.choice(phrases)

    def dtype(self, name: str) -> str:
        """Return a name of a dtype."""
        return self.one(*DTYPE_WORDS[name])

    def strides(self, names: Sequence[str]) -> str:
        """Return the sentence about memory layouts and about what is left unchanged."""
        who = listed(names)
        one = len(names) == 1
        return self.one(
            f"{who} may have any strides and {'is' if one else 'are'} not changed.",
            f"{who} may be non-contiguous (any strides); the call does not change {'it' if one else 'them'}.",
            f"Inputs may have any strides, and stay as they are: {who} must not be modified.",
        )

    def empty(self, what: str = "tensors") -> str:
        """Return the sentence about tensors without elements and without axes."""
        return self.one(
            f"0-d and empty {what} are allowed.",
            f"{what.capitalize()} may be 0-d or empty.",
            f"The {what} can be empty or 0-d.",
        )

    def closing(self, arithmetic: str, names: Sequence[str], empty: str = "") -> str:
        """Return the last paragraph of a contract.

        Args:
            arithmetic: sentences about the precision.
            names: of the inputs.
            empty: sentence about empty tensors.

        Returns:
            Sentences about arithmetic, layouts, empty tensors and values that no case has.
        """
        return " ".join(filter(None, (arithmetic, self.strides(names), empty, self.untested())))

    def rounding(self, dtype: str, results: int = 1) -> str:
        """Return the sentence about the precision of the arithmetic; ``results`` is the number of results."""
        if dtype == "f32":
            return self.one("Compute in fp32.", "All arithmetic is in fp32.", "The arithmetic has fp32 precision.")
        word, result = self.dtype(dtype), "the result" if results == 1 else "each result"
        return self.one(
            f"Compute in fp32 and round {result} once to {word}.",
            f"All arithmetic is in fp32; only {'the result is' if results == 1 else 'the results are'} rounded to {word}.",
            f"Intermediate values have fp32 precision, and {result} is rounded to {word} at the end.",
        )

    def untested(self) -> str:
        """Return the sentence about values that no case has."""
        return self.one(
            "Infinities and NaN are not tested.",
            "No input holds infinities or NaN.",
            "NaN and infinities do not occur.",
        )

    def where(self, meanings: Sequence[str]) -> str:
        """Return the sentence that defines names of functions; empty for none."""
        if not meanings:
            return ""
        return self.one(
            f"Here {listed(meanings)}.", f"In this formula {listed(meanings)}.", f"By definition, {listed(meanings)}."
        )


def _fill(text: str, indent: str = "") -> str:
    """Return a text in lines of at most ``WIDTH`` columns; further lines begin with the indent."""
    return textwrap.fill(text, WIDTH, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)


def listed(names: Sequence[str], last: str = "and") -> str:
    """Return names as ``a``, ``a and b``, ``a, b and c``; ``last`` is the word before the last one."""
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + f" {last} " + names[-1]
