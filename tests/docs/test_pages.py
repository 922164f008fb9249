"""The blocks of README.md and of the tutorial run as they stand, in order, and print what the page says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from doc_blocks import missing

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```(bash|python|text)\n(.*?)^```$", re.S | re.M)
LEFT_OUT = ("make ", "source .venv", "pip install")
"""Begin lines that are not run: tests do not install, and do not run all tests or the demo."""


@pytest.mark.full
@pytest.mark.parametrize("page", ["README.md", "docs/tutorial.md"])
def test_the_blocks_run_and_print_what_the_page_says(page: str, tmp_path: Path) -> None:
    for folder in ("train", "baselines", "eval"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    env = {
        **os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "COLUMNS": "120",
    }  # fmt: skip
    printed: str | None = None
    for kind, text in BLOCK.findall((ROOT / page).read_text()):
        if kind == "text":
            assert printed is None or not missing(text, printed), printed
            continue
        text = "".join(line for line in text.splitlines(keepends=True) if not line.startswith(LEFT_OUT))
        if not text.strip():
            printed = None
            continue
        command = ["bash", "-ec", text] if kind == "bash" else [sys.executable, "-c", text]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{text}\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}"
        printed = done.stdout
