"""Fixtures and hooks for all tests: the choice of the tier, repeatable hidden inputs, and a shared grader.

Tests marked ``gpu`` are skipped where torch finds no CUDA device.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import itertools
import os
from collections import defaultdict
from collections.abc import Generator, Iterator
from contextvars import ContextVar
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

# Set before torch is imported: with several threads in each of two workers on two cores the tests take twice as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from tiers import Tiers
from triton.runtime.autotuner import Autotuner

if TYPE_CHECKING:
    from kbx_env.outcome import Outcome

TIERS = pytest.StashKey[Tiers]()
SEED = os.environ.get("KBX_TEST_SEED", "0")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all", action="store_true", help="run all tests, not only the default tier (tests/helpers/tiers.py)"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[TIERS] = Tiers(config)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    # At the end: pytest shows no header with -q, which pyproject.toml sets.
    for line in (f"hidden inputs: KBX_TEST_SEED={SEED}", *config.stash[TIERS].summary()):
        terminalreporter.write_line(line)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Collect without garbage collection: nothing collected is garbage, and the search takes a quarter of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items[:], left = config.stash[TIERS].split(items)
    if left:
        config.hook.pytest_deselected(items=left)
    # Training tests are the longest. They run first, so that no worker runs one alone at the end, and together, so that
    # they share their fixtures.
    items.sort(key=lambda item: item.path.parent.name != "train")
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def inputs_that_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make hidden inputs a function of ``KBX_TEST_SEED``, the task, and how often this test has graded the task before.

    A failure repeats tomorrow, on another machine, and after the test got another name. ``make soak`` draws new inputs.
    Worker processes of the executor are not reached: their inputs are secret and fresh as in production.
    """
    from kbx_env.grading.grader import Grader

    graded: ContextVar[str] = ContextVar("graded")
    count: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
    grade = Grader.grade

    @functools.wraps(grade)
    def noted(self: Grader, task_id: str, *args: Any, **options: Any) -> Outcome:
        graded.set(task_id)
        return grade(self, task_id, *args, **options)

    def drawn(size: int) -> bytes:
        task = graded.get()
        return hashlib.shake_256(f"{SEED} {task} {next(count[task])}".encode()).digest(size)

    monkeypatch.setattr(Grader, "grade", noted)
    monkeypatch.setattr("kbx_env.grading.grader.secrets", SimpleNamespace(token_bytes=drawn))


@pytest.fixture(autouse=True)
def autotuners_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore Triton's autotuner: a stopwatch with guards patches it for the life of its process, here for one test."""
    for name in ("run", "_bench"):
        monkeypatch.setattr(Autotuner, name, getattr(Autotuner, name))


@pytest.fixture(scope="session")
def grader() -> Iterator[object]:
    from kbx_env.grading.grader import Grader

    with Grader() as g:
        yield g


@pytest.fixture
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports without figures, for tests of other parts: figures take nine tenths of the time of a small report."""
    from kbx_env.eval import pages

    monkeypatch.setattr(pages, "_figures", lambda study, out: {})
