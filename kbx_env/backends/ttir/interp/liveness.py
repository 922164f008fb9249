"""Mark, for each operation, the values that nobody needs after it, and loops that may wait for other programs.

Without the first a launch would keep every intermediate array of a chunk alive; without the second it would run programs in
lockstep that wait for one another, and never end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kbx_env.backends.ttir.frontend.graph import Block, Module, Op, Region

_ATOMIC = ("tt.atomic_cas", "tt.atomic_rmw")


def _nested_uses(op: Op) -> set[int]:
    out = set(op.args)
    for _, args in op.attrs.get("targets", ()):
        out.update(args)
    for region in op.regions:
        for block in region.blocks:
            for inner in block.ops:
                out |= _nested_uses(inner)
    return out


def _all(region: Region) -> Iterator[Op]:
    """Walk over the operations of a region, those inside others as well."""
    for block in region.blocks:
        for op in block.ops:
            yield op
            for inner in op.regions:
                yield from _all(inner)


def _looks(region: Region, functions: set[str]) -> bool:
    """Return whether a region, or a function of these that it calls, sees what other programs do to memory meanwhile."""
    return any(
        op.name in _ATOMIC
        or (op.name == "tt.load" and op.attrs.get("isVolatile"))
        or (op.name == "tt.call" and op.attrs["callee"] in functions)
        for op in _all(region)
    )


def _mark(region: Region, looking: set[str], waiting: set[str]) -> bool:
    """Mark the waiting loops of a region and what they are inside of with ``attrs["waits"]``; return whether there are any."""
    found = False
    for block in region.blocks:
        for op in block.ops:
            # No short cut: what is not asked is not marked.
            waits = [_mark(r, looking, waiting) for r in op.regions]
            waits.append(op.name == "scf.while" and any(_looks(r, looking) for r in op.regions))
            waits.append(op.name == "tt.call" and op.attrs["callee"] in waiting)
            if any(waits):
                op.attrs["waits"] = found = True
    return found


def _grown(module: Module, holds: Callable[[Region, set[str]], bool]) -> set[str]:
    """Return the functions for which something holds that a function inherits from those it calls."""
    found: set[str] = set()
    while new := {f.name for f in module.funcs.values() if f.name not in found and holds(f.body, found)}:
        found |= new
    return found


def _block(block: Block, others: set[int]) -> None:
    own = set(block.args)
    for op in block.ops:
        own.update(op.results)
    seen: set[int] = set()
    for op in reversed(block.ops):
        uses = _nested_uses(op)
        op.used = any(r in seen or r in others for r in op.results)
        op.dead = [v for v in uses if v in own and v not in seen and v not in others]
        op.dead += [r for r in op.results if r not in seen and r not in others]
        seen |= uses
        for region in op.regions:
            _region(region)


def _region(region: Region) -> None:
    per_block = [set().union(*[_nested_uses(o) for o in b.ops]) if b.ops else set() for b in region.blocks]
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
    if any(op.name == "scf.while" for f in module.funcs.values() for op in _all(f.body)):
        looking = _grown(module, _looks)
        waiting = _grown(module, lambda body, known: _mark(body, looking, known))
        for func in module.funcs.values():
            # Calls of functions that were only found later are marked now.
            _mark(func.body, looking, waiting)
        module.serial = bool(waiting)
