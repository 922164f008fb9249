"""What is installed: the wheel holds every file that the clone has, and works from another folder."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SOURCES = ("kbx_env", "tasks", "rewards", "baselines", "train", "eval")


def _installed() -> set[Path]:
    """Files that setuptools installs by the lists of pyproject.toml."""
    setuptools = PROJECT["tool"]["setuptools"]
    found: set[Path] = set()
    for package in setuptools["packages"]:
        folder = ROOT / setuptools["package-dir"].get(package, package.replace(".", "/"))
        assert (folder / "__init__.py").is_file(), f"pyproject.toml lists {package}, which is no package"
        for pattern in ("*.py", *setuptools["package-data"].get(package, ())):
            found |= set(folder.glob(pattern))
    return found


def test_every_file_of_the_installed_folders_is_in_the_wheel() -> None:
    here = {p for folder in SOURCES for p in (ROOT / folder).rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    assert here - _installed() == set(), "list these in pyproject.toml, under packages or package-data"


def test_the_extra_of_the_tests_serves_the_demo_too() -> None:
    """``make demo`` after ``make install`` installs nothing."""
    extras = PROJECT["project"]["optional-dependencies"]
    assert set(extras["report"]) <= set(extras["dev"])


@pytest.mark.full
@pytest.mark.skipif(not all(map(importlib.util.find_spec, ("build", "twine"))), reason="needs the extra dev")
def test_the_distributions_work_from_another_folder() -> None:
    command = [sys.executable, str(ROOT / ".ci/check_package.py"), "--scripts"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
