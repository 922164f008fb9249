"""Blocks from which the driver gives out small allocations."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kbx_env.device.driver import Driver, process_driver
from kbx_env.device.suballocation import BLOCK_BYTES, BLOCKS, PLACEHOLDER_BYTES, keep_blocks

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


SIZES = st.lists(st.integers(1, 1 << 20), max_size=24)
"""Bytes of what the process has allocated before."""


def used(driver: Blocks) -> set[int]:
    return {at for parts in driver.blocks.values() for at in parts}


@given(SIZES, st.data(), st.lists(st.integers(1, 1 << 20), min_size=1, max_size=3))
def test_small_allocations_make_no_request_whatever_else_the_process_has(
    others: list[int], data: st.DataObject, sizes: list[int]
) -> None:
    driver = Blocks()
    had = [driver.alloc(n) for n in others]
    early = data.draw(st.sets(st.sampled_from(had))) if had else set()
    for address in early:  # gaps
        driver.free(address)
    kept = keep_blocks(driver.alloc, driver.free)
    assert len(kept) == len({at // BLOCK_BYTES for at in kept}) == BLOCKS
    for address in set(had) - early:
        driver.free(address)
    before = driver.requests
    for _ in range(2):
        for address in [driver.alloc(n) for n in sizes]:
            driver.free(address)
    assert driver.requests == before


@given(SIZES)
def test_nothing_but_a_placeholder_in_each_block_stays_allocated(others: list[int]) -> None:
    driver = Blocks()
    had = [driver.alloc(n) for n in others]
    kept = keep_blocks(driver.alloc, driver.free)
    assert used(driver) == {*had, *kept}


def test_blocks_of_which_others_use_every_eighth_part_have_too_little_room() -> None:
    driver = Blocks()
    had = [driver.alloc(PLACEHOLDER_BYTES) for _ in range(6 * 32)]
    for address in (at for i, at in enumerate(had) if i % 8 != 7):
        driver.free(address)
    kept = keep_blocks(driver.alloc, driver.free)
    assert not {at // BLOCK_BYTES for at in kept} & {at // BLOCK_BYTES for at in had}
    before = driver.requests
    for address in [driver.alloc(BLOCK_BYTES // 2) for _ in range(BLOCKS)]:
        driver.free(address)
    assert driver.requests == before


@pytest.mark.parametrize("limit", [0, 1, 2])
def test_with_little_memory_there_are_fewer_blocks_until_there_is_more(limit: int) -> None:
    driver = Blocks(limit)
    ours = Small(driver)
    ours.keep_suballocation_blocks()
    assert len(ours._blocks) == limit and used(driver) == set(ours._blocks)
    driver.limit = 100
    for _ in range(2):
        ours.keep_suballocation_blocks()
        assert len(ours._blocks) == BLOCKS and used(driver) == set(ours._blocks)


def test_an_error_other_than_missing_memory_is_raised() -> None:
    def alloc(size: int) -> int:
        raise RuntimeError("CUDA driver: cuMemAlloc_v2 failed with error 201")

    with pytest.raises(RuntimeError, match="error 201"):
        keep_blocks(alloc, lambda address: None)


class Small(Driver):
    """A driver that has nothing but small memory."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks, self._cu_alloc, self._free = [], blocks.alloc, blocks.free  # type: ignore[method-assign]

    def use_in_thread(self) -> None: ...


@pytest.mark.gpu
def test_a_gpu_takes_small_allocations_from_the_blocks_that_are_kept() -> None:
    driver = process_driver()
    driver.keep_suballocation_blocks()
    assert len({at // BLOCK_BYTES for at in driver._blocks}) == BLOCKS
    for _ in range(20):  # other processes change the free memory, too
        before = torch.cuda.mem_get_info()[0]
        pieces = [driver._cu_alloc(BLOCK_BYTES // 4) for _ in range(3)]
        during = torch.cuda.mem_get_info()[0]
        for address in pieces:
            driver._free(address)
        if during == before:
            return
    pytest.fail("each time a block was asked for")
