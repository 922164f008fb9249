"""Shared by the tests of experiments: a tiny model with random weights."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

# experiments/ is not installed: it is imported from the clone.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from kbx_env.train import models

    out = tmp_path_factory.mktemp("models") / "tiny"
    return models.build(models.Build(str(out), hidden=32, layers=1, heads=2, vocab=600, context=4096))
