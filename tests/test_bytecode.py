"""Processes of the grader find compiled modules where the installation has none."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from kbx_env import bytecode


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installation whose torch has no bytecode, and a folder for temporary files."""
    (tmp_path / "torch").mkdir()
    source = tmp_path / "torch" / "__init__.py"
    source.write_text("")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(origin=str(source)))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_where_torch_is_compiled_nothing_changes() -> None:
    assert bytecode.with_bytecode({"A": "b"}) == {"A": "b"} or not bytecode.compiled()


def test_a_process_keeps_its_bytecode_where_the_installation_has_none(bare: Path) -> None:
    env = bytecode.with_bytecode({**os.environ, bytecode.NO_BYTECODE: "1", "PYTHONPATH": str(bare)})
    (bare / "module.py").write_text("x = 1")
    subprocess.run([sys.executable, "-c", "import module"], env=env, check=True)
    kept = Path(env[bytecode.PREFIX])
    assert any(kept.rglob("module.*.pyc")) and kept.stat().st_mode & 0o077 == 0


def test_a_folder_that_others_can_write_is_not_used(bare: Path) -> None:
    Path(bytecode.with_bytecode({})[bytecode.PREFIX]).chmod(0o777)
    assert bytecode.with_bytecode({bytecode.NO_BYTECODE: "1"}) == {bytecode.NO_BYTECODE: "1"}


def test_a_folder_that_the_user_chose_stays(bare: Path) -> None:
    assert bytecode.with_bytecode({bytecode.PREFIX: "mine"}) == {bytecode.PREFIX: "mine"}
