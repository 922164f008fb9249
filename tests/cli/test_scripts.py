"""Scripts of eval/ and train/ as commands of kbx."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

import pytest

from kbx_env.__main__ import main
from kbx_env.cli.scripts import FOLDERS, scripts

ROOT = Path(__file__).resolve().parents[2]


def runnable(folder: str) -> dict[str, str]:
    """Modules below a folder that do something when they are run, by the name that a command should have."""
    found = {}
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            guard = isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)
            if guard or (isinstance(node, ast.FunctionDef) and node.name == "main") or path.name == "__main__.py":
                found[path.relative_to(ROOT / folder).with_suffix("").as_posix().replace("_", "-")] = path.stem
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_script_is_a_command(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = runnable(folder)
    assert len(wanted) >= 5 and set(scripts(folder)) == set(wanted) and all(scripts(folder).values())
    assert main([folder, "--help"]) == 0 and set(wanted) <= set(capsys.readouterr().out.split())
    assert main([folder]) == 2 and "usage: kbx" in capsys.readouterr().err


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_script_tells_its_usage(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    for name in scripts(folder):
        try:
            status = main([folder, name, "--help"])
        except SystemExit as stopped:  # of argparse
            status = int(stopped.code or 0)
        said = capsys.readouterr().out
        assert status == 0, name
        assert f"usage: kbx {folder} {name} [" in said, f"{name} names another command"


def test_a_report_is_written(tmp_path: Path) -> None:
    before = list(sys.argv)
    argv = ["report", "--policy", "zeros", "--backend", "cpu", "--split", "all", "--tasks", "math/abs"]
    assert main([*argv, "--out", str(tmp_path / "r")]) == 0 and sys.argv == before
    assert json.loads((tmp_path / "r" / "report.json").read_text())["summary"]["n"] == 1


def test_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "grppo"]) == 2
    assert "grpo" in capsys.readouterr().err
    assert main(["train", "grpo", "reward=defualt", "model=nowhere"]) == 2
    with pytest.raises(SystemExit) as stopped:
        main(["eval", "leaderboard", "--no-such-option"])
    assert stopped.value.code == 2
