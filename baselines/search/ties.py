"""Finds the numbers of a grid that are tied to a block size: the host divides by what the kernel multiplies with."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping

DEPTH = 3
"""Number of assignments through which the expressions of a grid are followed."""


def jitted(node: ast.AST) -> bool:
    """Return whether a syntax node is a function that runs on the device."""
    return isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list)


def power(node: ast.AST) -> int | None:
    """Return the value of a literal that is a power of two, else ``None``."""
    value = node.value if isinstance(node, ast.Constant) else None
    return value if type(value) is int and value > 0 and value & (value - 1) == 0 else None


def _parameters(kernel: ast.FunctionDef) -> set[str]:
    return {a.arg for a in (*kernel.args.args, *kernel.args.kwonlyargs)}


def axes_of(kernel: ast.FunctionDef) -> dict[int, set[str]]:
    """Find the parameters with which the program number of each grid axis is multiplied: the step of the axis.

    Args:
        kernel: the kernel.

    Returns:
        Names of parameters by grid axis (0, 1 or 2). An axis without such a parameter is left out.
    """
    parameters = _parameters(kernel)
    products = [n for n in ast.walk(kernel) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mult)]
    steps: dict[int, set[str]] = {}
    for axis in range(3):
        numbers = _program_numbers(kernel, axis)
        for product in products:
            for step, count in ((product.left, product.right), (product.right, product.left)):
                if isinstance(step, ast.Name) and step.id in parameters and _has_program_number(count, axis, numbers):
                    steps.setdefault(axis, set()).add(step.id)
    return steps


def _program_numbers(kernel: ast.FunctionDef, axis: int) -> set[str]:
    """Return the names that scalars computed from an axis's program number are assigned to."""
    names: set[str] = set()
    for n in ast.walk(kernel):
        if isinstance(n, ast.Assign) and not _is_block(n.value) and _has_program_number(n.value, axis, names):
            names.update(m.id for t in n.targets for m in ast.walk(t) if isinstance(m, ast.Name))
    return names


def _is_block(node: ast.AST) -> bool:
    """Return whether an expression uses a block of lanes or loaded values, and is therefore no scalar."""
    calls = (n.func.attr for n in ast.walk(node) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute))
    return bool({"arange", "load"} & set(calls))


def _has_program_number(node: ast.AST, axis: int, names: set[str]) -> bool:
    """Return whether an expression uses ``tl.program_id(axis)`` or one of the names."""
    return any(_is_program_id(n, axis) or (isinstance(n, ast.Name) and n.id in names) for n in ast.walk(node))


def _is_program_id(node: ast.AST, axis: int) -> bool:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "program_id"):
        return False
    return bool(node.args) and isinstance(node.args[0], ast.Constant) and node.args[0].value == axis


def tiles_of(kernel: ast.FunctionDef) -> set[str]:
    """Return the parameters that are arguments of ``tl.arange``: these are block sizes, whatever their names."""
    calls = (n for n in ast.walk(kernel) if isinstance(n, ast.Call) and ast.unparse(n.func).endswith("arange"))
    return {a.id for n in calls for a in n.args if isinstance(a, ast.Name)} & _parameters(kernel)


def divisors(node: ast.AST) -> Iterator[tuple[ast.Constant, bool]]:
    """Find the powers of two by which an expression divides.

    Args:
        node: the expression.

    Yields:
        The literal, and whether it may be changed alone. In ``(n + 1023) // 1024`` it may not: 1023 belongs to it.
    """
    for n in ast.walk(node):
        divisor = None
        if isinstance(n, ast.Call) and ast.unparse(n.func).endswith("cdiv") and len(n.args) == 2:
            dividend, divisor = n.args
        elif isinstance(n, ast.BinOp) and isinstance(n.op, ast.FloorDiv):
            dividend, divisor = n.left, n.right
        if isinstance(divisor, ast.Constant) and (value := power(divisor)) is not None and value > 1:
            pads = [m for m in ast.walk(dividend) if isinstance(m, ast.Constant) and m.value in (value, value - 1)]
            yield divisor, not pads


def _grid(call: ast.Call, assigned: Mapping[str, list[ast.expr]]) -> list[list[ast.expr]]:
    """Return the expressions behind each axis of a launch's grid; all at axis 0 if the axes cannot be separated."""
    assert isinstance(call.func, ast.Subscript)
    grids: list[ast.expr] = [call.func.slice]
    if isinstance(grids[0], ast.Name):
        grids = assigned.get(grids[0].id, [])
    axes: list[list[ast.expr]] = [[], [], []]
    for grid in grids:
        body = grid.body if isinstance(grid, ast.Lambda) else grid
        parts = body.elts if isinstance(body, ast.Tuple) else [body]
        for axis, part in enumerate(parts[:3]):
            axes[axis] += _with_assigned(part, assigned)
    return axes


def _with_assigned(node: ast.expr, assigned: Mapping[str, list[ast.expr]]) -> list[ast.expr]:
    """Return an expression, and those assigned to the names in it, through ``DEPTH`` assignments."""
    found, new = [node], [node]
    for _ in range(DEPTH):
        names = {m.id for n in new for m in ast.walk(n) if isinstance(m, ast.Name)}
        new = [e for name in sorted(names) for e in assigned.get(name, []) if e not in found]
        found += new
    return found


def tied(
    call: ast.Call, candidates: Mapping[str, ast.Constant], assigned: Mapping[str, list[ast.expr]],
    kernel: ast.FunctionDef | None,
) -> dict[str, list[ast.Constant]] | None:  # fmt: skip
    """Find the literals that must change together with each block size of a launch.

    The result does not depend on equal values of unrelated numbers, so a source with changed numbers gives the same
    knobs.

    Args:
        call: the launch.
        candidates: its arguments that are literal block sizes, by parameter.
        assigned: the values of the names of the launching function.
        kernel: the launched kernel, if it is known.

    Returns:
        The literals by parameter, the block size itself first. A parameter that is missing must keep its value.
    """
    steps = axes_of(kernel) if kernel is not None else {}
    divisors_of_axes = [list(_unique(d for e in part for d in divisors(e))) for part in _grid(call, assigned)]
    result = {name: [node] for name, node in candidates.items()}
    if not any(divisors_of_axes):
        return result
    rejected: set[str] = set()
    for axis, found in enumerate(divisors_of_axes):
        if not found:
            continue
        stepping = steps.get(axis, set())
        names = stepping & set(candidates)
        if not names and stepping:
            continue  # the step is no literal of this launch, so the divisors are not tied to its literals
        if len(names) != 1:
            names = set(candidates)
        if len(names) > 1:
            rejected |= names
            continue
        for name in names:
            if all(alone and power(node) == power(candidates[name]) for node, alone in found):
                result[name] += [node for node, _ in found]
            else:
                rejected.add(name)
    return {name: nodes for name, nodes in result.items() if name not in rejected}


def _unique(found: Iterable[tuple[ast.Constant, bool]]) -> Iterator[tuple[ast.Constant, bool]]:
    seen: set[int] = set()
    for node, alone in found:
        if id(node) not in seen:
            seen.add(id(node))
            yield node, alone
