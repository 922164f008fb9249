"""Keeps blocks from which CUDA's driver gives out small allocations, so that these make no requests to it.

The driver divides blocks of 2 MiB among allocations of up to 1 MiB. To ask for another block where none has room, and to give it
back when nothing of it is used any more, takes seven requests. A library that allocates and frees small memory in every call makes
them each time or never: that depends on what else the process has allocated. Torch 2.11 calls such a library for batches of
systems with 64 rows and more. Where three other GPUs of the host grade, a request takes 1.4 ms on average
(docs/measurements/2026-11-28-small-allocations.md).
"""

from __future__ import annotations

from collections.abc import Callable, Set

BLOCK_BYTES = 2 << 20
"""Bytes and alignment of a block (measured on an H200, driver 580)."""
BLOCKS = 4
"""Blocks to keep: such a call allocates three pieces, and a kept block has no room for two pieces of 1 MiB."""
PLACEHOLDER_BYTES, PLACEHOLDERS = 64 << 10, 28
"""Bytes of a placeholder, and how many of them must lie side by side in a block that is worth keeping."""
ATTEMPTS = 2048
"""Placeholders at most (128 MiB): the first ones fall into the gaps of blocks that others use."""


def keep_blocks(alloc: Callable[[int], int], free: Callable[[int], None], blocks: int = BLOCKS) -> list[int]:
    """Make the driver keep blocks with room for 27 placeholders in one piece, until the caller frees what is returned.

    Args:
        alloc: allocates so many bytes and returns the address; raises RuntimeError where there is no memory.
        free: frees memory by its address.
        blocks: how many.

    Returns:
        The addresses of placeholders, one in each block; fewer than ``blocks`` where memory is short.
    """
    placeholders, kept = set[int](), dict[int, int]()  # kept: placeholders by the number of their block
    try:
        for _ in range(ATTEMPTS):
            if len(kept) == blocks:
                break
            placeholders.add(address := alloc(PLACEHOLDER_BYTES))
            run = _side_by_side(placeholders, address)
            if len(run) >= PLACEHOLDERS:
                kept.setdefault(address // BLOCK_BYTES, run[-1])  # at one end, so that the room is in one piece
    except RuntimeError as e:
        if "out of memory" not in str(e):
            raise
    finally:
        for address in placeholders.difference(kept.values()):
            free(address)
    return list(kept.values())


def _side_by_side(placeholders: Set[int], address: int) -> list[int]:
    """Return the placeholders of one block that lie side by side with one of them, in order and with it."""
    run = [address]
    for step, end in ((-PLACEHOLDER_BYTES, 0), (PLACEHOLDER_BYTES, -1)):
        while (beside := run[end] + step) in placeholders and beside // BLOCK_BYTES == address // BLOCK_BYTES:
            run.insert(0 if end == 0 else len(run), beside)
    return run
