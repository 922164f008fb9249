"""Which numbers of a grid must change together with a block size: the host divides by what the kernel multiplies with."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping

DEPTH = 3
"""How many names a grid is followed through."""


def jitted(node: ast.AST) -> bool:
    """Whether a function runs on the device."""
    return isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list)


def power(node: ast.AST) -> int | None:
    """The value of a literal power of two."""
    value = node.value if isinstance(node, ast.Constant) else None
    return value if type(value) is int and value > 0 and value & (value - 1) == 0 else None


def axes_of(kernel: ast.FunctionDef) -> dict[int, set[str]]:
    """Grid axis -> parameters that its program number is multiplied with: the steps of that axis."""
    parameters = {a.arg for a in (*kernel.args.args, *kernel.args.kwonlyargs)}
    tainted: dict[int, set[str]] = {}

    def touched(node: ast.AST, axis: int) -> bool:
        for n in ast.walk(node):
            if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr == "program_id":
                if n.args and isinstance(n.args[0], ast.Constant) and n.args[0].value == axis:
                    return True
            if isinstance(n, ast.Name) and n.id in tainted.get(axis, ()):
                return True
        return False

    def lanes(node: ast.AST) -> bool:
        calls = (n.func.attr for n in ast.walk(node) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute))
        return bool({"arange", "load"} & set(calls))

    found: dict[int, set[str]] = {}
    for axis in range(3):
        for n in ast.walk(kernel):
            if isinstance(n, ast.Assign) and not lanes(n.value) and touched(n.value, axis):
                names = (m.id for t in n.targets for m in ast.walk(t) if isinstance(m, ast.Name))
                tainted.setdefault(axis, set()).update(names)
        for n in ast.walk(kernel):
            if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mult):
                for step, count in ((n.left, n.right), (n.right, n.left)):
                    if isinstance(step, ast.Name) and step.id in parameters and touched(count, axis):
                        found.setdefault(axis, set()).add(step.id)
    return found


def tiles_of(kernel: ast.FunctionDef) -> set[str]:
    """Parameters that are the length of a ``tl.arange``: block sizes, whatever their names."""
    parameters = {a.arg for a in (*kernel.args.args, *kernel.args.kwonlyargs)}
    calls = (n for n in ast.walk(kernel) if isinstance(n, ast.Call) and ast.unparse(n.func).endswith("arange"))
    return {a.id for n in calls for a in n.args if isinstance(a, ast.Name)} & parameters


def divisors(node: ast.AST) -> Iterator[tuple[ast.Constant, bool]]:
    """Powers of two that something is divided by, and whether they may be changed alone.

    ``(n + 1023) // 1024`` has a second number that belongs to the first.
    """
    for n in ast.walk(node):
        under = None
        if isinstance(n, ast.Call) and ast.unparse(n.func).endswith("cdiv") and len(n.args) == 2:
            under, over = n.args[1], n.args[0]
        elif isinstance(n, ast.BinOp) and isinstance(n.op, ast.FloorDiv):
            under, over = n.right, n.left
        if isinstance(under, ast.Constant) and (value := power(under)) is not None and value > 1:
            pads = [m for m in ast.walk(over) if isinstance(m, ast.Constant) and m.value in (value, value - 1)]
            yield under, not pads


def _grid(call: ast.Call, assigned: Mapping[str, list[ast.expr]]) -> list[list[ast.expr]]:
    """The expressions behind each axis of a launch's grid; all under axis 0 where the axes cannot be told apart."""
    assert isinstance(call.func, ast.Subscript)
    grids: list[ast.expr] = [call.func.slice]
    if isinstance(grids[0], ast.Name):
        grids = assigned.get(grids[0].id, [])
    axes: list[list[ast.expr]] = [[], [], []]
    for grid in grids:
        body = grid.body if isinstance(grid, ast.Lambda) else grid
        parts = body.elts if isinstance(body, ast.Tuple) else [body]
        for k, part in enumerate(parts[:3]):
            axes[k] += _behind(part, assigned)
    return axes


def _behind(node: ast.expr, assigned: Mapping[str, list[ast.expr]]) -> list[ast.expr]:
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
    """For each block size of a launch the literals that change with it; a name that is missing must stay as it is.

    The answer does not depend on which values happen to be equal, so that a changed source is read like the first one.

    Args:
        call: the launch.
        candidates: its arguments that are literal block sizes.
        assigned: values of the names of the launching function.
        kernel: what is launched, if it is known.
    """
    steps = axes_of(kernel) if kernel is not None else {}
    under = [list(_unique(d for e in part for d in divisors(e))) for part in _grid(call, assigned)]
    if not any(under):
        return {name: [node] for name, node in candidates.items()}
    result = {name: [node] for name, node in candidates.items()}
    bad: set[str] = set()
    for axis, found in enumerate(under):
        if not found:
            continue
        stepping = steps.get(axis, set())
        mine = stepping & set(candidates)
        if not mine and stepping:
            continue  # stepped by something that is no literal of this launch: these numbers belong to others
        if len(mine) != 1:
            mine = set(candidates)
        if len(mine) > 1:
            bad |= mine
            continue
        for name in mine:
            if all(alone and power(node) == power(candidates[name]) for node, alone in found):
                result[name] += [node for node, _ in found]
            else:
                bad.add(name)
    return {name: nodes for name, nodes in result.items() if name not in bad}


def _unique(found: Iterable[tuple[ast.Constant, bool]]) -> Iterator[tuple[ast.Constant, bool]]:
    seen: set[int] = set()
    for node, alone in found:
        if id(node) not in seen:
            seen.add(id(node))
            yield node, alone
