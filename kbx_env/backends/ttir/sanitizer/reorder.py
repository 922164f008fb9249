"""Find reductions of several flattened tensors: the compiler may pair their elements wrongly."""

from __future__ import annotations

from collections.abc import Iterator

from kbx_env.backends.ttir.errors import Finding
from kbx_env.backends.ttir.frontend.graph import Block, Module, Op
from kbx_env.backends.ttir.frontend.locs import resolve


def reordered(module: Module) -> list[Finding]:
    """Find ``tl.reduce((tl.ravel(a), tl.ravel(b)), 0, f)`` and ``tl.argmax(tl.ravel(a), 0)``.

    Triton marks a reshape that feeds a reduction of one axis as free to reorder, also where the reduction has several
    operands. Each operand is then flattened in the order of its own layout: where layouts differ, a value is combined
    with the count or index of another element (seen on an H200 with triton 3.6.0, and the mark is still set by 3.7.1).
    Whether it happens depends on layouts that the compiler chooses, so this is a warning, not a verdict.

    Args:
        module: Result of ``parse``.

    Returns:
        One finding of kind "reordered" for each such reduction in the text.
    """
    found = []
    for kernel, func in module.funcs.items():
        for block in _blocks(func.body.blocks):
            free = {op.results[0] for op in block.ops if op.attrs.get("reorder") and len(op.types[0].shape) > 1}
            found += [
                _finding(module, kernel, op)
                for op in block.ops
                if op.name == "tt.reduce" and len(op.args) > 1 and any(a in free for a in op.args)
            ]
    return found


def _blocks(blocks: list[Block]) -> Iterator[Block]:
    for block in blocks:
        yield block
        for op in block.ops:
            for region in op.regions:
                yield from _blocks(region.blocks)


def _finding(module: Module, kernel: str, op: Op) -> Finding:
    file, line = resolve(module.locs, op.loc)
    return Finding("reordered", kernel, line, file, (0, 0, 0), "", 0, access="reduce")
