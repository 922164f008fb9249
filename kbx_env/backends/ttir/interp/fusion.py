"""Fuse multiplications into additions, as the NVIDIA backend does by default.

The GPU compiler contracts ``a * b + c`` to one instruction with one rounding. The executor does
the same, or sums that cancel would differ from the hardware in their leading digits.
"""

from __future__ import annotations

from kbx_env.backends.ttir.frontend.graph import Block, Func, Module, Op

#: Operations that only repeat or rename lanes: in registers they are nothing.
_FREE = ("tt.splat", "tt.broadcast", "tt.expand_dims")


def _count(block: Block, uses: dict[int, int]) -> None:
    for op in block.ops:
        for a in op.args:
            uses[a] = uses.get(a, 0) + 1
        for _, args in op.attrs.get("targets", ()):
            for a in args:
                uses[a] = uses.get(a, 0) + 1
        for region in op.regions:
            for inner in region.blocks:
                _count(inner, uses)


def _product(slot: int, made: dict[int, Op]) -> tuple[Op, list[Op]] | None:
    """Return the multiplication that gives ``slot`` and the free operations after it."""
    chain: list[Op] = []
    op = made.get(slot)
    while op is not None and op.name in _FREE:
        chain.insert(0, op)
        op = made.get(op.args[0])
    if op is None or op.name != "arith.mulf" or op.rtypes[0].elem not in ("f16", "bf16", "f32", "f64"):
        return None
    return op, chain


def _fuse(op: Op, made: dict[int, Op], uses: dict[int, int]) -> None:
    found = [_product(a, made) for a in op.args]
    k = next((k for k in (0, 1) if found[k]), None)
    if k is None:
        return
    left, right = found
    # The compiler takes the product with fewer uses, the first one when they are equal.
    if left and right and uses[left[0].results[0]] > uses[right[0].results[0]]:
        k = 1
    hit = found[k]
    assert hit
    mul, chain = hit
    op.attrs["fused"] = (k, chain)
    op.args = [*mul.args, op.args[1 - k]]


def _block(block: Block, uses: dict[int, int]) -> None:
    made: dict[int, Op] = {}
    for op in block.ops:
        if op.name in ("arith.addf", "arith.subf"):
            _fuse(op, made, uses)
        for r in op.results:
            made[r] = op
        for region in op.regions:
            for inner in region.blocks:
                _block(inner, uses)


def _blocks(block: Block) -> list[Block]:
    inner = [b for op in block.ops for region in op.regions for b in region.blocks]
    return [block] + [c for b in inner for c in _blocks(b)]


def _sweep(func: Func) -> None:
    """Drop the multiplications, and what only passes them on, that nobody reads any more."""
    changed = True
    while changed:
        changed = False
        uses: dict[int, int] = {}
        for block in func.body.blocks:
            _count(block, uses)
        for top in func.body.blocks:
            for block in _blocks(top):
                kept = [
                    op
                    for op in block.ops
                    if op.name not in ("arith.mulf", *_FREE) or any(r in uses for r in op.results)
                ]
                changed = changed or len(kept) < len(block.ops)
                block.ops = kept


def fuse(module: Module) -> None:
    """Rewrite every addition or subtraction of a product made in the same block."""
    for func in module.funcs.values():
        uses: dict[int, int] = {}
        for block in func.body.blocks:
            _count(block, uses)
        for block in func.body.blocks:
            _block(block, uses)
        _sweep(func)
