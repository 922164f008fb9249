"""Repeated values take the memory of one period."""

from __future__ import annotations

import gc
import resource
from pathlib import Path

import numpy as np
import pytest

from kbx_env.backends.engine import repeated as module
from kbx_env.backends.engine.repeated import repeated


@pytest.mark.parametrize("count", [1, 3, 4096, 100_003, 1 << 20])
@pytest.mark.parametrize("size", [1, 5_000, (33 << 20) + 7])
def test_it_is_the_tile_over_and_over(count: int, size: int) -> None:
    tile = np.random.default_rng(count).integers(0, 256, count, np.uint8)
    found = repeated(tile.tobytes(), size)
    assert found.dtype == np.uint8 and found.shape == (size,)
    for at in {0, size // 2, size // 3, size - 1}:
        assert (found[at : at + 9000] == tile[np.arange(at, min(at + 9000, size)) % count]).all()


def test_what_is_written_is_written_once() -> None:
    found = repeated(b"ab", 80 << 20)
    found[5] = 0
    assert found[5] == 0 and (found[5 + module.PERIOD :: module.PERIOD] == ord("b")).all()


def test_gigabytes_cost_a_period_and_go_with_the_last_view() -> None:
    def maps() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:repeated")

    before, resident = maps(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    view = repeated(b"0123456789abcdef" * 1000, 3 << 30)[7:].view()
    assert view[:: 1 << 22].size == 768 and view[-1] == b"0123456789abcdef"[((3 << 30) - 1) % 16]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident < 300 << 10, "kilobytes"
    gc.collect()
    assert maps() > before
    del view
    gc.collect()
    assert maps() == before
