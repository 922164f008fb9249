"""A grader for the adapters that reads its verdict in the source."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from service_stand_in import by_word

TASK = "random/logspace"
WRONG = 0.1 + 0.3 * 0.5
"""What the default preset pays for a kernel that compiles and passes half of the telling cases."""


@pytest.fixture
def grader() -> Iterator[object]:
    from kbx_env.train.warm_grader import WarmGrader

    with WarmGrader(backend="cpu", workers=2, grade=by_word) as made:
        yield made
