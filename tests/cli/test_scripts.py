"""Scripts of eval/ and train/ as commands of kbx."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from kbx_env.__main__ import main
from kbx_env.cli.scripts import FOLDERS, scripts

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_script_is_a_command(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    have_main = {p.stem.replace("_", "-") for p in (ROOT / folder).glob("*.py") if "__main__" in p.read_text()}
    assert set(scripts(folder)) == have_main and all(scripts(folder).values())
    assert main([folder, "--help"]) == 0 and have_main <= set(capsys.readouterr().out.split())
    assert main([folder]) == 2 and "usage: kbx" in capsys.readouterr().err


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
