"""What the device's driver says, without a device."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kbx_env.device import driver
from kbx_env.device.driver import KEPT_CACHE_BYTES, Driver, bind


def test_a_code_other_than_zero_is_an_error_and_zero_is_none() -> None:
    libc = ctypes.CDLL(None)
    call = bind(libc, "abs", ctypes.c_int)
    assert call(0) is None
    with pytest.raises(RuntimeError, match=r"abs failed with error 7$"):
        call(-7)
    with pytest.raises(RuntimeError, match="out of memory"):
        call(2)


class Graphs(Driver):
    """A driver whose graphs are numbers, and whose calls of torch are written down."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self._graphs, self._latest_graph, self.emptied, self.unused = 0, None, 0, 0
        self._cache_limit = KEPT_CACHE_BYTES
        self._side = SimpleNamespace(stream_id=1, device_index=0, device_type=1)
        self._arena: Any = SimpleNamespace(trim=lambda keep: None)

    def _graph(self) -> int:
        self._graphs += 1
        return self._graphs

    def _begin(self, graph: int, *, pool: Any, capture_error_mode: str) -> None:
        self.asked.append((graph, pool))

    def _pool(self, graph: int) -> str:
        return f"pool of {graph}"

    def _end(self, graph: int) -> None: ...

    def _play(self, graph: int) -> None:
        self.asked.append(f"replay {graph}")

    def _set_stream(self, **stream: int) -> None: ...

    def _empty_cache(self) -> None: ...

    def use_default_stream(self) -> None: ...

    def sync(self) -> None: ...

    def reserved_bytes(self) -> int:
        return self.unused

    def _statistics(self, device: int) -> dict[str, Any]:
        return {"allocated_bytes": {"all": {"current": 0}}}


def test_a_graph_gets_the_memory_of_the_latest_one_if_that_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch would free the memory of each graph, and ask the driver for that of the next."""
    monkeypatch.setattr(driver, "empty_bytes", lambda size, device: None)
    device = Graphs()

    def failing() -> None:
        raise ValueError("reads back")

    for reserve in (1000, 600, 1000, 1001, 0, 500):
        device.capture(lambda: None, reserve)
    # The second one has room for 1000 bytes as well. More than the latest has, or nothing, gets a pool of its own.
    assert device.asked == [(1, None), (2, "pool of 1"), (3, "pool of 2"), (4, None), (5, None), (6, None)]
    with pytest.raises(ValueError, match="reads back"):
        device.capture(failing, 100)
    device.capture(lambda: None, 100)
    assert device.asked[-2:] == [(7, "pool of 6"), (8, None)], "nothing is known of the memory of a capture that failed"
    device.give_back(1)
    device.capture(lambda: None, 100)()
    assert device.asked[-2:] == [(9, "pool of 8"), "replay 9"]
    device.give_back()
    device.capture(lambda: None, 100)
    assert device.asked[-1] == (10, None)


def test_memory_of_the_latest_graph_does_not_count_as_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "empty_bytes", lambda size, device: None)
    device = Graphs()
    device.capture(lambda: None, 1000)
    device.unused = KEPT_CACHE_BYTES + 1000
    device.capture(lambda: None, 1000)
    assert device.emptied == 0
    device.unused += 1
    device.capture(lambda: None, 1000)
    assert device.emptied == 1
    device.set_cache_limit(KEPT_CACHE_BYTES + 1)  # where there is ample memory
    device.capture(lambda: None, 1000)
    assert device.emptied == 1


@pytest.mark.gpu
def test_memory_on_a_gpu_is_asked_for_once_and_given_back() -> None:
    """What the tests above assume of torch: pools of graphs are used again, and results apart keep no other memory."""
    device, mib = driver.process_driver(), 1 << 20
    device.give_back()
    before = device.reserved_bytes()
    driver.empty_bytes(512 * mib, "cuda")  # freed at once, as a pool is
    result = device.empty_outside_pool(mib)
    device.give_back()
    assert device.reserved_bytes() - before <= 32 * mib, "the result keeps its own piece, not the pool"
    del result
    device.give_back()
    x, made = torch.zeros(mib, device="cuda"), list[torch.Tensor]()

    def body() -> None:
        made.extend(x + k for k in range(4))

    sizes = []
    for reserve in (16 * mib, 16 * mib, 8 * mib, 64 * mib):
        made.clear()
        replay = device.capture(body, reserve)
        replay()
        device.sync()
        assert [float(t[0]) for t in made] == [0, 1, 2, 3]
        sizes.append(device.reserved_bytes())
    assert sizes[0] == sizes[1] == sizes[2] < sizes[3]
    made.clear()
    del replay
    device.give_back()
    assert device.reserved_bytes() - before <= 32 * mib
