"""Shared fixtures. Tests marked ``gpu`` skip where torch finds no CUDA device."""

from __future__ import annotations

import gc
import hashlib
import itertools
import os
from collections.abc import Generator, Iterator
from types import SimpleNamespace

import pytest

# Before torch: threads of workers beside each other that wait for one another take twice the time of one each.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from triton.runtime.autotuner import Autotuner

SEED = os.environ.get("KBX_TEST_SEED", "0")


def pytest_report_header() -> str:
    return f"hidden inputs: KBX_TEST_SEED={SEED}"


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Nothing that is collected becomes garbage: looking for it among a million objects takes a quarter of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The longest first, so that none is left for one worker to end alone; together, so that they share what they start.
    items.sort(key=lambda item: item.path.parent.name != "train")
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def inputs_that_repeat(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hidden inputs by the test's name, so that a failure is one tomorrow and elsewhere; ``make soak`` draws others."""
    count = itertools.count()

    def drawn(size: int) -> bytes:
        return hashlib.shake_256(f"{SEED} {request.node.nodeid} {next(count)}".encode()).digest(size)

    monkeypatch.setattr("kbx_env.grading.grader.secrets", SimpleNamespace(token_bytes=drawn))


@pytest.fixture(autouse=True)
def autotuners_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopwatch with guards watches all autotuners of its process for good: a runner has one, a test's process many."""
    for name in ("run", "_bench"):
        monkeypatch.setattr(Autotuner, name, getattr(Autotuner, name))


@pytest.fixture(scope="session")
def grader() -> Iterator[object]:
    from kbx_env.grading.grader import Grader

    with Grader() as g:
        yield g
