"""Keeps blocks from which CUDA's driver gives out small allocations, so that they make no request to it.

The driver divides blocks of 2 MiB among allocations of up to 1 MiB. It asks for another block when none has room, and gives a
block back with its last allocation: seven requests. Whether a library that allocates and frees small memory in every call makes
them each time depends on what else the process has allocated. MAGMA is such a library, by which torch 2.11 solves batches of small
systems. A request takes 0.1 ms where nobody else asks the driver, and 1.4 ms where three other GPUs of the host grade
(docs/measurements).
"""

from __future__ import annotations

from collections.abc import Callable

BLOCK_BYTES = 2 << 20
"""Bytes and alignment of a block (measured on an H200, driver 580)."""
BLOCKS = 4
"""Blocks to keep: a call of MAGMA takes up to 1.5 MiB in three pieces, and pieces of 1 MiB share no block that is kept."""
PIECE_BYTES, PIECES = 64 << 10, 28
"""Bytes of what keeps a block, and how many such pieces must fit into a block that is worth keeping."""


def keep_blocks(alloc: Callable[[int], int], free: Callable[[int], None], blocks: int = BLOCKS) -> list[int]:
    """Make the driver keep blocks that are almost empty, as long as nobody frees what is returned.

    Args:
        alloc: allocates so many bytes and returns the address; raises RuntimeError where there is no memory.
        free: frees memory by its address.
        blocks: how many.

    Returns:
        The addresses of small pieces, one in each block; fewer than ``blocks`` where memory is short.
    """
    pieces, kept = dict[int, list[int]](), list[int]()
    try:
        # Twice as many as the blocks have room for: the first ones fall into gaps of blocks that others use.
        for _ in range(2 * blocks * BLOCK_BYTES // PIECE_BYTES):
            address = alloc(PIECE_BYTES)
            ours = pieces.setdefault(address // BLOCK_BYTES, [])
            ours.append(address)
            if len(ours) == PIECES:
                kept.append(max(ours))  # at one end, so that the room is in one piece
            if len(kept) == blocks:
                break
    except RuntimeError:
        pass
    finally:
        for address in {at for ours in pieces.values() for at in ours}.difference(kept):
            free(address)
    return kept
