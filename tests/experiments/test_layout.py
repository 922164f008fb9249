"""Experiments stay apart: the package neither imports nor contains them."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_package_does_not_import_experiments() -> None:
    for folder in ("kbx_env", "tasks", "rewards", "baselines", "train", "eval"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                assert not any(name.split(".")[0] == "experiments" for name in names), f"{path}, line {node.lineno}"


def test_the_package_does_not_contain_experiments() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert not any("experiments" in name for name in [*setuptools["packages"], *setuptools["package-dir"].values()])


def test_every_study_is_described() -> None:
    text = (ROOT / "experiments/README.md").read_text()
    for folder in (p for p in (ROOT / "experiments").iterdir() if (p / "__init__.py").is_file()):
        assert f"\n## {folder.name}\n" in text
