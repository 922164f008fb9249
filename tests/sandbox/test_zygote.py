"""What a runner inherits from the zygote."""

from __future__ import annotations

from pathlib import Path

import pytest

from kbx_env.grading.grader import Grader
from kbx_env.spec.catalog import expert_source


def test_a_module_without_bytecode_is_imported_and_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Python writes a module's bytecode at its first import. In a runner that would count as a write of the submission.
    package = tmp_path / "packaging"
    (package / "__pycache__").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "version.py").write_text("Version = str\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    source = "import packaging.version\n" + (expert_source("math/abs") or "") + "\nassert packaging.version.Version is str\n"
    with Grader() as grader:
        outcome = grader.grade("math/abs", source, backend="cpu", targets=())
    assert outcome.correct, outcome.message
    assert not list(package.rglob("*.pyc"))
