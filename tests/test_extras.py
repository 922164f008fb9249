"""Messages about missing packages name a command that works, and extras that exist."""

from __future__ import annotations

import ast
import os
import re
import shlex
import tomllib
from pathlib import Path
from typing import get_args

import pytest

from kbx_env.extras import Extra, install_hint

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
SOURCES = ("kbx_env", "tasks", "rewards", "baselines", "train", "eval")
DOCS = ("docs", "examples", "experiments", "benchmarks")


def _called(path: Path) -> set[str]:
    """Extras that the calls of ``install_hint`` in a file name."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    named = [c.args for c in calls if isinstance(c.func, ast.Name) and c.func.id == "install_hint"]
    return {ast.literal_eval(a) for args in named for a in args}


def test_every_extra_that_a_message_names_exists() -> None:
    files = [p for folder in SOURCES for p in (ROOT / folder).rglob("*.py")]
    called = set().union(*(_called(p) for p in files if "install_hint" in p.read_text()))
    assert set(get_args(Extra)) == EXTRAS and called <= EXTRAS and {"trl", "report", "serve", "rllib"} <= called
    by_hand = [p for p in files if re.search(r"pip install.*kbx_env\[", p.read_text()) and p.stem != "extras"]
    assert by_hand == [], "build the command with kbx_env.extras.install_hint"


def test_every_extra_that_a_page_names_exists() -> None:
    pages = [*ROOT.glob("*.md"), *(p for folder in DOCS for p in (ROOT / folder).rglob("*.md"))]
    files = [*pages, ROOT / "Makefile", *(p for folder in SOURCES for p in (ROOT / folder).rglob("*.yaml"))]
    found = {
        (str(p.relative_to(ROOT)), name.strip())
        for p in files
        for listed in re.findall(r"pip install[^\n`]*\[([a-z, -]+)\]", p.read_text())
        for name in listed.split(",")
    }
    assert found and {(page, name) for page, name in found if name not in EXTRAS} == set()


def test_the_page_on_installing_lists_every_extra() -> None:
    table = re.findall(r"^\| (`.*?) \|", (ROOT / "docs/install.md").read_text().partition("## Extras")[2], re.MULTILINE)
    listed = {name for row in table for name in re.findall(r"`([a-z-]+)`", row)}
    assert listed >= EXTRAS


def test_a_clone_and_an_installed_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert install_hint("trl", "peft") == 'pip install -e ".[trl,peft]"'
    monkeypatch.chdir(tmp_path)
    named = shlex.split(install_hint("trl"))[-1]
    assert os.path.isdir(named.removesuffix("[trl]")) and Path(named.removesuffix("[trl]")) == ROOT
    assert install_hint("trl", package=tmp_path / "site-packages/kbx_env") == 'pip install "kbx_env[trl]"'
    with pytest.raises(ValueError, match="serve"):
        install_hint("server")  # type: ignore[arg-type]
