"""Pieces of source text that the families share: lines of kernels, fields of ``@task``, and tensors of examples."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence

VALUES = (-2, -1, -0.5, 0, 0.5, 1, 1.5, 2)
"""Numbers of example tensors."""


def indented(lines: Iterable[str], depth: int = 1) -> str:
    """Return lines with an indent."""
    return "\n".join("    " * depth + line for line in lines)


def pointers(names: Iterable[str]) -> str:
    """Return the parameters of a kernel for tensors."""
    return ", ".join(f"p_{n}" for n in names)


def loads(names: Iterable[str], at: str, mask: bool = True) -> list[str]:
    """Return statements of a kernel that load tensors as fp32.

    Args:
        names: of the tensors.
        at: offset of the elements.
        mask: load only where ``inside``.

    Returns:
        One statement for each tensor.
    """
    where = ", mask=inside, other=0.0" if mask else ""
    return [f"{n} = tl.load(p_{n} + {at}{where}).to(tl.float32)" for n in names]


def stores(values: Mapping[str, str], at: str) -> list[str]:
    """Return statements of a kernel that store results.

    Args:
        values: name of the value by result.
        at: offset of the elements.

    Returns:
        One statement for each result.
    """
    return [f"tl.store({o} + {at}, {v}.to({o}.dtype.element_ty), mask=inside)" for o, v in values.items()]


def contiguous(names: Iterable[str]) -> list[str]:
    """Return host statements that make tensors contiguous."""
    return [f"{n} = {n}.contiguous()" for n in names]


def empty_like(names: Iterable[str]) -> str:
    """Return host expressions for new contiguous tensors with the shapes and dtypes of others."""
    return ", ".join(f"torch.empty({n}.shape, dtype={n}.dtype, device={n}.device)" for n in names)


def block(items: Iterable[str]) -> str:
    """Return a tuple, one item on each line, as the value of an argument of ``@task``."""
    return "(\n        " + ",\n        ".join(items) + ",\n    )"


def mapping(entries: Mapping[str, str]) -> str:
    """Return a dict with texts as keys; its values are source text."""
    return "{" + ", ".join(f'"{k}": {v}' for k, v in entries.items()) + "}"


def flat_cases(transposed: str, strided: str, given: str = "") -> list[str]:
    """Return the cases of an elementwise function of tensors of one shape.

    Args:
        transposed: tensor with that layout in one case.
        strided: the same.
        given: name of a number that the function takes.

    Returns:
        Source text of each case.
    """

    def case(shape: str, value: float | None = None, more: str = "") -> str:
        args = f', {{"{given}": {value}}}' if given and value is not None else ""
        return f'Case({{"*": {shape}}}{args}{more})'

    return [
        case("(129, 257)"),
        *([case("(129, 257)", -1.25)] if given else []),
        case("(128, 512)", 0.75, ", draw=Outlier()"),
        case("(5,)"),
        case("(3, 1, 1025)", 2.5),
        case("(33, 65)", -0.5, f', layouts={{"{transposed}": "transposed"}}'),
        case("(7, 31)", 1.75, f', layouts={{"{strided}": "strided"}}'),
        case("()"),
        case("(0, 3)"),
        case("(3, 5, 211)", -2.25, ", held=True"),
    ]


def flat_timed(dtype: str) -> str:
    """Return the timed sizes of an elementwise function."""
    powers = "(23, 25, 27)" if dtype == "f32" else "(24, 26, 27)"
    return f'tuple(Case({{"*": (1 << k,)}}) for k in {powers})'


def vector(rng: random.Random, length: int = 3, values: Sequence[float] = VALUES) -> str:
    """Draw a tensor of an example with one axis, as Python writes it."""
    return "[" + ", ".join(str(rng.choice(values)) for _ in range(length)) + "]"


def matrix(rng: random.Random, rows: int = 2, columns: int = 3, values: Sequence[float] = VALUES) -> str:
    """Draw a tensor of an example with two axes, as Python writes it."""
    return "[" + ", ".join(vector(rng, columns, values) for _ in range(rows)) + "]"
