"""How many workers grade by default."""

from __future__ import annotations

import os

import pytest

from kbx_env.executor.worker_count import default_workers


@pytest.mark.parametrize(
    ("backend", "gpus", "processes", "found"),
    [("cpu", 1, 1, 192), ("cpu", 1, 8, 24), ("cuda", 1, 1, 16), ("cuda", 8, 1, 16), ("cuda", 16, 1, 11), ("cuda", 400, 1, 1)],
)
def test_a_gpu_has_no_more_than_its_memory_holds(
    backend: str, gpus: int, processes: int, found: int, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr(os, "cpu_count", lambda: 192)
    assert default_workers(backend, gpus, processes) == found


def test_where_cores_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert default_workers("cpu") == default_workers("cuda") == 1
