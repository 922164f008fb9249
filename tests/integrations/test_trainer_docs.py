"""The blocks of docs/trainers.md run as they stand, in order, each section in a folder of its own."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/trainers.md").read_text()
SECTIONS = dict(re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", PAGE, re.S | re.M))
NEEDS = {"TRL": "trl", "OpenEnv": "openenv", "verifiers": "verifiers", "verl": "pyarrow", "SkyRL-gym": "skyrl_gym"}
"""Top-level module that the blocks of a section import; the others need none."""


def _blocks(section: str) -> list[tuple[str, str]]:
    return re.findall(r"^```(bash|python)\n(.*?)^```", SECTIONS[section], re.S | re.M)


@pytest.mark.full
@pytest.mark.parametrize("section", [name for name in SECTIONS if _blocks(name)])
def test_the_blocks_run(section: str, tmp_path: Path) -> None:
    if (module := NEEDS.get(section)) is not None and importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    for folder in ("train", "examples"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    env = {
        **os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    for kind, text in _blocks(section):
        command = ["bash", "-ec", text] if kind == "bash" else [sys.executable, "-c", text]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{text}\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}"


def test_every_framework_has_a_section() -> None:
    modules = {p.stem for p in (ROOT / "kbx_env/integrations").glob("*") if p.stem not in ("__init__", "__pycache__")}
    named = set(re.findall(r"kbx_env\.integrations\.(\w+)|kbx_env\.integrations import (\w+)", PAGE))
    assert modules - {"settings", "rows", "verl_agent"} <= {a or b for a, b in named}
    assert {"TRL", "OpenEnv", "verifiers", "verl", "SkyRL-gym", "NeMo Gym", "slime"} <= set(SECTIONS)
