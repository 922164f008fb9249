"""What a call must cost at least: compulsory traffic and operations."""

from __future__ import annotations

import ast
import inspect
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kbx_env.errors import DeclarationError
from kbx_env.grading.reference import Expected
from kbx_env.grading.work_counts import Counts, Sizes, Values
from kbx_env.protocol.wire import DTYPES
from kbx_env.spec.task import Case, Task, shape_of

_OPERATORS: dict[type, Any] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Pow: operator.pow, ast.USub: operator.neg,
}  # fmt: skip


def evaluate(
    expression: str, names: Mapping[str, float], numel: Mapping[str, int], counts: Counts | None = None
) -> float:  # fmt: skip
    """Evaluate arithmetic over names, ``numel(tensor)``, ``min``, ``max`` and the functions of ``counts``; nothing else.

    Args:
        expression: the text.
        names: numbers by name: axes and arguments.
        numel: elements by tensor.
        counts: further functions (``kbx_env.grading.work_counts``); ``None`` for none.

    Raises:
        DeclarationError: any other syntax, an unknown name, or a division by zero.
    """
    functions = counts.functions() if counts is not None else {}

    def refuse(node: ast.AST) -> DeclarationError:
        return DeclarationError(f"cost expression {expression!r}: cannot evaluate {ast.unparse(node)!r}")

    def named(node: ast.AST) -> str | float:
        match node:
            case ast.Name(name) if counts is not None and counts.is_tensor(name):
                return name
            case ast.Subscript(ast.Name("result"), ast.Constant(int() as place)):
                return f"result[{place}]"
            case ast.Name():
                raise refuse(node)
        return walk(node)

    def called(node: ast.Call, name: str) -> float:
        parameters = inspect.signature(functions[name]).parameters.values()
        if not sum(p.default is p.empty for p in parameters) <= len(node.args) <= len(parameters):
            raise refuse(node)
        given = [
            named(a) if str(p.annotation).startswith(("str", "Operand")) else walk(a)
            for a, p in zip(node.args, parameters, strict=False)
        ]
        return functions[name](*given)

    def walk(node: ast.AST) -> float:
        match node:
            case ast.Expression(body):
                return walk(body)
            case ast.Constant(int() | float() as value):
                return value
            case ast.Name(name) if name in names:
                return names[name]
            case ast.BinOp(left, op, right) if type(op) in _OPERATORS:
                try:
                    first = walk(left)
                    # What is multiplied by zero is not asked for: counting may be dear.
                    if isinstance(op, ast.Mult) and first == 0:
                        return 0.0
                    return float(_OPERATORS[type(op)](first, walk(right)))
                except ZeroDivisionError:
                    raise refuse(node) from None
            case ast.UnaryOp(ast.USub(), value):
                return -walk(value)
            case ast.Call(ast.Name("numel"), [ast.Name(name)], []) if name in numel:
                return numel[name]
            case ast.Call(ast.Name("min" | "max" as f), [a, b], []):
                return min(walk(a), walk(b)) if f == "min" else max(walk(a), walk(b))
            case ast.Call(ast.Name(name), _, []) if name in functions:
                return called(node, name)
        raise refuse(node)

    return walk(ast.parse(expression, mode="eval"))


def names(task: Task, case: Case) -> dict[str, float]:
    """Axis names and numeric arguments of a case, for expressions; a flag is 1 or 0."""
    bound = {n: p.default for n, p in task.signature.parameters.items()} | dict(case.args)
    numbers = {k: v for k, v in bound.items() if isinstance(v, int | float)}
    # An axis group becomes the product of its sizes: "*batch" is batch, "*" alone is n unless an axis has that name.
    sizes = {k.lstrip("*") or "n": math.prod(v) if isinstance(v, tuple) else v
             for k, v in sorted(case.axes.items(), key=lambda axis: axis[0] != "*")}  # fmt: skip
    return numbers | sizes


def numels(task: Task, case: Case) -> dict[str, int]:
    """Elements of every declared tensor; 0 for an optional one that the case leaves out or gives as a number."""
    return {
        n: math.prod(shape_of(t, case.axes)) if n not in case.args and (not t.optional or n in case.given) else 0
        for n, t in task.takes.items()
    }


def operations(task: Task, case: Case) -> int:
    """Operations of the plain algorithm, from the task's declaration.

    The judge takes it for how many roundings pile up, sizes are compared by it. It is no lower bound: see ``flops``.
    """
    return int(evaluate(task.cost.flops, names(task, case), numels(task, case), Sizes(task, case)))


def flops(task: Task, case: Case, args: Mapping[str, Any] | None = None) -> int:
    """Operations that no known algorithm does without: a lower bound.

    Args:
        task: the task.
        case: the case.
        args: of the call; nothing looks at them so far.
    """
    least = task.cost.flops if task.cost.least is None else task.cost.least
    return int(evaluate(least, names(task, case), numels(task, case), Sizes(task, case)))


def ideal_bytes(
    task: Task, case: Case, args: Mapping[str, Any], expected: Expected | None, *, single_call: bool = False
) -> int:  # fmt: skip
    """Compulsory traffic of a call: bytes that every right kernel moves at least, counted in elements, not in sectors.

    Every input is read once (or as much of it as ``Cost.reads`` says), every result is written once, and of a tensor written
    in place what changes; a call without results and changes moves nothing. ``Cost.bytes`` stands for all of that.

    Args:
        task: the task.
        case: the case.
        args: the arguments of the call.
        expected: what the reference makes of them; may be ``None`` where ``Cost.bytes`` needs no results.
        single_call: the bound is for this very call. Otherwise it holds for every call that is timed: their values differ.

    Returns:
        Bytes.
    """
    values = Values(task, case, args, expected, single_call)
    known = names(task, case) | {"single_call": float(single_call)}
    if task.cost.bytes is not None:
        return max(0, int(evaluate(task.cost.bytes, known, {}, values)))
    assert expected is not None
    # A returned parameter that was written counts once, by its name.
    outputs = [o for o, a in zip(expected.native, expected.aliases, strict=True) if a not in expected.native_written]
    written = sum(o.numel() * o.element_size() for o in outputs)
    written += sum(int(values.changed(n)) * v.element_size() for n, v in expected.native_written.items())
    if not written:
        return 0
    reads = 0
    for name, value in args.items():
        if isinstance(value, torch.Tensor):
            told = (task.cost.reads or {}).get(name)
            elements = value.numel() if told is None else evaluate(told, known, {}, values)
            reads += max(0, min(value.numel(), int(elements))) * value.element_size()
    return reads + written


def declared_bytes(task: Task, case: Case) -> float | None:
    """Traffic of a case as its task declares it, with sizes of tensors for counts; ``None`` where it declares none.

    It compares cases of one task. It is no lower bound: nobody has looked at values.
    """
    if task.cost.bytes is None:
        return None
    known = names(task, case) | {"single_call": 1.0}
    return evaluate(task.cost.bytes, known, numels(task, case), Sizes(task, case))


BUFFERS = 20
"""Times its inputs that timing a case may need on the device: the slots of both sides, results, and an fp64 truth."""


def fitting(task: Task, memory: int, cases: Sequence[Case] | None = None) -> tuple[Case, ...]:
    """The timed cases (the published ones unless given) that a device with so many bytes can hold; the smallest where none does.

    A card of 24 GB so has a profile of its own: its report names the cases that it timed.
    """
    cases = task.timed if cases is None else cases
    need = {id(c): BUFFERS * input_bytes(task, c) for c in cases}
    kept = tuple(c for c in cases if need[id(c)] <= memory)
    return kept or (min(cases, key=lambda c: need[id(c)]),)


def input_bytes(task: Task, case: Case) -> int:
    """Bytes of the tensors that a case takes."""
    sizes = numels(task, case)
    return sum(n * DTYPES[case.dtypes.get(t, task.takes[t].dtype)].itemsize for t, n in sizes.items())
