"""Draws the values of published cases, which are given as formulas such as ``add(matmul(standard, T(standard)), eye)``.

A formula is a Python expression of calls, names and numbers. Its leaves (``standard``, ``uniform(0, 1)``, ...) have the shape of
the tensor. Equal leaves of one formula are one draw: ``add(standard, T(standard))`` is symmetric.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from kbx_env.errors import DeclarationError


def values(
    text: str, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, args: Mapping[str, Any]
) -> torch.Tensor:  # fmt: skip
    """Evaluate a formula.

    Args:
        text: the formula.
        shape: of the tensor.
        dtype: of the tensor; complex leaves are drawn for a complex one.
        generator: on the device of the tensor.
        args: arguments of the call that were drawn before, for ``argument(name)``.

    Returns:
        Values of ``shape`` in fp64, complex128, int64 or bool, not yet rounded to ``dtype``.

    Raises:
        DeclarationError: the formula cannot be read, or gives another shape.
    """
    found = _Evaluation(shape, dtype, generator, args).of(_parsed(text))
    if not isinstance(found, torch.Tensor) or tuple(found.shape) != shape:
        got = tuple(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
        raise DeclarationError(f"the formula {text!r} gives {got}, not a tensor of {shape}")
    return found


def _parsed(text: str) -> ast.expr:
    try:
        return ast.parse(text, mode="eval").body
    except SyntaxError as e:
        raise DeclarationError(f"no formula: {text!r}") from e


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "clamp": torch.clamp, "abs": torch.abs,
    "clamp_min": torch.clamp_min, "clamp_max": torch.clamp_max, "sign": torch.sign, "sigmoid": torch.sigmoid,
    "tanh": torch.tanh, "matmul": torch.matmul, "conj": torch.conj_physical, "triu": torch.triu,
    "cholesky": torch.linalg.cholesky, "softmax": F.softmax, "log_softmax": F.log_softmax, "eq": torch.eq, "gt": torch.gt,
    "remainder": torch.remainder, "argsort": torch.argsort, "index_select": torch.index_select, "T": lambda x: x.mT,
    "view": lambda x, *s: x.reshape(s), "expand": lambda x, *s: x.expand(s), "first": lambda x, n: x[..., :n],
}  # fmt: skip
"""Functions of a formula, by name; ``first(x, n)`` takes the first n elements of the last axis."""


class _Evaluation:
    """Evaluates one formula; arguments as for ``values``."""

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, args: Mapping[str, Any]
    ) -> None:  # fmt: skip
        self.shape, self.dtype, self.generator, self.args = shape, dtype, generator, args
        self.drawn: dict[str, torch.Tensor] = {}

    def of(self, node: ast.expr) -> Any:
        """Return the value of a node: a tensor, a number or a text."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -self.of(node.operand)
        if isinstance(node, ast.Name):
            return self.leaf(node.id, (), {}, ast.dump(node))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            named = {str(k.arg): self.of(k.value) for k in node.keywords}
            found = [self.of(a) for a in node.args]
            if node.func.id in _FUNCTIONS:
                return _FUNCTIONS[node.func.id](*found, **named)
            return self.leaf(node.func.id, found, named, ast.dump(node))
        raise DeclarationError(f"a formula has no {ast.dump(node)[:60]}")

    def leaf(self, name: str, found: Sequence[Any], named: dict[str, Any], key: str) -> Any:
        """Return a draw or a constant of the tensor's shape (``wide`` gives another last axis)."""
        if name == "argument":
            return self.args[found[0]]
        if key not in self.drawn:
            *front, last = self.shape or (1,)
            wide = named.pop("wide", None)
            shape = self.shape if wide is None else (*front, int(wide))
            self.drawn[key] = self._drawn(name, shape, *found, **named)
        return self.drawn[key]

    def _drawn(self, name: str, shape: tuple[int, ...], *found: Any, **named: Any) -> torch.Tensor:
        kind = torch.complex128 if self.dtype.is_complex else torch.float64
        if name in _CONSTANTS:
            return _CONSTANTS[name](shape, kind, *found).to(self.generator.device)
        device, generator = self.generator.device, self.generator

        def normal() -> torch.Tensor:
            return torch.randn(shape, generator=generator, dtype=kind, device=device)

        def uniform(low: float = 0.0, high: float = 1.0) -> torch.Tensor:
            return low + (high - low) * torch.rand(shape, generator=generator, dtype=torch.float64, device=device)

        match name:
            case "standard":
                return normal()
            case "outlier":  # the published helper replaces the chosen elements by a wider normal draw
                chosen = uniform() < named["p"]
                return torch.where(chosen, normal() * named["scale"], normal())
            case "uniform":
                return uniform(*found)
            case "randint":
                low, high = found
                return torch.randint(low, high, shape, generator=generator, device=device)
            case "bernoulli":
                return uniform() < found[0]
        raise DeclarationError(f"a formula has no {name!r}")


def _flat(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape)


def _spaced(shape: tuple[int, ...], kind: torch.dtype, low: float, high: float) -> torch.Tensor:
    return torch.linspace(low, high, math.prod(shape), dtype=torch.float64).reshape(shape).to(kind)


_CONSTANTS: Mapping[str, Callable[..., torch.Tensor]] = {
    "zeros": lambda shape, kind: torch.zeros(shape, dtype=kind),
    "ones": lambda shape, kind: torch.ones(shape, dtype=kind),
    "eye": lambda shape, kind: torch.eye(*shape[-2:], dtype=kind).expand(shape),
    "arange": lambda shape, kind: _flat(shape),
    "full": lambda shape, kind, value: torch.full(shape, float(value), dtype=kind),
    "listed": lambda shape, kind, *found: torch.tensor(found, dtype=kind).reshape(shape),
    "paired": lambda shape, kind, *parts: torch.view_as_complex(torch.tensor(parts, dtype=torch.float64).reshape(*shape, 2)),
    "literal": _spaced,
    "alternating": lambda shape, kind: _flat(shape) % 2 == 0,
}
"""Leaves without chance, by name. ``literal`` has evenly spaced values, ``listed`` the given ones, ``paired`` complex ones whose
real and imaginary parts are given in turn, ``alternating`` starts with True.
"""
