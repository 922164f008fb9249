"""Loads and stores of the flat memory against a plain loop over lanes, and addresses at the ends of 64 bits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kbx_env.backends.ttir.interp.memory import BadAddress, Extent, Memory, Region

BASE, SIZE = 1 << 20, 256


def _memory(stray: int = 0) -> Memory:
    regions = [Region(base, np.arange(SIZE).astype(np.uint8)[:: 1 if base == BASE else -1].copy()) for base in (BASE, BASE << 1)]
    memory = Memory(regions)
    memory.stray = stray
    return memory


@st.composite
def _accesses(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray | None, np.dtype]:
    """Addresses in one or two regions, often in order, perhaps masked and unaligned."""
    dtype = np.dtype(draw(st.sampled_from([np.int8, np.int16, np.int32, np.int64])))
    n = draw(st.integers(1, 9))
    last = SIZE - dtype.itemsize
    if draw(st.booleans()):
        step = draw(st.sampled_from([-dtype.itemsize, 1, 3, dtype.itemsize, 2 * dtype.itemsize]))
        first = draw(st.integers(max(0, -step * (n - 1)), min(last, last - step * (n - 1))))
        offsets = first + step * np.arange(n)
    else:
        offsets = np.array(draw(st.lists(st.integers(0, last), min_size=n, max_size=n)))
    bases = np.array(draw(st.lists(st.sampled_from([BASE, BASE, BASE << 1]), min_size=n, max_size=n)))
    if draw(st.booleans()):
        bases[:] = BASE
    mask = draw(st.none() | st.lists(st.booleans(), min_size=n, max_size=n))
    return (bases + offsets).reshape(1, n).astype(np.int64), None if mask is None else np.array(mask).reshape(1, n), dtype


def _bytes(memory: Memory, address: int, size: int) -> bytes:
    region = next(r for r in memory.regions if r.base <= address < r.base + SIZE)
    return region.data[address - region.base :][:size].tobytes()


@given(_accesses())
def test_a_load_reads_each_lane(access: tuple[np.ndarray, np.ndarray | None, np.dtype]) -> None:
    addresses, mask, dtype = access
    memory = _memory()
    got = memory.load(addresses, mask, dtype, np.array(7, dtype))
    for k, address in enumerate(addresses[0].tolist()):
        on = mask is None or mask[0, k]
        want = np.frombuffer(_bytes(memory, address, dtype.itemsize), dtype)[0] if on else 7
        assert np.broadcast_to(got, addresses.shape)[0, k] == want


@given(_accesses())
def test_a_store_writes_each_lane_in_turn(access: tuple[np.ndarray, np.ndarray | None, np.dtype]) -> None:
    addresses, mask, dtype = access
    memory, plain = _memory(), _memory()
    values = (np.arange(addresses.size) + 100).astype(dtype).reshape(addresses.shape)
    memory.store(addresses, values, mask)
    # Lanes that overlap in part are left out: which of their bytes counts is not defined.
    chosen = addresses[0] if mask is None else addresses[mask]
    gaps = np.diff(np.unique(chosen))
    if gaps.size and gaps.min() < dtype.itemsize:
        return
    for k, address in enumerate(addresses[0].tolist()):
        if mask is None or mask[0, k]:
            region = next(r for r in plain.regions if r.base <= address < r.base + SIZE)
            region.data[address - region.base :][: dtype.itemsize] = np.frombuffer(values[0, k].tobytes(), np.uint8)
    assert all((a.data == b.data).all() for a, b in zip(memory.regions, plain.regions, strict=True))


@pytest.mark.parametrize("stray", [0, 64])
@pytest.mark.parametrize("within", [(), (Extent(0, BASE, SIZE, "x"),)], ids=["any", "one tensor"])
@pytest.mark.parametrize(
    ("addresses", "bad"),
    [([BASE, -(2**63)], 1), ([BASE, 2**63 - 1], 1), ([BASE, -(2**63) + 4, 7], 1), ([-(2**63), BASE], 0), ([2**63 - 2], 0)],
)
def test_an_address_at_the_end_of_64_bits_is_out_of_bounds(addresses: list[int], bad: int, within: tuple, stray: int) -> None:
    """The end of such an element is beyond 64 bits: the sum becomes negative."""
    lanes, dtype = np.array([addresses], np.int64), np.dtype(np.float32)
    with pytest.raises(BadAddress) as found:
        _memory(stray).load(lanes, None, dtype, None, within)
    assert found.value.position == bad and found.value.address == addresses[bad]
    with pytest.raises(BadAddress) as found:
        _memory(stray).store(lanes, np.zeros(lanes.shape, np.float32), None, within)
    assert found.value.position == bad
