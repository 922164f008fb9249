"""Mark, for each operation, the values that are dead after it, and loops that may wait for other programs.

Without the first, a launch would keep every intermediate array of a chunk alive. Without the second, it would run
programs that wait for one another in lockstep, and never end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kbx_env.backends.ttir.frontend.graph import Block, Module, Op, Region

_ATOMIC = ("tt.atomic_cas", "tt.atomic_rmw")


def nested_uses(op: Op) -> set[int]:
    """Return the slots that an operation and those inside it read."""
    out = set(op.args)
    for _, args in op.attrs.get("targets", ()):
        out.update(args)
    for region in op.regions:
        for block in region.blocks:
            for inner in block.ops:
                out |= nested_uses(inner)
    return out


def operations(region: Region) -> Iterator[Op]:
    """Yield the operations of a region, nested ones included."""
    for block in region.blocks:
        for op in block.ops:
            yield op
            for inner in op.regions:
                yield from operations(inner)


def observes(op: Op, functions: set[str]) -> bool:
    """Return whether an operation, or one of ``functions`` that it calls, can observe other programs' writes."""
    return bool(
        op.name in _ATOMIC
        or (op.name == "tt.load" and op.attrs.get("isVolatile"))
        or (op.name == "tt.call" and op.attrs["callee"] in functions)
    )


def _observes(region: Region, functions: set[str]) -> bool:
    return any(observes(op, functions) for op in operations(region))


def observing_functions(module: Module) -> set[str]:
    """Return the names of the functions that can observe other programs' writes."""
    return _closure(module, _observes)


def _mark(region: Region, observing: set[str], waiting: set[str]) -> bool:
    """Set ``attrs["waits"]`` of the waiting loops of a region and of the operations around them.

    Args:
        region: The region.
        observing: Names of the functions that observe other programs' writes.
        waiting: Names of the functions with a waiting loop.

    Returns:
        Whether there is a waiting loop.
    """
    found = False
    for block in region.blocks:
        for op in block.ops:
            # A list, because every region must be visited to be marked.
            waits = [_mark(r, observing, waiting) for r in op.regions]
            waits.append(op.name == "scf.while" and any(_observes(r, observing) for r in op.regions))
            waits.append(op.name == "tt.call" and op.attrs["callee"] in waiting)
            if any(waits):
                op.attrs["waits"] = found = True
    return found


def _closure(module: Module, holds: Callable[[Region, set[str]], bool]) -> set[str]:
    """Find the functions with a property that callers inherit from the functions that they call.

    Args:
        module: The module.
        holds: Whether a body has the property, given the names of functions that are known to have it.

    Returns:
        Names of the functions.
    """
    found: set[str] = set()
    while new := {f.name for f in module.funcs.values() if f.name not in found and holds(f.body, found)}:
        found |= new
    return found


def _block(block: Block, others: set[int]) -> None:
    """Fill ``used`` and ``dead`` of the operations of a block; ``others`` are the slots that other blocks read."""
    own = set(block.args)
    for op in block.ops:
        own.update(op.results)
    seen: set[int] = set()
    for op in reversed(block.ops):
        uses = nested_uses(op)
        op.used = any(r in seen or r in others for r in op.results)
        op.dead = [v for v in uses if v in own and v not in seen and v not in others]
        op.dead += [r for r in op.results if r not in seen and r not in others]
        seen |= uses
        for region in op.regions:
            _region(region)


def _region(region: Region) -> None:
    per_block = [set().union(*[nested_uses(o) for o in b.ops]) if b.ops else set() for b in region.blocks]
    for k, block in enumerate(region.blocks):
        others: set[int] = set()
        for j, used in enumerate(per_block):
            if j != k:
                others |= used
        _block(block, others)


def annotate(module: Module) -> None:
    """Fill ``used`` and ``dead`` of every operation, ``attrs["waits"]`` and ``module.serial``."""
    for func in module.funcs.values():
        _region(func.body)
    if any(op.name == "scf.while" for f in module.funcs.values() for op in operations(f.body)):
        observing = observing_functions(module)
        waiting = _closure(module, lambda body, known: _mark(body, observing, known))
        for func in module.funcs.values():
            # Some functions were found after the calls of them had been visited.
            _mark(func.body, observing, waiting)
        module.serial = bool(waiting)
