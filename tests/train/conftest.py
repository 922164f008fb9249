"""What the tests of training share: a tiny model from nothing, and demonstrations without the grader."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("omegaconf")
pytest.importorskip("trl")
from kbx_env.train import data, models, rows

from kbx_env.outcome import Cases, Outcome, Stage, Verdict  # noqa: E402
from kbx_env.spec.catalog import load_tasks  # noqa: E402
from kbx_env.store import Store  # noqa: E402


def approve(task: str, source: bytes, **options: object) -> Outcome:
    """A grader that finds everything right."""
    return Outcome(task, Verdict.CORRECT, Stage.EVIDENCE, "cpu", "contract", cases=Cases(1, 1))


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("models") / "tiny"
    return models.build(models.Build(str(out), hidden=32, layers=1, heads=2, vocab=600, context=4096))


@pytest.fixture(scope="session")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of demonstrations of a few short kernels."""
    out = tmp_path_factory.mktemp("data")
    tasks = load_tasks(split="train", pattern="erfc_sqrt,fused_cos_signbit,index_select,Lion,logspace,tril_mm_and_scale")
    store = Store(out / "s.sqlite")
    made = data.demonstrations(tasks, variations=1, store=store, progress=False, grade=approve)
    store.close()
    return rows.write(made.dataset, out / "demonstrations", "parquet")
