"""Device memory in large chunks, of which parts are given out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kbx_env.device.arena import ALIGN, CHUNK_BYTES, Arena

CHUNK = 8 * ALIGN


class Memory:
    """A device with a limit: hands out chunks at addresses that may touch each other."""

    def __init__(self, limit: int) -> None:
        self.limit, self.chunks, self.top = limit, dict[int, int](), 1 << 20

    def reserve(self, size: int) -> int:
        if sum(self.chunks.values()) + size > self.limit:
            raise RuntimeError("out of memory")
        self.top += size
        self.chunks[self.top - size] = size
        return self.top - size

    def release(self, address: int) -> None:
        del self.chunks[address]


@given(st.lists(st.tuples(st.sampled_from(["alloc", "free", "trim", "preallocate"]), st.integers(0, 20 * ALIGN)), max_size=60))
def test_parts_never_overlap_and_all_memory_comes_back(steps: list[tuple[str, int]]) -> None:
    memory = Memory(80 * ALIGN)
    kept = 3 * CHUNK
    arena, held = Arena(memory.reserve, memory.release, kept, CHUNK), dict[int, int]()
    for what, n in steps:
        if what == "alloc":
            try:
                address = arena.alloc(n)
            except RuntimeError:
                assert sum(memory.chunks.values()) + n > memory.limit - CHUNK
                continue
            assert address % ALIGN == 0
            assert any(c <= address and address + n <= c + size for c, size in memory.chunks.items())
            assert all(address + max(n, 1) <= a or a + max(m, 1) <= address for a, m in held.items())
            held[address] = n
        elif what == "free" and held:
            address = sorted(held)[n % len(held)]
            (of,) = (c for c, size in memory.chunks.items() if c <= address < c + size)
            arena.free(address)
            del held[address]
            empty = {c: size for c, size in memory.chunks.items() if not any(c <= a < c + size for a in held)}
            still_used = of in memory.chunks and of not in empty  # nothing is given back then
            assert sum(empty.values()) <= kept or still_used
        elif what == "trim":
            arena.trim(n)
        elif what == "preallocate":
            arena.preallocate(n)
    for address in held:
        arena.free(address)
    assert arena.reserved == sum(memory.chunks.values())
    arena.trim()
    assert memory.chunks == {} and arena.reserved == 0


def test_the_driver_is_asked_once_for_many_parts() -> None:
    memory = Memory(1 << 30)
    arena = Arena(memory.reserve, memory.release, 4 * CHUNK_BYTES)
    first = [arena.alloc(1000) for _ in range(50)]
    for address in first:
        arena.free(address)
    assert [arena.alloc(1000) for _ in range(50)] == first and len(memory.chunks) == 1


def test_the_largest_unused_chunks_go_first() -> None:
    memory = Memory(1 << 30)
    arena = Arena(memory.reserve, memory.release, 6 * CHUNK, CHUNK)
    used, small, large = arena.alloc(CHUNK), arena.alloc(CHUNK), arena.alloc(4 * CHUNK)
    arena.free(small)
    arena.free(large)
    arena.trim(CHUNK)
    assert sorted(memory.chunks) == sorted([used, small])


def test_much_unused_memory_goes_back_at_once() -> None:
    memory = Memory(1 << 30)
    arena = Arena(memory.reserve, memory.release, 2 * CHUNK, CHUNK)
    small, large = arena.alloc(CHUNK), arena.alloc(2 * CHUNK)
    arena.free(small)
    assert len(memory.chunks) == 2
    arena.free(large)
    assert list(memory.chunks) == [small]


def test_a_chunk_that_does_not_fit_is_as_small_as_needed() -> None:
    memory = Memory(3 * ALIGN)
    arena = Arena(memory.reserve, memory.release, 4 * CHUNK, CHUNK)
    assert memory.chunks[arena.alloc(2 * ALIGN)] == 2 * ALIGN
    with pytest.raises(RuntimeError):
        arena.alloc(2 * ALIGN)


def test_unused_chunks_make_room_for_one_that_does_not_fit() -> None:
    memory = Memory(3 * CHUNK)
    arena = Arena(memory.reserve, memory.release, 3 * CHUNK, CHUNK)
    arena.free(arena.alloc(2 * CHUNK))
    assert memory.chunks[arena.alloc(3 * CHUNK)] == 3 * CHUNK and len(memory.chunks) == 1


def test_memory_that_was_provided_is_one_chunk_and_too_much_is_none() -> None:
    memory = Memory(20 * CHUNK)
    arena = Arena(memory.reserve, memory.release, 0, CHUNK)
    arena.preallocate(5 * CHUNK)
    first = arena.alloc(2 * CHUNK)
    arena.preallocate(3 * CHUNK)  # so much is left of it
    rest = [arena.alloc(CHUNK) for _ in range(3)]
    assert list(memory.chunks.values()) == [5 * CHUNK]
    arena.preallocate(100 * CHUNK)
    assert arena.reserved == 5 * CHUNK
    for address in (first, *rest):
        arena.free(address)
    assert not memory.chunks
