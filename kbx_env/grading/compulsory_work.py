"""The least cost of a call: compulsory traffic and operations, evaluated from the task's declaration."""

from __future__ import annotations

import ast
import inspect
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kbx_env.errors import DeclarationError
from kbx_env.grading import inputs
from kbx_env.grading.reference import Expected
from kbx_env.grading.work_counts import Counts, Sizes, Values
from kbx_env.protocol.wire import DTYPES
from kbx_env.spec.task import Case, Task, shape_of

_OPERATORS: dict[type, Any] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Pow: operator.pow, ast.USub: operator.neg,
}  # fmt: skip
"""Operators that expressions may use."""


def evaluate(
    expression: str, names: Mapping[str, float], numel: Mapping[str, int], counts: Counts | None = None
) -> float:  # fmt: skip
    """Evaluate arithmetic over names, ``numel(tensor)``, ``min``, ``max`` and the functions of ``counts``; nothing
    else.

    Args:
        expression: the text, in Python's syntax.
        names: numbers by name: axes and arguments.
        numel: elements by tensor.
        counts: further functions (``kbx_env.grading.work_counts``); ``None`` for none.

    Returns:
        The value.

    Raises:
        DeclarationError: any other syntax, an unknown name, or a division by zero.
    """
    return _Evaluator(expression, names, numel, counts).value(ast.parse(expression, mode="eval"))


class _Evaluator:
    """Evaluates the syntax tree of one expression; arguments as for ``evaluate``."""

    def __init__(
        self, expression: str, names: Mapping[str, float], numel: Mapping[str, int], counts: Counts | None
    ) -> None:  # fmt: skip
        self.expression, self.names, self.numel, self.counts = expression, names, numel, counts
        self.functions = counts.functions() if counts is not None else {}

    def value(self, node: ast.AST) -> float:
        """Return the value of a node."""
        match node:
            case ast.Expression(body):
                return self.value(body)
            case ast.Constant(int() | float() as value):
                return value
            case ast.Name(name) if name in self.names:
                return self.names[name]
            case ast.BinOp(left, op, right) if type(op) in _OPERATORS:
                return self._binary(node, left, op, right)
            case ast.UnaryOp(ast.USub(), value):
                return -self.value(value)
            case ast.Call(ast.Name(name), _, []):
                return self._call(node, name)
        raise self._refuse(node)

    def _binary(self, node: ast.AST, left: ast.AST, op: ast.operator, right: ast.AST) -> float:
        """Return the value of an operation with two operands."""
        try:
            first = self.value(left)
            # The other factor of zero is not evaluated: counting may be expensive.
            if isinstance(op, ast.Mult) and first == 0:
                return 0.0
            return float(_OPERATORS[type(op)](first, self.value(right)))
        except ZeroDivisionError:
            raise self._refuse(node) from None

    def _call(self, node: ast.Call, name: str) -> float:
        """Return the value of a function."""
        match node.args:
            case [ast.Name(tensor)] if name == "numel" and tensor in self.numel:
                return self.numel[tensor]
            case [a, b] if name in ("min", "max"):
                return min(self.value(a), self.value(b)) if name == "min" else max(self.value(a), self.value(b))
        if name not in self.functions:
            raise self._refuse(node)
        parameters = inspect.signature(self.functions[name]).parameters.values()
        if not sum(p.default is p.empty for p in parameters) <= len(node.args) <= len(parameters):
            raise self._refuse(node)
        operands = [
            self._operand(a) if str(p.annotation).startswith(("str", "Operand")) else self.value(a)
            for a, p in zip(node.args, parameters, strict=False)
        ]
        return self.functions[name](*operands)

    def _operand(self, node: ast.AST) -> str | float:
        """Return the name of a tensor or argument, or the value of any other node."""
        match node:
            case ast.Name(name) if self.counts is not None and self.counts.is_tensor(name):
                return name
            case ast.Subscript(ast.Name("result"), ast.Constant(int() as place)):
                return f"result[{place}]"
            case ast.Name():
                raise self._refuse(node)
        return self.value(node)

    def _refuse(self, node: ast.AST) -> DeclarationError:
        """Return the exception for a node that cannot be evaluated."""
        return DeclarationError(f"cost expression {self.expression!r}: cannot evaluate {ast.unparse(node)!r}")


def names(task: Task, case: Case) -> dict[str, float]:
    """Return the numbers of a case by name, for expressions: axes and numeric arguments; a flag is 1 or 0."""
    bound = {n: p.default for n, p in task.signature.parameters.items()} | dict(case.args)
    numbers = {k: v for k, v in bound.items() if isinstance(v, int | float)}
    # An axis group becomes the product of its sizes: "*batch" is batch, "*" alone is n unless an axis has that name.
    sizes = {k.lstrip("*") or "n": math.prod(v) if isinstance(v, tuple) else v
             for k, v in sorted(case.axes.items(), key=lambda axis: axis[0] != "*")}  # fmt: skip
    return numbers | sizes


def numels(task: Task, case: Case) -> dict[str, int]:
    """Return the elements of every declared tensor; 0 for an optional one that the case leaves out or passes as a
    number.
    """
    return {
        n: math.prod(shape_of(t, case.axes)) if n not in case.args and (not t.optional or n in case.given) else 0
        for n, t in task.takes.items()
    }


def operations(task: Task, case: Case) -> int:
    """Return the operations of the plain algorithm, from the task's declaration.

    The judge derives the number of accumulated roundings from it, and held-out sizes are chosen by it. It is no lower
    bound; see ``flops``.
    """
    return int(expression(task, case, task.cost.flops))


def expression(task: Task, case: Case, text: str) -> float:
    """Evaluate an expression of a task's declaration for the sizes and arguments of a case.

    Args:
        task: the task.
        case: the case.
        text: the expression.

    Returns:
        The value.
    """
    return evaluate(text, names(task, case), numels(task, case), Sizes(task, case))


def flops(task: Task, case: Case, args: Mapping[str, Any] | None = None) -> int:
    """Return the operations that every known algorithm needs: a lower bound.

    Args:
        task: the task.
        case: the case.
        args: the arguments of the call; not used so far.

    Returns:
        Operations.
    """
    least = task.cost.flops if task.cost.least is None else task.cost.least
    return int(expression(task, case, least))


def ideal_bytes(
    task: Task, case: Case, args: Mapping[str, Any], expected: Expected | None, *, single_call: bool = False
) -> int:  # fmt: skip
    """Return the compulsory traffic of a call: bytes that every correct kernel moves, counted in elements, not in
    sectors.

    Every input is read once (or the part that ``Cost.reads`` declares), every result is written once, and so are the
    elements of tensors written in place that change. A call without results and changes moves nothing. ``Cost.bytes``
    replaces all of that.

    Args:
        task: the task.
        case: the case.
        args: the arguments of the call.
        expected: the reference's results; may be ``None`` where ``Cost.bytes`` needs none.
        single_call: return a bound for this call only. Otherwise it holds for all timed calls, whose values differ.

    Returns:
        Bytes.
    """
    values = Values(task, case, args, expected, single_call)
    known = names(task, case) | {"single_call": float(single_call)}
    if task.cost.bytes is not None:
        return max(0, int(evaluate(task.cost.bytes, known, {}, values)))
    assert expected is not None
    # A returned parameter that was written in place counts once, with the tensors written in place.
    outputs = [o for o, a in zip(expected.native, expected.aliases, strict=True) if a not in expected.native_written]
    written = sum(o.numel() * o.element_size() for o in outputs)
    written += sum(int(values.changed(n)) * v.element_size() for n, v in expected.native_written.items())
    if not written:
        return 0
    reads = 0
    for name, value in args.items():
        if isinstance(value, torch.Tensor):
            declared = (task.cost.reads or {}).get(name)
            held = inputs.once(value).numel()  # along an axis of stride 0 all elements are one
            elements = held if declared is None else evaluate(declared, known, {}, values)
            reads += max(0, min(held, int(elements))) * value.element_size()
    return reads + written


def declared_bytes(task: Task, case: Case) -> float | None:
    """Return the declared traffic of a case, with sizes of tensors in place of counts.

    For comparing cases of one task. It is no lower bound, because the counts depend on values.

    Args:
        task: the task.
        case: the case.

    Returns:
        Bytes; ``None`` where the task declares no ``Cost.bytes``.
    """
    if task.cost.bytes is None:
        return None
    known = names(task, case) | {"single_call": 1.0}
    return evaluate(task.cost.bytes, known, numels(task, case), Sizes(task, case))


BUFFERS = 20
"""Device memory for timing a case, in multiples of its inputs: the slots of both contestants, results, and an fp64
truth."""


def fitting(task: Task, memory: int, cases: Sequence[Case] | None = None) -> tuple[Case, ...]:
    """Return the timed cases that fit into a device's memory. The report names the cases that were timed.

    Args:
        task: the task.
        memory: bytes of the device.
        cases: to choose from; by default the published ones.

    Returns:
        The cases that fit; the smallest one if none does.
    """
    cases = task.timed if cases is None else cases
    need = {id(c): BUFFERS * input_bytes(task, c) for c in cases}
    kept = tuple(c for c in cases if need[id(c)] <= memory)
    return kept or (min(cases, key=lambda c: need[id(c)]),)


def input_bytes(task: Task, case: Case) -> int:
    """Return the bytes of a case's input tensors."""
    sizes = numels(task, case)
    return sum(n * DTYPES[case.dtypes.get(t, task.takes[t].dtype)].itemsize for t, n in sizes.items())
