"""Mark, for each operation, the values that nobody needs after it.

Without this a launch would keep every intermediate array of a chunk alive.
"""

from __future__ import annotations

from .graph import Block, Module, Op, Region

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


def _has_atomic(op: Op) -> bool:
    if op.name in _ATOMIC or (op.name == "tt.load" and op.attrs.get("isVolatile")):
        return True
    return any(_has_atomic(o) for r in op.regions for b in r.blocks for o in b.ops)


def _block(block: Block, others: set[int], module: Module) -> None:
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
        if op.name == "scf.while" and _has_atomic(op):
            # Programs that wait for one another would never end in lockstep.
            module.serial = True
        for region in op.regions:
            _region(region, module)


def _region(region: Region, module: Module) -> None:
    per_block = [set().union(*[_nested_uses(o) for o in b.ops]) if b.ops else set() for b in region.blocks]
    for k, block in enumerate(region.blocks):
        others: set[int] = set()
        for j, used in enumerate(per_block):
            if j != k:
                others |= used
        _block(block, others, module)


def annotate(module: Module) -> None:
    """Fill ``used`` and ``dead`` of every operation and ``module.serial``."""
    for func in module.funcs.values():
        _region(func.body, module)
