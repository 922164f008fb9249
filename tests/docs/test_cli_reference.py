"""The command line's reference, which the documentation site makes from the parsers."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from kbx_env.cli import scripts

ROOT = Path(__file__).resolve().parents[2]


def _page() -> str:
    spec = importlib.util.spec_from_file_location("cli_reference", ROOT / "docs/site/cli_reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return str(module.page())


def test_every_command_and_its_arguments_are_there() -> None:
    page = _page()
    for heading in ("## kbx grade", "### kbx store prune", "## kbx serve", "## kbx report"):
        assert f"\n{heading}\n" in page
    for folder in scripts.FOLDERS:
        for name in scripts.scripts(folder):
            assert f"\n### kbx {folder} {name}\n" in page or name in scripts.DIRECT
    assert "| `--policy" in page.partition("## kbx report")[2].partition("\n## ")[0]
    assert "| `max_turns` |" in page.partition("### kbx train grpo")[2]
    assert "\n| `task` | category/name; the command tasks lists them |\n" in page
