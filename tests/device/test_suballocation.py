"""Blocks from which the driver gives out small allocations."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kbx_env.device.driver import process_driver
from kbx_env.device.suballocation import BLOCK_BYTES, BLOCKS, keep_blocks

UNIT = 512


class Blocks:
    """A driver that divides blocks among small allocations: it counts how often it gets one and gives one back."""

    def __init__(self, limit: int = 1 << 20) -> None:
        self.limit, self.requests = limit, 0
        self.blocks: dict[int, dict[int, int]] = {}
        """By the address of a block, its allocations: their bytes by address."""

    def alloc(self, size: int) -> int:
        size = -(-size // UNIT) * UNIT
        for block, parts in self.blocks.items():
            at = block
            for begin in sorted(parts):
                if begin - at >= size:
                    break
                at = begin + parts[begin]
            if at + size <= block + BLOCK_BYTES:
                parts[at] = size
                return at
        if len(self.blocks) == self.limit:
            raise RuntimeError("out of memory")
        self.requests += 1
        block = next(n for n in range(BLOCK_BYTES, 1 << 40, BLOCK_BYTES) if n not in self.blocks)
        self.blocks[block] = {block: size}
        return block

    def free(self, address: int) -> None:
        block = address // BLOCK_BYTES * BLOCK_BYTES
        del self.blocks[block][address]
        if not self.blocks[block]:
            self.requests += 1
            del self.blocks[block]


SIZES = st.lists(st.integers(1, 1 << 20), max_size=12)


@given(SIZES, st.lists(st.integers(1, 1 << 20), min_size=1, max_size=3))
def test_small_allocations_make_no_request_whatever_else_the_process_has(others: list[int], sizes: list[int]) -> None:
    driver = Blocks()
    had = [driver.alloc(n) for n in others]
    kept = keep_blocks(driver.alloc, driver.free)
    assert len(kept) == len({at // BLOCK_BYTES for at in kept}) == BLOCKS
    for address in had[::2]:
        driver.free(address)
    before = driver.requests
    for _ in range(2):
        for address in [driver.alloc(n) for n in sizes]:
            driver.free(address)
    assert driver.requests == before


@given(SIZES)
def test_nothing_but_the_small_pieces_stays_allocated(others: list[int]) -> None:
    driver = Blocks()
    had = [driver.alloc(n) for n in others]
    kept = keep_blocks(driver.alloc, driver.free)
    assert {at for parts in driver.blocks.values() for at in parts} == {*had, *kept}


@pytest.mark.parametrize("limit", [0, 1, 2])
def test_with_little_memory_there_are_fewer_blocks(limit: int) -> None:
    driver = Blocks(limit)
    kept = keep_blocks(driver.alloc, driver.free)
    assert len(kept) == limit
    assert {at for parts in driver.blocks.values() for at in parts} == set(kept)


@pytest.mark.gpu
def test_a_gpu_gives_out_small_allocations_from_the_blocks_that_are_kept() -> None:
    driver = process_driver()
    driver.keep_blocks()
    kept = {at // BLOCK_BYTES for at in driver._blocks}
    assert len(kept) == BLOCKS
    pieces = [driver.alloc_dedicated(512 << 10) for _ in range(3)]
    for address in pieces:
        driver.free_dedicated(address)
    before = {at // BLOCK_BYTES for at in pieces}
    again = [driver.alloc_dedicated(512 << 10) for _ in range(3)]
    for address in again:
        driver.free_dedicated(address)
    assert {at // BLOCK_BYTES for at in again} == before  # no block went back in between
