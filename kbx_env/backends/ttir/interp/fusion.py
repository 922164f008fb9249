"""Fuse multiplications into additions, as the NVIDIA backend does by default.

The GPU compiler contracts ``a * b + c`` to one instruction with one rounding. The executor does the same; otherwise
sums with cancellation would differ from the hardware in their leading digits.
"""

from __future__ import annotations

from kbx_env.backends.ttir.frontend.graph import Block, Func, Module, Op

_FREE = ("tt.splat", "tt.broadcast", "tt.expand_dims")
"""Operations that only repeat or rename lanes: on a GPU they cost no instruction."""


def _count(block: Block, uses: dict[int, int]) -> None:
    """Add the number of reads of each slot in a block to ``uses``."""
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
    """Find the float multiplication that computes a value.

    Args:
        slot: Slot of the value.
        made: Operations of the block by the slots of their results.

    Returns:
        The multiplication and the free operations after it, ``None`` if the value is not a product.
    """
    chain: list[Op] = []
    op = made.get(slot)
    while op is not None and op.name in _FREE:
        chain.insert(0, op)
        op = made.get(op.args[0])
    if op is None or op.name != "arith.mulf" or op.rtypes[0].elem not in ("f16", "bf16", "f32", "f64"):
        return None
    return op, chain


def _fuse(op: Op, made: dict[int, Op], uses: dict[int, int]) -> None:
    """Fuse a product into an addition or subtraction: its operands become those of the product and the other summand.

    ``attrs["fused"]`` becomes the position of the product among the old operands and the free operations on the way.
    """
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
    """Remove the multiplications, and the free operations after them, whose results are no longer read."""
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
    """Fuse every addition or subtraction with a product that was computed in the same block, in place."""
    for func in module.funcs.values():
        uses: dict[int, int] = {}
        for block in func.body.blocks:
            _count(block, uses)
        for block in func.body.blocks:
            _block(block, uses)
        _sweep(func)
